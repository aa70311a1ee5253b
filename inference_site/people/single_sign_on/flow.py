"""The code flow with PKCE, state and nonce (mozilla-django-oidc).

The library has the flow. Here are what it leaves to its users, the checks of the ID token and of
whose account a person gets, and the settings of this site.
"""

from __future__ import annotations

import datetime as dt
import logging
from http import HTTPStatus
from typing import Any

import requests
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import get_user_model
from django.contrib.auth.backends import ModelBackend
from django.core.exceptions import SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils import timezone
from mozilla_django_oidc.auth import OIDCAuthenticationBackend
from mozilla_django_oidc.views import (
    OIDCAuthenticationCallbackView,
    OIDCAuthenticationRequestView,
)

from inference_site.admin_pages.labels import duration
from inference_site.people import tries
from inference_site.people.single_sign_on import provider
from inference_site.people.single_sign_on.id_token import (
    BadToken,
    checked_claims,
    merged_claims,
    signing_key,
)
from inference_site.people.single_sign_on.provider import (
    BadProvider,
    fetched_keys,
    metadata,
)
from inference_site.people.single_sign_on.users import Refused, user_of

logger = logging.getLogger(__name__)

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
            return provider.TIMEOUT_S
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
        tries.remember_browser(self.request, answer)
        return answer

    def login_failure(self) -> HttpResponse:
        """Say that the provider did not let the person in."""
        return _refused(self.request, "The single sign-on was not completed.")


def _guarded(request: HttpRequest, step: Any) -> HttpResponse:
    if not settings.OIDC_ISSUER:
        raise Http404("Single sign-on is not set up.")
    if wait_s := tries.of_address(request):
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
