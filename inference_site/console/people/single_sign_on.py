"""Single sign-on: OpenID Connect's code flow with PKCE, state and nonce.

mozilla-django-oidc implements the flow. This module supplies the site's settings, the provider's
metadata and keys, the check of the ID token, and the mapping from the provider's claims to a user
with roles.

Sources: OpenID Connect Discovery 1.0; OpenID Connect Core 1.0, section 3.1.3.7; RFC 7517.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
import unicodedata
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import jwt
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

from inference_site.console.people.login import count_address, remember_browser
from inference_site.console.people.login_log import log_own_action
from inference_site.console.people.models import Identity
from inference_site.core.admin_pages.labels import duration

logger = logging.getLogger(__name__)

TIMEOUT_S = 5
_METADATA_TTL_S, _RETRY_AFTER_S = 600, 5
_REQUIRED_ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")
_ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
"""Asymmetric signatures only: ``none`` and keys that the client shares prove no origin."""
_CLOCK_SKEW_S = 60
EVERYBODY = "*"
"""The key in ``OIDC_ROLES`` that matches everybody who signs in with the provider."""
_NO_ROLE = "None of your groups has a role here. Ask an administrator for one."
_SESSION = dt.timedelta(hours=12)
"""After it, the user signs in again, which fails if the provider has removed the account."""
_FIXED_SETTINGS = {
    "OIDC_RP_SIGN_ALGO": "RS256",  # Unused: verify_id_token has the accepted algorithms.
    "OIDC_USE_PKCE": True,
    "OIDC_AUTHENTICATION_CALLBACK_URL": "admin:single_sign_on_callback",
    "LOGIN_REDIRECT_URL": "/admin/",
    "LOGIN_REDIRECT_URL_FAILURE": "/admin/login/",
}


class BadProvider(Exception):
    """The provider's metadata or keys are invalid, or it did not answer."""


class BadToken(Exception):
    """The provider has not issued this ID token for this client and login."""


class _Cache:
    """The metadata that was read last, for all threads of this process."""

    lock = threading.Lock()
    metadata: dict[str, Any] | None = None
    read_at = 0.0
    retry_at = 0.0


def metadata() -> dict[str, Any]:
    """Return the provider's metadata, at most ten minutes old.

    Raise BadProvider if it names another issuer or is incomplete, and requests.RequestException
    if it cannot be read.
    """
    with _Cache.lock:
        if _Cache.metadata is None or time.monotonic() - _Cache.read_at > _METADATA_TTL_S:
            # Without this, each thread that waits for the lock would wait for its own timeout.
            if time.monotonic() < _Cache.retry_at:
                raise BadProvider("it did not answer a moment ago")
            issuer = settings.OIDC_ISSUER
            base = issuer.rstrip("/")
            try:
                document = _get_json(f"{base}/.well-known/openid-configuration")
            except requests.RequestException:
                _Cache.retry_at = time.monotonic() + _RETRY_AFTER_S
                raise
            if not isinstance(document, dict) or str(document.get("issuer")).rstrip("/") != base:
                raise BadProvider("its description is of another issuer")
            for name in _REQUIRED_ENDPOINTS:
                scheme = urlsplit(str(document.get(name))).scheme
                if scheme not in ("https", urlsplit(issuer).scheme):
                    raise BadProvider(f"its {name} is missing, or not encrypted")
            _Cache.metadata, _Cache.read_at = document, time.monotonic()
        return _Cache.metadata


def fetch_keys() -> dict[str, Any]:
    """Return the provider's current key set. Raise as ``metadata`` does."""
    keys = _get_json(metadata()["jwks_uri"])
    if not isinstance(keys, dict):
        raise BadProvider("its keys are no set of keys")
    return keys


def _get_json(url: str) -> Any:
    response = requests.get(url, timeout=TIMEOUT_S, allow_redirects=False)
    response.raise_for_status()
    return response.json()


