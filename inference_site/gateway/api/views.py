"""Base classes of the API's views, and DRF's exception handler."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from inference_site.accounts.models import Scope
from inference_site.accounts.rate_limits import count_request
from inference_site.core.errors.api_errors import ANTHROPIC_VERSION, MethodNotAllowedError
from inference_site.core.errors.exceptions import api_error, log_error
from inference_site.gateway.access import note_error
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.payload import RequestT, ignored_params_header, parse
from inference_site.gateway.head import SCOPE_KEY, Head
from inference_site.gateway.idempotency.requests import HEADER, answer_once

_SELF_REFERENCES = ("head", "post", "response")
"""Attributes of a view that refer back to it: set by Django, by ``initial`` below, and by DRF."""


class ApiView(APIView):
    """A view of the API: short and synchronous, JSON in and out, authenticated by API key."""

    scope: ClassVar[Scope] = Scope.INFERENCE
    """The scope that the key must have."""

    counts_writes: ClassVar[bool] = False
    """Whether POST and DELETE count against the request limits here.

    False for views that generate: submission counts those. A POST that counts here only writes to
    the database; with an idempotency key, it runs in one transaction.
    """

    spools_body: ClassVar[bool] = False
    """Whether the body goes to a temporary file, and may have ``MAX_FILE_BYTES``."""

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """Handle the request, then break the reference cycles of the view.

        This frees the request and its body at once; otherwise they stay until the garbage
        collector runs, which then frees those of many requests at once.
        """
        try:
            return super().dispatch(request, *args, **kwargs)
        finally:
            getattr(self.request, "parser_context", {}).clear()  # DRF puts the request into it.
            for name in _SELF_REFERENCES:
                vars(self).pop(name, None)

    def initialize_request(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Request:
        """Return DRF's request; its sender need not be authenticated if the relay has done so."""
        made: Request = super().initialize_request(request, *args, **kwargs)
        head: Head | None = getattr(request, "scope", {}).get(SCOPE_KEY)  # None for pages.
        if head is not None and head.user is not None:
            made.user = head.user
        return made

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Authenticate, count the request, and make a POST with an idempotency key run once."""
        super().initial(request, *args, **kwargs)
        if self.counts_writes and request.method in ("POST", "DELETE"):
            self.headers = count_request(caller_of(request))  # DRF adds them to the response.
        if request.method == "POST" and HEADER in request.headers and hasattr(self, "post"):
            # The instance serves one request, and its attribute takes precedence over the method.
            vars(self)["post"] = partial(
                answer_once, self.post, caller_of(request), self.counts_writes
            )

    def parse(self, model: type[RequestT], body: Any) -> RequestT:
        """Return the body as a wire model; the answer will name the fields that are ignored."""
        parsed = parse(model, body)
        self.headers |= ignored_params_header(parsed.ignored_params)  # DRF adds them.
        return parsed

    @property
    def default_response_headers(self) -> dict[str, str]:
        """Empty: DRF would add the header ``Allow`` to every response, streams included."""
        return {}


class OpenView(ApiView):
    """A view without authentication."""

    authentication_classes = ()
    permission_classes = ()


def exception_handler(exc: Exception, context: dict[str, Any]) -> Response:
    """Return the response for an exception that a DRF view raised."""
    error = api_error(exc)
    request = context["request"]._request
    log_error(f"request {getattr(request, 'request_id', '-')}", exc, error)
    note_error(request, error)
    headers = dict(error.headers)
    if isinstance(error, MethodNotAllowedError):
        headers["Allow"] = ", ".join(context["view"].allowed_methods)
    body = error.shown_at(request.path, has_version=ANTHROPIC_VERSION in request.headers)
    return Response(body, status=error.status, headers=headers)
