"""From what the provider says of a person to a user with roles."""

from __future__ import annotations

import unicodedata
from typing import Any

from django.conf import settings
from django.contrib.admin.models import CHANGE
from django.contrib.auth.models import Group, User
from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import connection, transaction

from inference_site.people.login_log import write
from inference_site.people.models import Identity

EVERYBODY = "*"
"""In ``OIDC_ROLES``, stands for all whom the provider lets in."""
_NO_ROLE = "None of your groups has a role here. Ask an administrator for one."


class Refused(Exception):
    """The provider knows the person, and the site does not let them in; the text says why."""


def user_of(issuer: str, claims: dict[str, Any]) -> User:
    """Return the user of these claims, with the roles that the provider's groups give.

    The subject finds a user who has come in this way before. The first time, an e-mail address
    that the provider has verified finds the user of that address; any other person becomes a new
    user, if a role is for them. Raise Refused if none is, or if the user is deactivated.
    """
    with transaction.atomic():
        with connection.cursor() as cursor:  # Two logins of one person must not make two users.
            cursor.execute("SELECT pg_advisory_xact_lock(hashtext('single sign-on'))")
        user = _found_or_new(issuer, claims)
        _set_roles(user, claims)
    # After the commit: roles that the provider has taken away stay away.
    if not (user.is_superuser or user.groups.exists() or user.user_permissions.exists()):
        raise Refused(_NO_ROLE)
    return user


def _found_or_new(issuer: str, claims: dict[str, Any]) -> User:
    subject = claims["sub"]
    if not isinstance(subject, str) or not 0 < len(subject) <= 255 or "\0" in subject:
        raise Refused("The provider's name for you is not one of OpenID Connect.")
    identity = Identity.objects.filter(issuer=issuer, subject=subject).first()
    user = (_of_email(claims) or _new_user(claims)) if identity is None else identity.user
    if not (user.is_active and user.is_staff):
        raise Refused("Your user has been deactivated.")
    if identity is None:
        Identity.objects.create(user=user, issuer=issuer, subject=subject)
    return user


def _of_email(claims: dict[str, Any]) -> User | None:
    email = _verified_email(claims)
    if not email:
        return None
    found = User.objects.filter(email__iexact=email)
    same = [user for user in found if _folded(user.email) == _folded(email)]
    if len(same) > 1:
        raise Refused("Several users have your e-mail address. Ask an administrator.")
    return same[0] if same else None


def _verified_email(claims: dict[str, Any]) -> str:
    """Return the address if the provider says that it is the person's, else nothing."""
    email = _text(claims, "email", 254)
    try:
        validate_email(email)
    except ValidationError:
        return ""
    return email if claims.get("email_verified") in (True, "true") else ""


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _new_user(claims: dict[str, Any]) -> User:
    """Create a user of a name that nobody has, whatever name the provider says."""
    if not Group.objects.filter(name__in=_roles(claims)).exists():
        raise Refused(_NO_ROLE)
    email = _verified_email(claims)
    wanted = _text(claims, "preferred_username", 140) or email or claims["sub"]
    base = "".join(c for c in wanted if c.isalnum() or c in "@.+-_")[:140] or "user"
    name, number = base, 1
    while User.objects.filter(username__iexact=name).exists():
        number += 1
        name = f"{base}-{number}"
    user = User(username=name, email=email, is_staff=True)
    user.first_name = _text(claims, "given_name", 150)
    user.last_name = _text(claims, "family_name", 150)
    user.set_unusable_password()
    user.save()
    return user


def _text(claims: dict[str, Any], name: str, most: int) -> str:
    """Return a claim as PostgreSQL can keep it; nothing for what is no text."""
    value = claims.get(name)
    return value.replace("\0", "")[:most] if isinstance(value, str) else ""


def _roles(claims: dict[str, Any]) -> set[str]:
    """Return the names of the roles that the settings have for the person's groups."""
    given = claims.get(settings.OIDC_GROUPS_CLAIM)
    groups = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    names = [group for group in (*groups, EVERYBODY) if isinstance(group, str)]
    return {settings.OIDC_ROLES[name] for name in names if name in settings.OIDC_ROLES}


def _set_roles(user: User, claims: dict[str, Any]) -> None:
    """Give the roles of the groups, and take the others that the settings name."""
    before = set(user.groups.values_list("name", flat=True))
    kept = before - set(settings.OIDC_ROLES.values())
    groups = Group.objects.filter(name__in=kept | _roles(claims))
    after = {group.name for group in groups}
    if after != before:
        user.groups.set(groups)
        old, new = (", ".join(sorted(names)) or "empty" for names in (before, after))
        write(user, CHANGE, f"Roles: {old} → {new}, by the groups of the provider.")