def signing_key(token: str, keys: dict[str, Any]) -> jwt.PyJWK:
    """Return the key of the set that the token names; if it names none, the only signing key.

    Raise BadToken unless exactly one key matches.
    """
    try:
        key_id = jwt.get_unverified_header(token).get("kid")
        candidates = jwt.PyJWKSet.from_dict(keys).keys
    except (jwt.PyJWTError, AttributeError, KeyError, TypeError, ValueError) as exc:
        raise BadToken(type(exc).__name__) from exc
    matching = [
        key
        for key in candidates
        if key.public_key_use in (None, "sig") and key_id in (None, key.key_id)
    ]
    if len(matching) != 1:
        raise BadToken(f"{len(matching)} keys of the provider fit it")
    return matching[0]


def verify_id_token(
    token: str, key: Any, *, issuer: str, client_id: str, nonce: str | None
) -> dict[str, Any]:
    """Return the claims of a token that the provider issued for this client and this login.

    Raise BadToken for any other.
    """
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=list(_ALGORITHMS),
            audience=client_id,
            issuer=issuer,
            leeway=_CLOCK_SKEW_S,
            options={"require": ["iss", "sub", "aud", "exp", "iat"]},
        )
    except (jwt.PyJWTError, TypeError, ValueError) as exc:
        raise BadToken(type(exc).__name__) from exc
    if not nonce or claims.get("nonce") != nonce:
        raise BadToken("another nonce")
    if isinstance(claims["aud"], list) and len(claims["aud"]) > 1 and claims.get("azp") is None:
        raise BadToken("several audiences, and no authorized party")
    if claims.get("azp", client_id) != client_id:
        raise BadToken("another authorized party")
    return claims


def merge_claims(token: dict[str, Any], user_info: dict[str, Any]) -> dict[str, Any]:
    """Return the claims of the ID token, overridden by those of the user info.

    ``email_verified`` is taken from the source of the e-mail address: the other one may verify a
    different address.
    """
    email_source = user_info if "email" in user_info else token
    return {**token, **user_info, "email_verified": email_source.get("email_verified")}


class Refused(Exception):
    """The provider knows the person, but the site refuses the login; the message says why."""


_FAILURES = (
    *(BadToken, BadProvider, SuspiciousOperation, requests.RequestException),
    *(KeyError, TypeError, ValueError),  # From malformed responses of the provider.
)


def user_for_claims(issuer: str, claims: dict[str, Any]) -> User:
    """Return the user for these claims, with the roles that ``OIDC_ROLES`` gives their groups.

    The subject identifies a user who has signed in before. At the first login, a verified e-mail
    address identifies an existing user; otherwise a new user is created if the groups have a role.
    Raise Refused if the user has no role or is deactivated.
    """
    subject = claims["sub"]
    if not isinstance(subject, str) or not 0 < len(subject) <= 255 or "\0" in subject:
        raise Refused("The provider's name for you is not one of OpenID Connect.")
    with transaction.atomic():
        with connection.cursor() as cursor:  # Concurrent logins must not create two users.
            cursor.execute("SELECT pg_advisory_xact_lock(hashtext('single sign-on'))")
        identity = Identity.objects.filter(issuer=issuer, subject=subject).first()
        if identity is not None:
            user = identity.user
        else:
            email = _verified_email(claims)
            user = _find_by_email(email) or _create_user(claims, email)
        if not (user.is_active and user.is_staff):
            raise Refused("Your user has been deactivated.")
        if identity is None:
            Identity.objects.create(user=user, issuer=issuer, subject=subject)
        before = set(user.groups.values_list("name", flat=True))
        kept = before - set(settings.OIDC_ROLES.values())  # Roles that OIDC_ROLES does not manage.
        groups = Group.objects.filter(name__in=kept | _roles(claims))
        after = {group.name for group in groups}
        if after != before:
            user.groups.set(groups)
            old, new = (", ".join(sorted(names)) or "empty" for names in (before, after))
            message = f"Roles: {old} → {new}, by the groups of the provider."
            log_own_action(user, CHANGE, message)
    # After the commit, so that a refused user still loses the roles.
    if not (user.is_superuser or user.groups.exists() or user.user_permissions.exists()):
        raise Refused(_NO_ROLE)
    return user


