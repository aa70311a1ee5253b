"""The hand-off: how a short view leaves a long answer, or a wait, to the relay.

A view that has enqueued a generation answers at once, within milliseconds, with the name of the
stream that will carry the answer. Django finishes; no thread and no request context stay behind.

Requests that wait until a generation has ended, without a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from django.http import HttpRequest, HttpResponse

from inference_site.gateway.follower import Follower
from inference_site.gateway.hub import hub
from inference_site.streams.batches import Batch, Remake

SCOPE_KEY = "inference_site.handoff"


@dataclass(frozen=True, slots=True)
class HandOff:
    """Which stream to relay, and whether its client wants SSE or one JSON body.

    ``opening`` are the frames before those that are followed. They are sent with the first frame
    that follows, so that a generation that fails before it can still be answered with a status.
    ``known`` is what the follower gets first. With a ``remake`` the stream is made anew, as soon as
    there is room for it. ``cancels``: the generation is made for the client that follows, and is
    cancelled when that client leaves, unless the follower has a grace. With ``lines`` a stream is
    lines of JSON instead of SSE. ``comment`` returns, on a thread, the comment of a stream that has
    not begun; nothing for the usual one. ``closing`` are the frames of a stream that ends without
    any, because its reader has asked for what comes after the last.
    """

    follower: Follower
    stream: bool
    opening: Sequence[bytes] = ()
    known: Sequence[Batch] = ()
    remake: Remake | None = None
    cancels: bool = True
    lines: bool = False
    comment: Callable[[], bytes] | None = None
    closing: Sequence[bytes] = ()

    @property
    def generation_id(self) -> str:
        """The generation that is followed."""
        return self.follower.generation_id


@dataclass(frozen=True, slots=True)
class Wait:
    """A generation has to end before a view can answer; the relay calls the view again then.

    Requests that wait in the same ``line`` are called one after the other, first come, first
    served. ``generation_id`` is empty when the view may be called again at once. Nobody waits
    longer than ``at_most_s``, counted from the beginning of the request.
    """

    generation_id: str
    line: str
    at_most_s: float


@dataclass(slots=True)
class Outcome:
    """What a view leaves to the relay beside its response. It lies in the ASGI scope.

    ``started_id`` is the generation that it has started, also one that its client does not follow.
    The relay sets ``is_given_up`` when it has answered in place of the view, or the client left.
    """

    handoff: HandOff | None = None
    feed: AsyncIterator[bytes] | None = None
    wait: Wait | None = None
    started_id: str = ""
    is_given_up: bool = False


def hand_off(request: HttpRequest, handoff: HandOff) -> HttpResponse:
    """Leave the hand-off and return the response whose headers the relay will send.

    Raise RuntimeError when the request did not come through the relay.
    """
    outcome_of(request).handoff = handoff
    return HttpResponse(status=200)


def hand_feed(request: HttpRequest, feed: AsyncIterator[bytes]) -> HttpResponse:
    """Leave an SSE stream that follows no generation, like ``hand_off``."""
    outcome_of(request).feed = feed
    return HttpResponse(status=200)


def call_again(request: HttpRequest, wait: Wait) -> None:
    """Have the view called once more after this wait; its answer of now stands if that fails.

    The view must not have changed anything that calling it again would change once more.
    """
    outcome_of(request).wait = wait


def outcome_of(request: HttpRequest) -> Outcome:
    """Return what a view leaves. Raise RuntimeError when the relay did not call it."""
    outcome = getattr(request, "scope", {}).get(SCOPE_KEY)
    if not isinstance(outcome, Outcome):
        raise RuntimeError("Streams need the ASGI application of inference_site.asgi.")
    return outcome


_PAUSE_S = 0.05

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attempt(Generic[T]):
    """An answer, and what it waits for or, when it waits no more, which generation it started."""

    answer: T
    wait: Wait | None
    started_id: str = ""


class _Line:
    """Requests that wait for the same thing, and whose ending the first of them waits for."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()  # Gives its waiters their turns in the order they came.
        self.holder_id = ""

    def learn(self, attempt: Attempt[T]) -> None:
        """Note who holds up the line, as the latest attempt has found."""
        if attempt.wait is not None:
            self.holder_id = attempt.wait.generation_id
        elif attempt.started_id:
            self.holder_id = attempt.started_id


_lines: WeakValueDictionary[str, _Line] = WeakValueDictionary()


async def answer_of(call: Callable[[], Awaitable[Attempt[T]]], began_at: float) -> T:
    """Call, and again after each ending that an attempt waits for; return the last answer.

    Of a line only the first calls again; the others keep the answer they have when their time is
    up. ``began_at`` is of the monotonic clock.
    """
    attempt = await call()
    if attempt.wait is None:
        return attempt.answer
    deadline = began_at + attempt.wait.at_most_s
    line = _lines.setdefault(attempt.wait.line, _Line())
    line.learn(attempt)
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            await line.turn.acquire()
    except TimeoutError:
        return attempt.answer
    try:
        return await _first_in(line, attempt, call, deadline)
    finally:
        line.turn.release()


async def _first_in(
    line: _Line, attempt: Attempt[T], call: Callable[[], Awaitable[Attempt[T]]], deadline: float
) -> T:
    ended_id = ""
    while attempt.wait is not None and (left_s := deadline - time.monotonic()) > 0:
        if line.holder_id in ("", ended_id):
            # Nothing to wait for. A stream may end a moment before its row does.
            await asyncio.sleep(_PAUSE_S)
        else:
            ended_id = line.holder_id
            await hub.wait_for_ending(ended_id, left_s)
        attempt = await call()
        line.learn(attempt)
    return attempt.answer
