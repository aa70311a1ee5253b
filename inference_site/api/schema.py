"""What the methods of views take and answer, declared beside them in wire models.

A declaration costs a request nothing: it is an attribute of the method, and ``openapi.py`` reads it
when the document is asked for. A method without one is not in the document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from inference_site.api.payload import WireObject
from inference_site.errors.api_errors import ApiError

declared: list[documented] = []
"""Every declaration there is; views are declared when their modules are imported."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
EntryT = TypeVar("EntryT")


@dataclass(frozen=True, slots=True, kw_only=True)
class documented:  # Reads as the decorator that it is.
    """Declares one method of a view; its docstring's first line is the summary.

    ``answer`` is the body of a 200, ``event`` that of each SSE event of a stream, ``body`` the
    request's: types of any sort that pydantic knows. Each field of ``query`` is a parameter of the
    query. ``queued`` says that a worker answers: there is a model to be found, and a queue to wait
    in. ``errors`` are those that come neither with these nor with the view's path and key. ``also``
    gives statuses that are answered with something else than the envelope.
    """

    answer: Any
    body: Any = None
    event: Any = None
    query: type[BaseModel] | None = None
    queued: bool = False
    errors: tuple[type[ApiError], ...] = ()
    also: Mapping[int, Any] = field(default_factory=dict)

    def __call__(self, method: FunctionT) -> FunctionT:
        declared.append(self)
        method.documented = self  # type: ignore[attr-defined]  # Functions take attributes.
        return method


class ErrorDetail(WireObject):
    """``error``: what is wrong, and in which field of the request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(WireObject):
    """The body of every error."""

    error: ErrorDetail


class ListObject(WireObject, Generic[EntryT]):
    """A page of a list. ``has_more`` tells whether there are entries after ``last_id``."""

    object: Literal["list"] = "list"
    data: list[EntryT]
    first_id: str | None
    last_id: str | None
    has_more: bool
