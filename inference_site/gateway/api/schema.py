"""Declarations of the request and response types of view methods, for the OpenAPI document.

A declaration is an attribute of the method. ``openapi.py`` reads it when it builds the document, so
it costs requests nothing. Methods without a declaration are not in the document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from inference_site.core.errors.api_errors import ApiError
from inference_site.gateway.api.payload import WireObject

declared: list[documented] = []
"""All declarations; each is added when the module of its view is imported."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
EntryT = TypeVar("EntryT")


@dataclass(frozen=True, slots=True, kw_only=True)
class documented:  # Lower case, because it is used as a decorator.
    """Decorator that declares one view method; the first line of its docstring is the summary.

    ``answer`` is the body of a 200, ``event`` the data of an SSE event, ``lines`` a line of a
    stream of JSON lines, and ``body`` the request body: types that pydantic can describe. A
    ``form`` is a request body of the type ``multipart/form-data``. ``texts`` and ``binaries`` are
    media types that the answer may have instead of JSON, or, without ``answer``, has. ``error``
    is the body of errors, by default ``ErrorEnvelope``; ``also`` maps statuses to other bodies.
    Each field of ``query`` is a query parameter. ``queued`` means that a worker generates the
    answer, which adds the errors of models and the queue. ``errors`` are further errors, beyond
    those that follow from the path and the key.
    """

    answer: Any
    body: Any = None
    form: Any = None
    event: Any = None
    lines: Any = None
    texts: tuple[str, ...] = ()
    binaries: tuple[str, ...] = ()
    query: type[BaseModel] | None = None
    queued: bool = False
    errors: tuple[type[ApiError], ...] = ()
    also: Mapping[int, Any] = field(default_factory=dict)
    error: Any = None

    def __call__(self, method: FunctionT) -> FunctionT:
        declared.append(self)
        method.documented = self  # type: ignore[attr-defined]  # Functions accept attributes.
        return method


class ErrorDetail(WireObject):
    """The object ``error``: a message, a code and the request field that caused it."""

    message: str
    type: str
    param: str | None
    code: str | None


class LostUsage(WireObject):
    """Tokens of an answer whose stream was lost."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class LostErrorDetail(ErrorDetail):
    """The same for ``stream_lost`` of a generation that has ended: what it has computed."""

    usage: LostUsage


class PartialErrorDetail(ErrorDetail):
    """The same for an answer that has failed after its beginning: the incomplete object."""

    partial_response: dict[str, Any]


class ErrorEnvelope(WireObject):
    """The body of every error."""

    error: LostErrorDetail | PartialErrorDetail | ErrorDetail


class ListObject(WireObject, Generic[EntryT]):
    """A page of a list.

    ``has_more`` is true if there are entries after ``last_id``; for a query with ``before``, if
    there are entries before ``first_id``.
    """

    object: Literal["list"] = "list"
    data: list[EntryT]
    first_id: str | None
    last_id: str | None
    has_more: bool