def _verified_email(claims: dict[str, Any]) -> str:
    """Return the e-mail address if the provider has verified it, else an empty string."""
    email = _text_claim(claims, "email", 254)
    try:
        validate_email(email)
    except ValidationError:
        return ""
    return email if claims.get("email_verified") in (True, "true") else ""


def _find_by_email(email: str) -> User | None:
    def fold(address: str) -> str:
        return unicodedata.normalize("NFKC", address).casefold()

    if not email:
        return None
    # The database may treat addresses as equal that differ, so they are compared here again.
    candidates = User.objects.filter(email__iexact=email)
    same = [user for user in candidates if fold(user.email) == fold(email)]
    if len(same) > 1:
        raise Refused("Several users have your e-mail address. Ask an administrator.")
    return same[0] if same else None


def _create_user(claims: dict[str, Any], email: str) -> User:
    """Create a user; its name gets a number if the preferred one is taken."""
    if not Group.objects.filter(name__in=_roles(claims)).exists():
        raise Refused(_NO_ROLE)
    preferred = _text_claim(claims, "preferred_username", 140) or email or claims["sub"]
    base = "".join(c for c in preferred if c.isalnum() or c in "@.+-_")[:140] or "user"
    name, number = base, 1
    while User.objects.filter(username__iexact=name).exists():
        number += 1
        name = f"{base}-{number}"
    user = User(username=name, email=email, is_staff=True)
    user.first_name = _text_claim(claims, "given_name", 150)
    user.last_name = _text_claim(claims, "family_name", 150)
    user.set_unusable_password()
    user.save()
    return user


def _text_claim(claims: dict[str, Any], name: str, max_length: int) -> str:
    """Return a claim without NULs, which PostgreSQL rejects; empty if it is not a text."""
    value = claims.get(name)
    return value.replace("\0", "")[:max_length] if isinstance(value, str) else ""


def _roles(claims: dict[str, Any]) -> set[str]:
    """Return the names of the roles that ``OIDC_ROLES`` gives the groups in the claims."""
    value = claims.get(settings.OIDC_GROUPS_CLAIM)
    groups = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    names = [group for group in (*groups, EVERYBODY) if isinstance(group, str)]
    return {settings.OIDC_ROLES[name] for name in names if name in settings.OIDC_ROLES}


def get_settings(name: str, *default: Any) -> Any:
    """Return a setting of mozilla-django-oidc."""
    match name:
        case "OIDC_OP_AUTHORIZATION_ENDPOINT":
            return metadata()["authorization_endpoint"]
        case "OIDC_OP_TOKEN_ENDPOINT":
            return metadata()["token_endpoint"]
        case "OIDC_OP_USER_ENDPOINT":
            return metadata().get("userinfo_endpoint")
        case "OIDC_OP_JWKS_ENDPOINT":
            return metadata()["jwks_uri"]
        case "OIDC_TOKEN_USE_BASIC_AUTH":  # The default of OpenID Connect Discovery.
            methods = metadata().get("token_endpoint_auth_methods_supported")
            return "client_secret_post" not in (methods or ["client_secret_basic"])
        case "OIDC_TIMEOUT":
            return TIMEOUT_S
        case "OIDC_RP_CLIENT_ID":
            return settings.OIDC_CLIENT_ID
        case "OIDC_RP_CLIENT_SECRET":
            return settings.OIDC_CLIENT_SECRET
        case "OIDC_RP_SCOPES":
            return settings.OIDC_SCOPES
    return _FIXED_SETTINGS.get(name, *default)


