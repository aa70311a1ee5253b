"""The pages for 403 and 404 in the console, and for an unavailable database; elsewhere they are the
plain ones, which Django renders from the templates of these names."""

from __future__ import annotations

import sys
from http import HTTPStatus
from typing import Any

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.views import defaults
from django.views.csrf import csrf_failure as plain_csrf_failure

from inference_site.errors.api_errors import RETRY_AFTER_S
from inference_site.storage.postgresql import DATABASE_UNAVAILABLE

_CONSOLE = "/admin/"


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer for a page of the console that there is not."""
    if not _is_for_staff(request):
        return defaults.page_not_found(request, exception)
    return _page(
        request,
        HTTPStatus.NOT_FOUND,
        "Page not found",
        "There is no such page, or what it showed has been deleted.",
    )


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer for a page that this user may not see."""
    if not _is_for_staff(request):
        return defaults.permission_denied(request, exception)
    return _page(
        request,
        HTTPStatus.FORBIDDEN,
        "No permission",
        "Your user may not do this. An administrator can give it the permission, if there is one.",
    )


def csrf_failed(request: HttpRequest, reason: str = "") -> HttpResponse:
    """Answer for a form that is older than the login, or from elsewhere."""
    if not _is_for_staff(request):
        return plain_csrf_failure(request, reason)
    return _page(
        request,
        HTTPStatus.FORBIDDEN,
        "The form has expired",
        "You have logged in or out since it was opened. Go back, reload the page and try again.",
    )


def failed(request: HttpRequest) -> HttpResponse:
    """Answer for a page that raised: 503 while the database is unavailable, which the text says."""
    if not isinstance(sys.exception(), DATABASE_UNAVAILABLE):
        return defaults.server_error(request)
    # Plain: to render a page takes the user's rights, which are in the database.
    return HttpResponse(
        "The database is not available. Please try again in a few seconds.",
        status=HTTPStatus.SERVICE_UNAVAILABLE,
        content_type="text/plain; charset=utf-8",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def _is_for_staff(request: HttpRequest) -> bool:
    user = getattr(request, "user", None)
    is_staff = bool(getattr(user, "is_active", False) and getattr(user, "is_staff", False))
    return request.path.startswith(_CONSOLE) and is_staff


def _page(request: HttpRequest, status: HTTPStatus, title: str, text: str) -> HttpResponse:
    context: dict[str, Any] = {**admin.site.each_context(request), "title": title, "text": text}
    shown = render_to_string("console/error.html", context, request)
    return HttpResponse(shown, status=status)
