"""The code flow with PKCE, state and nonce (mozilla-django-oidc).

The library has the flow. Here are what it leaves to its users, the checks of the ID token and of
whose account a person gets, and the settings of this site.
"""

from __future__ import annotations

import datetime as dt
import logging
import unicodedata
from http import HTTPStatus
from typing import Any

import requests
from django.conf import settings
from django.contrib import messages
from django.contrib.admin.models import CHANGE
from django.contrib.auth import get_user_model
from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.models import Group, User
from django.core.exceptions import SuspiciousOperation, ValidationError
from django.core.validators import validate_email
from django.db import connection, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils import timezone
from mozilla_django_oidc.auth import OIDCAuthenticationBackend
from mozilla_django_oidc.views import (
    OIDCAuthenticationCallbackView,
    OIDCAuthenticationRequestView,
)

from inference_site.admin_pages.labels import duration
from inference_site.people import openid_provider
from inference_site.people.login import of_address, remember_browser
from inference_site.people.login_log import write
from inference_site.people.models import Identity
from inference_site.people.openid_provider import (
    BadProvider,
    BadToken,
    checked_claims,
    fetched_keys,
    merged_claims,
    metadata,
    signing_key,
)

logger = logging.getLogger(__name__)

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


_SESSION = dt.timedelta(hours=12)
"""After it, the provider is asked again: who has left there is out here too."""
_FAILURES = (
    *(Refused, BadToken, BadProvider, SuspiciousOperation, requests.RequestException),
    *(KeyError, TypeError, ValueError),  # Of answers that are not what they should be.
)


def get_settings(name: str, *default: Any) -> Any:
    """Return a setting of the library."""
    match name:
        case "OIDC_OP_AUTHORIZATION_ENDPOINT":
            return metadata()["authorization_endpoint"]
        case "OIDC_OP_TOKEN_ENDPOINT":
            return metadata()["token_endpoint"]
        case "OIDC_OP_USER_ENDPOINT":
            return metadata().get("userinfo_endpoint")
        case "OIDC_OP_JWKS_ENDPOINT":
            return metadata()["jwks_uri"]
        case "OIDC_TOKEN_USE_BASIC_AUTH":  # Without the field it is what a provider takes.
            taken = metadata().get("token_endpoint_auth_methods_supported")
            return "client_secret_post" not in (taken or ["client_secret_basic"])
        case "OIDC_TIMEOUT":
            return openid_provider.TIMEOUT_S
        case "OIDC_RP_CLIENT_ID":
            return settings.OIDC_CLIENT_ID
        case "OIDC_RP_CLIENT_SECRET":
            return settings.OIDC_CLIENT_SECRET
        case "OIDC_RP_SCOPES":
            return settings.OIDC_SCOPES
    return _FIXED.get(name, *default)


_FIXED = {
    "OIDC_RP_SIGN_ALGO": "RS256",  # id_token.py has the algorithms that are taken.
    "OIDC_USE_PKCE": True,
    "OIDC_AUTHENTICATION_CALLBACK_URL": "admin:single_sign_on_callback",
    "LOGIN_REDIRECT_URL": "/admin/",
    "LOGIN_REDIRECT_URL_FAILURE": "/admin/login/",
}


class SingleSignOn(OIDCAuthenticationBackend):  # type: ignore[misc]  # It has no types.
    """Finds the user of somebody whom the provider has let in."""

    get_settings = staticmethod(get_settings)
    get_user = ModelBackend.get_user  # The library's takes users who have been deactivated too.

    def __init__(self) -> None:
        """Read nothing: Django makes a backend for each request, and the provider may be away."""

    def authenticate(self, request: Any, nonce: str | None = None, **given: Any) -> Any:
        """Return the user for the code in the request; None for a login of another kind."""
        if not nonce:
            return None
        super().__init__()
        self.UserModel = get_user_model()
        return super().authenticate(request, nonce=nonce, **given)

    def verify_token(self, token: str, nonce: str | None = None) -> dict[str, Any]:
        """Return the claims of an ID token. Raise BadToken for one that is not for this login."""
        return checked_claims(
            token,
            signing_key(token, fetched_keys()),
            issuer=metadata()["issuer"],
            client_id=settings.OIDC_CLIENT_ID,
            nonce=nonce,
        )

    def get_or_create_user(self, access_token: str, id_token: str, payload: dict[str, Any]) -> Any:
        """Return the user of the claims of token and user info, which are of one person."""
        info: dict[str, Any] = {}
        if self.OIDC_OP_USER_ENDPOINT:
            info = self.get_userinfo(access_token, id_token, payload)
            if info.get("sub") != payload["sub"]:
                raise BadToken("the user info is of somebody else")
        return user_of(payload["iss"], merged_claims(payload, info))


class Begin(OIDCAuthenticationRequestView):  # type: ignore[misc]  # It has no types.
    """Sends the browser to the provider."""

    get_settings = staticmethod(get_settings)

    def __init__(self, **kwargs: Any) -> None:
        """Read nothing yet: a provider that is away is told to whom asks."""

    def get(self, request: HttpRequest) -> HttpResponse:
        """Redirect to the provider, or to the login page with what is wrong."""
        return _guarded(request, lambda: self._redirect(request))

    def _redirect(self, request: HttpRequest) -> HttpResponse:
        super().__init__()
        answer: HttpResponse = super().get(request)
        return answer


class Callback(OIDCAuthenticationCallbackView):  # type: ignore[misc]  # It has no types.
    """Where the provider sends the browser back to."""

    get_settings = staticmethod(get_settings)

    def get(self, request: HttpRequest) -> HttpResponse:
        """Log in and go on, or go to the login page with what is wrong."""
        if request.GET.get("error"):  # The library would log out whoever is logged in.
            return _guarded(request, self.login_failure)
        return _guarded(request, lambda: super(Callback, self).get(request))

    def login_success(self) -> HttpResponse:
        """Log in for half a day."""
        answer: HttpResponse = super().login_success()
        self.request.session.set_expiry(timezone.now() + _SESSION)
        remember_browser(self.request, answer)
        return answer

    def login_failure(self) -> HttpResponse:
        """Say that the provider did not let the person in."""
        return _refused(self.request, "The single sign-on was not completed.")


def _guarded(request: HttpRequest, step: Any) -> HttpResponse:
    if not settings.OIDC_ISSUER:
        raise Http404("Single sign-on is not set up.")
    if wait_s := of_address(request):
        again = f"Too many logins from your address. Try again in {duration(wait_s)}."
        return _refused(request, again)
    try:
        answer: HttpResponse = step()
        return answer
    except Refused as exc:
        logger.warning("single sign-on refused: %s", exc)
        return _refused(request, str(exc))
    except _FAILURES as exc:
        # No more of it: an answer of the provider may have a code or a token.
        status = getattr(getattr(exc, "response", None), "status_code", "no status")
        detail = str(exc) if isinstance(exc, BadToken | BadProvider) else status
        logger.warning("single sign-on failed: %s: %s", type(exc).__name__, detail)
        return _refused(request, "The single sign-on failed. Try again, or ask an administrator.")


def _refused(request: HttpRequest, text: str) -> HttpResponse:
    messages.error(request, text)
    return HttpResponseRedirect(reverse("admin:login"), status=HTTPStatus.FOUND)
