"""The contract between the tool loop and a tool that the site runs, and the types of tools.

A type is the ``type`` in the options of a request's tool; ``register`` adds one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from inference_site.core.domain.site_tools import Source, ToolResult

RESULT_FACTOR = 2
"""How many bytes the fields of a result may have as JSON, for each byte of its output."""


class ToolTimeout(Exception):
    """The call took longer than its time limit; whether it had an effect is unknown."""


class ToolCancelled(Exception):
    """The call was stopped because its response was cancelled."""


class ToolUnreachable(Exception):
    """The tool cannot be reached. Nothing was sent, so the call had no effect."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """A call, for the tool that runs it.

    ``key`` identifies the call for servers that ignore repeated requests. ``generation_id`` is the
    generation that made it. ``attempt`` counts from 1. ``timeout_s`` is the most time for the whole
    call, ``max_bytes`` the most bytes that the tool may read as its result. ``is_cancelled``
    returns whether the call must stop now; a tool asks at least once a second. ``sources`` are
    those of earlier results of the response, each URL once, in order.
    """

    key: str
    generation_id: str
    attempt: int
    timeout_s: float
    max_bytes: int
    is_cancelled: Callable[[], bool]
    sources: Sequence[Source] = ()


class SiteTool(Protocol):
    """One tool of a request, ready to be called on any thread of a worker."""

    def is_idempotent(self, name: str) -> bool:
        """Whether a call of this function whose outcome is unknown may be repeated."""

    def call(self, name: str, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        """Run the call and return its result; errors of the tool are results with ``is_error``.

        Raise ToolTimeout, ToolCancelled or ToolUnreachable (nothing was sent).
        """


Factory = Callable[[Mapping[str, Any]], SiteTool]
"""Creates a tool from its options, which are plain data; it must not connect to anything."""

_factories: dict[str, Factory] = {}


def register(type_: str, factory: Factory) -> None:
    """Add a type of tool; not for a module ``worker/tools/TYPE.py``, whose ``create`` is used."""
    _factories[type_] = factory


def create_tool(options: Mapping[str, Any]) -> SiteTool:
    """Return the tool with these options. Raise ModuleNotFoundError for an unknown type."""
    type_: str = options["type"]
    if type_ not in _factories:
        _factories[type_] = import_module(f"worker.tools.{type_}").create
    return _factories[type_](options)


def cut(text: str, max_bytes: int) -> str:
    """Return as much of the text as has this many bytes in UTF-8."""
    encoded = text.encode()
    return text if len(encoded) <= max_bytes else encoded[:max_bytes].decode(errors="ignore")
