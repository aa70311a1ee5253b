"""Authentication: an API key for the API, a staff session for the console's own endpoints.

Paths under ``/console/`` go through the relay like those of the API, so that their streams need no
thread. Django's middleware does not run there, so ``StaffSession`` reads the session itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib.auth import get_user
from django.contrib.sessions.middleware import SessionMiddleware
from django.http import HttpRequest, HttpResponse
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.exceptions import PermissionDenied, UnsupportedMediaType
from rest_framework.permissions import BasePermission

from inference_site.accounts.keys import Caller, find_caller, read_secret
from inference_site.accounts.models import Scope
from inference_site.core.errors.api_errors import AuthenticationError, ForbiddenError

if TYPE_CHECKING:
    from django.contrib.auth.base_user import AbstractBaseUser
    from rest_framework.request import Request
    from rest_framework.views import APIView


class KeyAuthentication(BaseAuthentication):
    """Authenticates by API key, in ``Authorization: Bearer`` or ``x-api-key``; never by session."""

    def authenticate(self, request: Request) -> tuple[Caller, None]:
        """Return the caller. Raise AuthenticationError if the key is missing or not valid."""
        meta = request.META
        authorization, api_key = meta.get("HTTP_AUTHORIZATION", ""), meta.get("HTTP_X_API_KEY", "")
        return authenticate_headers(authorization, api_key), None

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


class HasScope(BasePermission):
    """Requires that the key has the view's ``scope``; the default is ``inference``."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        """Return True. Raise AuthenticationError or, without the scope, ForbiddenError."""
        if request.user is None:
            raise AuthenticationError
        require_scope(caller_of(request), getattr(view, "scope", Scope.INFERENCE))
        return True


def require_scope(caller: Caller, scope: Scope) -> None:
    """Raise ForbiddenError when the caller's key lacks this scope."""
    if scope not in caller.scopes:
        raise ForbiddenError(f"This API key lacks the scope '{scope.value}'.")


def caller_of(request: Request) -> Caller:
    """Return the caller of an authenticated request."""
    caller: Caller = request.user  # type: ignore[assignment]  # Set by KeyAuthentication.
    return caller


def authenticate_headers(authorization: str, api_key: str) -> Caller:
    """Return the caller for the values of the two headers. Raise AuthenticationError."""
    secret = read_secret(authorization, api_key)
    caller = find_caller(secret)
    if caller is None:
        # Enough of the key for its owner to recognise it.
        masked = f"{secret[:5]}***{secret[-2:]}" if len(secret) > 16 else "***"
        raise AuthenticationError(f"Incorrect API key provided: {masked}.", code="invalid_api_key")
    return caller


def _no_response(_: HttpRequest) -> HttpResponse:
    raise NotImplementedError("Only the middleware's process_request is used.")


_sessions = SessionMiddleware(_no_response)


class StaffSession(BaseAuthentication):
    """Authenticates staff by the admin's session; writes need the CSRF token too."""

    def authenticate(self, request: Request) -> tuple[AbstractBaseUser, None]:
        """Return the user. Raise AuthenticationError or, without the CSRF token, ForbiddenError."""
        _sessions.process_request(request)
        user = get_user(request)
        if not (user.is_active and getattr(user, "is_staff", False)):
            raise AuthenticationError("Log in to the admin.")
        try:
            SessionAuthentication().enforce_csrf(request)
        except PermissionDenied as exc:
            raise ForbiddenError(str(exc.detail), code="csrf_failed") from exc
        except UnsupportedMediaType as exc:  # It looks for the token in a form.
            raise ForbiddenError("CSRF Failed: CSRF token missing.", code="csrf_failed") from exc
        return user, None


class HasPermission(BasePermission):
    """Requires that the user has the view's ``permissions``."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        """Return True. Raise ForbiddenError."""
        if not request.user.has_perms(view.permissions):  # type: ignore[attr-defined]
            raise ForbiddenError("Your user may not do this.", code="permission_denied")
        return True
