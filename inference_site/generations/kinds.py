"""Kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, Generic, Protocol

import orjson
from django.apps import AppConfig, apps

from inference_site.domain.deltas import Delta
from inference_site.domain.errors import Cancelled
from inference_site.errors.exceptions import api_error
from inference_site.streams.batches import Remake, Sent
from inference_site.streams.ending import Ending
from inference_site.streams.request_documents import AssemblyT, Document, ToStore


class Assembler(ABC):
    """A fold over the deltas of one generation."""

    def restart(self, sent: Sent) -> Sequence[bytes]:
        """Go on after what was sent before this attempt; return the frames that end it.

        Called first, and only when anything was. ``sent`` has no frames when they are lost.
        """
        return ()

    pieces: int = 0
    """How many pieces of output were recovered."""

    def recover(self, sent: Sent) -> None:  # noqa: B027  # Whole answers have sent nothing.
        """Go on after what was sent, in order to end what the worker that sent it did not."""

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


class Replay(Protocol):
    """Finds what the stream of a generation that has ended can be made from anew."""

    def __call__(self, public_id: str, *, is_begun: bool = False) -> Remake | None:
        """Return how; None when it is not stored, or was deleted.

        Also None for a reader who has begun to read it, if the numbers of its frames are unknown.
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
    which makes an assembler from the id and what was sent so far (None when there is too little
    to go by), for what must be ended in place of its worker; ``rebuild``, which makes the request
    document anew when it was lost (None when that cannot be); ``replay``, which makes the stream of
    one that has ended anew when its log was lost (None when it is not stored, or was deleted); and
    ``is_deleted``, whether its result may not be read any more. Streams of kinds with ``lines`` are
    lines of JSON instead of events.
    """

    assembly: type[AssemblyT]
    assembler: Callable[[AssemblyT], Assembler]
    failure: Failure
    store_result: StoreResult | None = None
    recover: Callable[[str, Sent], Assembler | None] | None = None
    rebuild: Callable[[str], Document[AssemblyT] | None] | None = None
    replay: Replay | None = None
    is_deleted: Callable[[str], bool] | None = None
    lines: bool = False


@cache
def kind_of(name: str) -> Kind[Any]:
    """Return a kind, imported when it is first asked for. Raise KeyError for an unknown one."""
    for config in apps.get_app_configs():
        if name in _names(config):
            kinds: dict[str, Kind[Any]] = import_module(f"{config.name}.kinds").KINDS
            return kinds[name]
    raise KeyError(name)


def import_kinds() -> list[Kind[Any]]:
    """Import all kinds now, so that no generation waits for that; return the first of each app."""
    firsts: list[Kind[Any]] = []
    for config in apps.get_app_configs():
        kinds = [kind_of(name) for name in _names(config)]
        firsts += kinds[:1]
    return firsts


def _names(config: AppConfig) -> Sequence[str]:
    names: Sequence[str] = getattr(config, "kinds", ())
    return names


class Mending(Protocol):
    """A module that an app names in ``mending``: about what it stores and where that is torn."""

    def contradictions(self) -> Mapping[str, int]:
        """Count what is stored and contradicts the generations, by what it is."""

    def mend(self) -> None:
        """End what is stored and contradicts the generations."""


@cache
def mendings() -> Collection[Mending]:
    """Return these modules of all apps. Beat asks each of them every second."""
    named: list[Any] = [getattr(config, "mending", None) for config in apps.get_app_configs()]
    return [import_module(name) for name in named if name]


class Retention(Protocol):
    """A module that an app names in ``retention``: it deletes what is older than it is kept for."""

    def prune(self, until: float) -> int:
        """Delete some of it until the monotonic clock passes ``until``; return how much."""


@cache
def retentions() -> Collection[Retention]:
    """Return these modules of all apps."""
    named: list[Any] = [getattr(config, "retention", None) for config in apps.get_app_configs()]
    return [import_module(name) for name in named if name]


def recovered(kind: Kind[Any], generation_id: str, sent: Sent) -> tuple[Assembler | None, int]:
    """Return what ends a generation after what was sent, and the number of its first frame.

    What can be recovered has sent something, so if its log is empty, that was lost.
    """
    if kind.recover is None:
        return None, sent.next
    if sent.next:
        return kind.recover(generation_id, sent), sent.next
    lost = sent.beyond()
    assembler = kind.recover(generation_id, lost)
    return assembler, 0 if assembler is None else lost.next


class WholeAnswerAssembler(Assembler):
    """Assembles one answer (see ``generations.kinds.Assembler``)."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """Return the answer, once all deltas have come."""

    def complete(self) -> Ending:
        """End with the answer."""
        return Ending([], 200, orjson.dumps(self.answer()), finish_reason="stop")

    def cancel(self) -> Ending:
        """End because it was stopped."""
        return cancelled(self.fail(Cancelled()))

    def fail(self, error: Exception) -> Ending:
        """End with the error."""
        return failure(error)


def cancelled(refusal: Ending, frames: Sequence[bytes] = ()) -> Ending:
    """End what was cancelled, with these frames; ``refusal`` is the kind's failure of Cancelled.

    Who cancels has left or was answered already. Somebody who sent the same request again, under
    one idempotency key, reads the error, and may try again.
    """
    return replace(refusal, frames=frames, error_code="", is_early=False)


DONE = b"data: [DONE]\n\n"
"""The last frame of every stream."""


def failure(error: Exception, partial: dict[str, Any] | None = None, *, first: int = 0) -> Ending:
    """End a completion of either kind: a status before the first byte, an event after it.

    ``partial`` is the object with what was answered until then. Events of completions have no
    numbers, so ``first`` has no meaning here (see ``generations.kinds.Failure``).
    """
    answer = api_error(error)
    envelope = answer.envelope
    if partial is not None:
        envelope["error"]["partial_response"] = partial
    body = orjson.dumps(envelope)
    event = b"data: " + body + b"\n\n"
    return Ending(
        [event, DONE],
        answer.status,
        body,
        error_code=answer.code or answer.type,
        is_early=True,
        retry_after_s=answer.retry_after_s,
    )
