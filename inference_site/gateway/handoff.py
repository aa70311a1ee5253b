"""The hand-off: what a view leaves to the relay, so that no thread waits for a generation.

A view that has enqueued a generation returns within milliseconds. It leaves the follower of the
stream that will carry the answer, or the generation that must end before the view is called again.
Django is done then: no thread and no request context stay behind.
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
from inference_site.runs.kinds import StreamForm
from inference_site.runs.streams.batches import Ending

SCOPE_KEY = "inference_site.handoff"
_PAUSE_S = 0.05

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HandOff:
    """A stream to relay, in its ``form`` if ``stream``, else as one body.

    ``opening``: frames before those that are followed. They are sent with the first frame that
    follows, so that a generation that fails before it can be answered with an HTTP status.
    ``cancels``: the generation is cancelled when the client leaves, unless the follower has a
    grace. ``form`` is that of the frames, if they are no events. ``ping`` is the event that is sent
    while nothing comes, b"" for a comment. ``comment`` returns the SSE comment for a stream without
    frames so far, b"" for the usual one; it blocks. ``closing``: frames for a stream that ends
    without any, because its reader had all of them.
    """

    follower: Follower
    stream: bool
    opening: Sequence[bytes] = ()
    cancels: bool = True
    form: StreamForm = "events"
    ping: bytes = b""
    comment: Callable[[], bytes] | None = None
    closing: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class Feed:
    """A stream that follows no generation.

    The last of ``frames`` may be an ``Ending``. Without ``stream``, its body is the answer and
    the frames are not sent. ``lines``: the frames are JSON lines instead of SSE.
    """

    frames: AsyncIterator[bytes | Ending]
    stream: bool = True
    lines: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """A generation that has to end before the view can answer; then the view is called again.

    Requests with the same ``queue_key`` are called one at a time, in the order in which they came.
    An empty ``generation_id`` means that the view may be called again at once. ``timeout_s`` counts
    from the beginning of the request.
    """

    generation_id: str
    queue_key: str
    timeout_s: float


@dataclass(slots=True)
class Outcome:
    """What a view leaves beside its response. It is passed in the ASGI scope.

    ``started_id`` is the generation that the view has started, whether or not its client follows
    it. The relay sets ``is_given_up`` when the client has left or got another answer.
    """

    handoff: HandOff | None = None
    feed: Feed | None = None
    wait: Wait | None = None
    started_id: str = ""
    is_given_up: bool = False


def hand_off(request: HttpRequest, handoff: HandOff) -> HttpResponse:
    """Leave the hand-off; return the response whose headers the relay will send.

    Raise RuntimeError when the request did not come through the relay.
    """
    outcome_of(request).handoff = handoff
    return HttpResponse(status=200)


def hand_feed(request: HttpRequest, feed: Feed) -> HttpResponse:
    """Leave a stream that follows no generation, like ``hand_off``."""
    outcome_of(request).feed = feed
    return HttpResponse(status=200)


def call_again(request: HttpRequest, wait: Wait) -> None:
    """Have the view called again after this wait; if that times out, its answer of now is sent.

    The view must not have changed anything that a second call would change once more.
    """
    outcome_of(request).wait = wait


def outcome_of(request: HttpRequest) -> Outcome:
    """Return the request's outcome. Raise RuntimeError when the relay did not call the view."""
    outcome = getattr(request, "scope", {}).get(SCOPE_KEY)
    if not isinstance(outcome, Outcome):
        raise RuntimeError("Streams need the ASGI application of inference_site.asgi.")
    return outcome


@dataclass(frozen=True, slots=True)
class CallResult(Generic[T]):
    """The answer of one call, and what it waits for, or else which generation it has started."""

    answer: T
    wait: Wait | None
    started_id: str = ""


class _WaitQueue:
    """Requests with one ``queue_key``. The first waits for the generation that holds them up."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()  # It is acquired in the order in which requests came.
        self.holder_id = ""

    def note(self, result: CallResult[T]) -> None:
        """Note which generation holds up the queue, by the latest call; "" if none is known.

        One that has ended must not stay: if it was deleted, nobody is notified of its end.
        """
        wait = result.wait
        self.holder_id = result.started_id if wait is None else wait.generation_id


_queues: WeakValueDictionary[str, _WaitQueue] = WeakValueDictionary()


async def call_until_done(call: Callable[[], Awaitable[CallResult[T]]], began_at: float) -> T:
    """Call, and call again after each generation that the call waits for; return the last answer.

    Only the first of a queue calls again; the others keep their answer when their time is up.
    ``began_at`` is a time of the monotonic clock.
    """
    result = await call()
    if result.wait is None:
        return result.answer
    deadline = began_at + result.wait.timeout_s
    queue = _queues.setdefault(result.wait.queue_key, _WaitQueue())
    queue.note(result)
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            await queue.turn.acquire()
    except TimeoutError:
        return result.answer
    try:
        known_id: str | None = None
        while result.wait is not None and (left_s := deadline - time.monotonic()) > 0:
            holder_id = queue.holder_id
            if holder_id == known_id:
                # Nothing to wait for. A stream may end a moment before its row does.
                await asyncio.sleep(_PAUSE_S)
            elif holder_id:
                await hub.wait_for_ending(holder_id, left_s)
            known_id = holder_id
            result = await call()
            queue.note(result)
        return result.answer
    finally:
        queue.turn.release()
