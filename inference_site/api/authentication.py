"""Who calls: an API key in ``Authorization: Bearer`` or ``x-api-key``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rest_framework.authentication import BaseAuthentication
from rest_framework.permissions import BasePermission

from inference_site.accounts.keys import Caller, find_caller, given_secret
from inference_site.accounts.models import Scope
from inference_site.errors.api_errors import AuthenticationError, ForbiddenError

if TYPE_CHECKING:
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
