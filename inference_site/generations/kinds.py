"""How deltas become what goes over the wire: the contract between the worker and the API apps.

An API app registers, for each kind of generation it enqueues, how its assembler is made from the
request document. The assembler runs once, in the worker, for streaming and non-streaming clients
alike: what was streamed and what is stored cannot differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Protocol

from django.utils.module_loading import import_string

from inference_site.domain.deltas import Delta
from inference_site.streams.ending import Ending
from inference_site.streams.request_documents import AssemblyT, Document, ToStore


class Assembler(ABC):
    """A fold over the deltas of one generation."""

    def restart(self, frames: Sequence[bytes]) -> Sequence[bytes]:
        """Go on after these frames, which were sent before this attempt; return what ends them.

        Called first, and only when there are any.
        """
        return ()

    def begin(self) -> Sequence[bytes]:
        """Return the frames to send before the first delta."""
        return ()

    @abstractmethod
    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the frames to send now (none when nothing is streamed)."""

    @abstractmethod
    def complete(self) -> Ending:
        """End after the engine's last delta."""

    @abstractmethod
    def cancel(self) -> Ending:
        """End because the client or an operator stopped it."""

    @abstractmethod
    def fail(self, error: Exception) -> Ending:
        """End because of this error."""


class StoreResult(Protocol):
    """Keeps the result of a generation."""

    def __call__(
        self, generation_id: str, status: str, assembler: Assembler, store: ToStore | None
    ) -> None:
        """Keep it. Runs in the transaction of the final row, once, whatever the status is.

        ``store`` is that of the request document, or None when the document is not at hand.
        """


class Failure(Protocol):
    """Puts an error into words when there is no assembler to do it."""

    def __call__(self, error: Exception, *, first: int = 0) -> Ending:
        """Return the ending; ``first`` is the number of the first of its frames."""


@dataclass(frozen=True, slots=True)
class Kind(Generic[AssemblyT]):
    """How generations of one kind are assembled, and kept.

    ``assembler`` takes the ``assembly`` of the request document, which is of the type ``assembly``.
    ``failure`` ends a generation that has no assembler: its document is gone, it never reached a
    worker, or its frames were lost.

    Kinds whose results outlive their streams have the others too: ``store_result``; ``recover``,
    which makes an assembler from the id and the frames sent so far (None when there is too little
    to go by), for what must be ended in place of its worker; and ``rebuild``, which makes the
    request document anew when it was lost (None when that cannot be).
    """

    assembly: type[AssemblyT]
    assembler: Callable[[AssemblyT], Assembler]
    failure: Failure
    store_result: StoreResult | None = None
    recover: Callable[[str, Sequence[bytes]], Assembler | None] | None = None
    rebuild: Callable[[str], Document[AssemblyT] | None] | None = None


_paths: dict[str, str] = {}


def register(name: str, path: str) -> None:
    """Declare a kind of generation; an API app does it when Django starts.

    ``path`` is the dotted path of a mapping from names to kinds. It is imported at the first use:
    beat uses a kind only when it ends a generation, and ``serve`` none.
    """
    _paths[name] = path


@cache
def kind_of(name: str) -> Kind[Any]:
    """Return a kind. Raise KeyError for one that no installed app registered."""
    kinds: dict[str, Kind[Any]] = import_string(_paths[name])
    return kinds[name]


def import_kinds() -> None:
    """Import all kinds now, so that no generation waits for that."""
    for name in _paths:
        kind_of(name)
