"""Middleware: pages have more time for a statement than requests of the API."""

from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from inference_site.storage.postgresql import statement_timeout

GetResponse = Callable[[HttpRequest], HttpResponseBase]


def long_statements(get_response: GetResponse) -> GetResponse:
    """Give the statements of a page ``DATABASE_LONG_TIMEOUT_S``."""

    def respond(request: HttpRequest) -> HttpResponseBase:
        with statement_timeout(settings.DATABASE_LONG_TIMEOUT_S):
            return get_response(request)

    return respond
