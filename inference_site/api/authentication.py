"""Who calls: an API key in ``Authorization: Bearer`` or ``x-api-key``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib.auth import get_user
from django.contrib.sessions.middleware import SessionMiddleware
from django.http import HttpRequest, HttpResponse
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.exceptions import PermissionDenied, UnsupportedMediaType
from rest_framework.permissions import BasePermission

from inference_site.accounts.keys import Caller, find_caller, given_secret
from inference_site.accounts.models import Scope
from inference_site.errors.api_errors import AuthenticationError, ForbiddenError

if TYPE_CHECKING:
    from django.contrib.auth.base_user import AbstractBaseUser
    from rest_framework.request import Request
    from rest_framework.views import APIView


class KeyAuthentication(BaseAuthentication):
    """Only a key opens the API: a session of the admin never does."""

    def authenticate(self, request: Request) -> tuple[Caller, None]:
        """Return the caller. Raise AuthenticationError without a key or with a refused one."""
        meta = request.META
        authorization = meta.get("HTTP_AUTHORIZATION", "")
        return authenticated(authorization, meta.get("HTTP_X_API_KEY", "")), None

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


class HasScope(BasePermission):
    """The key must have the ``scope`` of the view: ``inference``, unless the view names another."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        """Return True. Raise AuthenticationError without a key, ForbiddenError without it."""
        if request.user is None:
            raise AuthenticationError
        require_scope(caller_of(request), getattr(view, "scope", Scope.INFERENCE))
        return True


def require_scope(caller: Caller, scope: Scope) -> None:
    """Raise ForbiddenError when the caller's key lacks this scope."""
    if scope not in caller.scopes:
        raise ForbiddenError(f"This API key lacks the scope '{scope.value}'.")


def caller_of(request: Request) -> Caller:
    """Return who sends this request, once it is authenticated."""
    caller: Caller = request.user  # type: ignore[assignment]  # Set by KeyAuthentication.
    return caller


def authenticated(authorization: str, api_key: str) -> Caller:
    """Return the caller by the two headers. Raise AuthenticationError."""
    secret = given_secret(authorization, api_key)
    caller = find_caller(secret)
    if caller is None:
        raise AuthenticationError(
            f"Incorrect API key provided: {_masked(secret)}.", code="invalid_api_key"
        )
    return caller


def _masked(secret: str) -> str:
    """Return enough of the key for its owner to recognise it, and no more."""
    return f"{secret[:5]}***{secret[-2:]}" if len(secret) > 16 else "***"


class StaffSession(BaseAuthentication):
    """A session opens what a key does not, and never the API; writes need the CSRF token too."""

    def authenticate(self, request: Request) -> tuple[AbstractBaseUser, None]:
        """Return the user. Raise AuthenticationError without a session of the staff."""
        _sessions.process_request(request)
        user = get_user(request)
        if not (user.is_active and getattr(user, "is_staff", False)):
            raise AuthenticationError("Log in to the admin.")
        try:
            SessionAuthentication().enforce_csrf(request)
        except PermissionDenied as exc:
            raise ForbiddenError(str(exc.detail), code="csrf_failed") from exc
        except UnsupportedMediaType as exc:  # The token was looked for in a form.
            raise ForbiddenError("CSRF Failed: CSRF token missing.", code="csrf_failed") from exc
        return user, None


class HasPermission(BasePermission):
    """The user must have the ``permission`` of the view."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        """Return True. Raise ForbiddenError."""
        if not request.user.has_perms(view.permissions):  # type: ignore[attr-defined]
            raise ForbiddenError("Your user may not do this.", code="permission_denied")
        return True


def _no_response(_: HttpRequest) -> HttpResponse:
    raise NotImplementedError("Only the request's half of the middleware is used.")


_sessions = SessionMiddleware(_no_response)
