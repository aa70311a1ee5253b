"""Error handlers of the site: pages of the console for its staff, plain pages for everyone else.

Django renders the plain pages from the templates ``400.html``, ``403.html``, ``404.html``,
``403_csrf.html``, ``403_origin.html`` and ``500.html``.
"""

from __future__ import annotations

import sys
from http import HTTPStatus
from typing import Any

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.views import defaults
from django.views.csrf import csrf_failure as plain_csrf_failure

from inference_site.core.errors.api_errors import RETRY_AFTER_S, NotFoundError
from inference_site.core.storage.postgresql import DATABASE_UNAVAILABLE


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer with a 404; in JSON for clients of the API, of which some leave out the ``/v1``."""
    if not request.accepts("text/html"):
        unknown = NotFoundError(
            f"Invalid URL ({request.method} {request.path}). The API is below /v1."
        )
        return HttpResponse(unknown.body, content_type="application/json", status=unknown.status)
    if not _is_console_of_staff(request):
        return defaults.page_not_found(request, exception)
    return _page(
        request,
        HTTPStatus.NOT_FOUND,
        "Page not found",
        "There is no such page, or what it showed has been deleted.",
    )


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer with a 403."""
    if not _is_console_of_staff(request):
        return defaults.permission_denied(request, exception)
    return _page(
        request,
        HTTPStatus.FORBIDDEN,
        "No permission",
        "Your user may not do this. An administrator can give it the permission, if there is one.",
    )


def csrf_failed(request: HttpRequest, reason: str = "") -> HttpResponse:
    """Answer with a 403 to a form that is older than the login, or of another site.

    It is "of another site" also where a proxy does not pass on the address of this one.
    """
    if reason.startswith(("Origin checking failed", "Referer checking failed")):
        return plain_csrf_failure(request, reason, "403_origin.html")
    if not _is_console_of_staff(request):
        return plain_csrf_failure(request, reason)
    return _page(
        request,
        HTTPStatus.FORBIDDEN,
        "The form has expired",
        "You have logged in or out since it was opened. Go back, reload the page and try again.",
    )


def failed(request: HttpRequest) -> HttpResponse:
    """Answer with a 500, or with a 503 while the database is unavailable."""
    if not isinstance(sys.exception(), DATABASE_UNAVAILABLE):
        return defaults.server_error(request)
    # Plain text: a page needs the user's permissions, which are in the database.
    return HttpResponse(
        "The database is not available. Please try again in a few seconds.",
        status=HTTPStatus.SERVICE_UNAVAILABLE,
        content_type="text/plain; charset=utf-8",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def _is_console_of_staff(request: HttpRequest) -> bool:
    user = getattr(request, "user", None)  # Missing, if a middleware before the login has failed.
    is_staff = bool(getattr(user, "is_active", False) and getattr(user, "is_staff", False))
    return request.path.startswith("/admin/") and is_staff


def _page(request: HttpRequest, status: HTTPStatus, title: str, text: str) -> HttpResponse:
    context: dict[str, Any] = {**admin.site.each_context(request), "title": title, "text": text}
    return HttpResponse(render_to_string("console/error.html", context, request), status=status)
