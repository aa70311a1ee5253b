"""Logs exceptions of views and turns them into responses."""

from __future__ import annotations

import logging
from typing import Any

from django.http import HttpRequest
from rest_framework.response import Response

from inference_site.errors.api_errors import ApiError, MethodNotAllowedError
from inference_site.errors.exceptions import api_error
from inference_site.observability.logs import add_log_fields

logger = logging.getLogger(__name__)


def log_error(request: HttpRequest, exc: Exception, error: ApiError) -> None:
    """Log a server error (5xx), with a traceback if the exception was not foreseen."""
    if error.status < 500 or isinstance(exc, ApiError):
        return
    request_id = getattr(request, "request_id", "-")
    traceback = exc if error.status == 500 else None
    logger.error("request %s: %s: %s", request_id, type(exc).__name__, exc, exc_info=traceback)


def exception_handler(exc: Exception, context: dict[str, Any]) -> Response:
    """Return the response for an exception that a DRF view raised."""
    error = api_error(exc)
    request = context["request"]._request
    log_error(request, exc, error)
    add_log_fields(error_code=error.code or error.type)
    headers = dict(error.headers)
    if isinstance(error, MethodNotAllowedError):
        headers["Allow"] = ", ".join(context["view"].allowed_methods)
    return Response(error.shown_at(request.path), status=error.status, headers=headers)