class SingleSignOnBackend(OIDCAuthenticationBackend):  # type: ignore[misc]  # Untyped base.
    """Authenticates the code that the provider has sent, and returns its user."""

    get_settings = staticmethod(get_settings)
    get_user = ModelBackend.get_user  # The library's version accepts deactivated users.

    def __init__(self) -> None:
        """Read no metadata: Django creates a backend for each request, also for passwords."""

    def authenticate(self, request: Any, nonce: str | None = None, **credentials: Any) -> Any:
        """Return the user for the code in the request; None for a password login."""
        if not nonce:
            return None
        super().__init__()
        self.UserModel = get_user_model()
        return super().authenticate(request, nonce=nonce, **credentials)

    def verify_token(self, token: str, nonce: str | None = None) -> dict[str, Any]:
        """Return the claims of an ID token. Raise BadToken if it is not for this login."""
        return verify_id_token(
            token,
            signing_key(token, fetch_keys()),
            issuer=metadata()["issuer"],
            client_id=settings.OIDC_CLIENT_ID,
            nonce=nonce,
        )

    def get_or_create_user(self, access_token: str, id_token: str, payload: dict[str, Any]) -> Any:
        """Return the user. Raise BadToken if the user info is about another subject."""
        info: dict[str, Any] = {}
        if self.OIDC_OP_USER_ENDPOINT:
            info = self.get_userinfo(access_token, id_token, payload)
            if info.get("sub") != payload["sub"]:
                raise BadToken("the user info is of somebody else")
        return user_for_claims(payload["iss"], merge_claims(payload, info))


class StartView(OIDCAuthenticationRequestView):  # type: ignore[misc]  # Untyped base.
    """Redirects the browser to the provider."""

    get_settings = staticmethod(get_settings)

    def __init__(self, **kwargs: Any) -> None:
        """Read no metadata yet: its errors are handled in ``get``."""

    def get(self, request: HttpRequest) -> HttpResponse:
        """Redirect to the provider, or to the login page with an error."""

        def redirect() -> HttpResponse:
            super(StartView, self).__init__()
            response: HttpResponse = super(StartView, self).get(request)
            return response

        return _with_errors_shown(request, redirect)


class CallbackView(OIDCAuthenticationCallbackView):  # type: ignore[misc]  # Untyped base.
    """Receives the provider's redirect with the code."""

    get_settings = staticmethod(get_settings)

    def get(self, request: HttpRequest) -> HttpResponse:
        """Log in and redirect, or redirect to the login page with an error."""
        if request.GET.get("error"):  # The library would log out a user who is logged in.
            return _with_errors_shown(request, self.login_failure)
        return _with_errors_shown(request, lambda: super(CallbackView, self).get(request))

    def login_success(self) -> HttpResponse:
        """Log in with a session of fixed length."""
        response: HttpResponse = super().login_success()
        self.request.session.set_expiry(timezone.now() + _SESSION)
        remember_browser(self.request, response)
        return response

    def login_failure(self) -> HttpResponse:
        """Redirect to the login page: the provider reported an error."""
        return _refuse(self.request, "The single sign-on was not completed.")


def _with_errors_shown(request: HttpRequest, step: Callable[[], HttpResponse]) -> HttpResponse:
    """Run a step of the flow; on an error, redirect to the login page with a message."""
    if not settings.OIDC_ISSUER:
        raise Http404("Single sign-on is not set up.")
    if wait_s := count_address(request):
        again = f"Too many logins from your address. Try again in {duration(wait_s)}."
        return _refuse(request, again)
    try:
        return step()
    except Refused as exc:
        logger.warning("single sign-on refused: %s", exc)
        return _refuse(request, str(exc))
    except _FAILURES as exc:
        detail = str(exc) if isinstance(exc, BadToken | BadProvider) else _fault_of_request(exc)
        logger.warning("single sign-on failed: %s: %s", type(exc).__name__, detail)
        return _refuse(request, "The single sign-on failed. Try again, or ask an administrator.")


def _fault_of_request(error: BaseException) -> str:
    """Return the status of the provider's answer, or why there was none.

    Texts of the libraries may contain a code or a token; those of the system and of TLS do not.
    """
    response = getattr(error, "response", None)
    if response is not None:
        return f"status {response.status_code}"
    first = error
    while (earlier := first.__cause__ or first.__context__) is not None:
        first = earlier
    is_of_system = isinstance(first, OSError) and not isinstance(first, requests.RequestException)
    return str(first) if is_of_system else "no status"


def _refuse(request: HttpRequest, text: str) -> HttpResponse:
    messages.error(request, text)
    return HttpResponseRedirect(reverse("admin:login"), status=HTTPStatus.FOUND)
