"""How deltas become what goes over the wire: the contract between the worker and the API apps.

An API app registers, for each kind of generation it enqueues, how its assembler is made from the
request document. The assembler runs once, in the worker, for streaming and non-streaming clients
alike: what was streamed and what is stored cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from worker.generation import Delta


@dataclass(frozen=True, slots=True)
class Ending:
    """How a stream ends.

    ``frames`` close an event stream. ``status`` and ``body`` are the answer to a client that does
    not stream, or, when ``is_early``, to one whose stream has nothing in it but the failure.
    ``error_code`` is empty unless it failed, ``finish_reason`` unless it completed.
    ``retry_after_s`` is what a client is told with a 503 or 504.
    """

    frames: Sequence[bytes]
    status: int
    body: bytes
    finish_reason: str = ""
    error_code: str = ""
    is_early: bool = False
    retry_after_s: int | None = None


class Assembler(Protocol):
    """A fold over the deltas of one generation."""

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the frames to send now (none when nothing is streamed)."""

    def complete(self) -> Ending:
        """End after the engine's last delta."""

    def cancel(self) -> Ending:
        """End because the client or an operator stopped it."""

    def fail(self, error: Exception) -> Ending:
        """End because of this error."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How generations of one kind are assembled, and kept.

    ``assembler`` takes the ``assembly`` of the request document; ``failure`` ends a generation
    whose document is gone, or that never reached a worker. ``store`` keeps a completed one, in the
    transaction of its final row, when the document has a ``store``, which it is given.
    """

    assembler: Callable[[dict[str, Any]], Assembler]
    failure: Callable[[Exception], Ending]
    store: Callable[[str, Assembler, Mapping[str, Any]], None] | None = None


_kinds: dict[str, Kind] = {}


def register(name: str, kind: Kind) -> None:
    """Declare a kind of generation; an API app does it when Django starts."""
    _kinds[name] = kind


def kind_of(name: str) -> Kind:
    """Return a kind. Raise KeyError for one that no installed app registered."""
    return _kinds[name]
