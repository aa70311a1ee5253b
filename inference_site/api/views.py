"""What the views of the API have in common."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from rest_framework.request import Request
from rest_framework.views import APIView

from inference_site.accounts.models import Scope
from inference_site.api.authentication import caller_of
from inference_site.api.counting import counted
from inference_site.idempotency.requests import HEADER, answer_once

_OF_ITSELF = ("head", "post", "response")
"""Attributes by which a view refers to itself: Django's, those below, and DRF's."""


class ApiView(APIView):
    """A view of the API: short, synchronous, JSON in and out, for holders of a key."""

    scope: ClassVar[Scope] = Scope.INFERENCE
    """What the key must open."""

    counts_writes: ClassVar[bool] = False
    """Whether its POST and DELETE count as requests here. What generates counts when submitted.

    A POST that counts here only writes to the database: with an idempotency key, it is one
    transaction.
    """

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        """Answer, and leave no cycle of references.

        So what a request holds, its body above all, is freed when it is answered, not at a later
        garbage collection, which frees that of many requests at once.
        """
        try:
            return super().dispatch(request, *args, **kwargs)
        finally:
            getattr(self.request, "parser_context", {}).clear()  # DRF puts the request into it.
            for name in _OF_ITSELF:
                vars(self).pop(name, None)

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Check who calls; have a POST with an idempotency key run once."""
        super().initial(request, *args, **kwargs)
        if self.counts_writes and request.method in ("POST", "DELETE"):
            self.headers = counted(caller_of(request))  # DRF adds them to the answer.
        if request.method == "POST" and HEADER in request.headers and hasattr(self, "post"):
            # An attribute of this one view, which serves one request, goes before the method.
            vars(self)["post"] = partial(
                answer_once, self.post, caller_of(request), self.counts_writes
            )

    @property
    def default_response_headers(self) -> dict[str, str]:
        """None: DRF would name the allowed methods on every answer, streams included."""
        return {}


class OpenView(ApiView):
    """A view that needs no key."""

    authentication_classes = ()
    permission_classes = ()
