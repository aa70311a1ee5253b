"""Who calls from a page of the console: a member of the staff, by the session of the admin.

Paths under ``/console/`` go through the relay like those of the API, so that their streams need no
thread; the middleware of pages does not run there, and is not needed.
"""

from __future__ import annotations

from django.contrib.auth import get_user
from django.contrib.auth.base_user import AbstractBaseUser
from django.contrib.sessions.middleware import SessionMiddleware
from django.http import HttpRequest, HttpResponse
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.exceptions import PermissionDenied, UnsupportedMediaType
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.views import APIView

from inference_site.errors.api_errors import AuthenticationError, ForbiddenError


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
