"""The hand-off: how a short view leaves a long answer, or a wait, to the relay.

A view that has enqueued a generation answers at once, within milliseconds, with the name of the
stream that will carry the answer. Django finishes; no thread and no request context stay behind.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse

from inference_site.gateway.hub.follower import Follower
from inference_site.streams.batches import Batch, Remake
from inference_site.streams.ending import Ending

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
class Feed:
    """A stream that follows no generation.

    The last of ``frames`` may be an ``Ending``. Without ``stream``, its body is the answer and
    the frames are not sent. ``lines`` is as in a ``HandOff``.
    """

    frames: AsyncIterator[bytes | Ending]
    stream: bool = True
    lines: bool = False


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
    feed: Feed | None = None
    wait: Wait | None = None
    started_id: str = ""
    is_given_up: bool = False


def hand_off(request: HttpRequest, handoff: HandOff) -> HttpResponse:
    """Leave the hand-off and return the response whose headers the relay will send.

    Raise RuntimeError when the request did not come through the relay.
    """
    outcome_of(request).handoff = handoff
    return HttpResponse(status=200)


def hand_feed(request: HttpRequest, feed: Feed) -> HttpResponse:
    """Leave a stream that follows no generation, like ``hand_off``."""
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
