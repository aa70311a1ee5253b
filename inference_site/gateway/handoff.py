"""The hand-off: how a short view leaves a long answer to the relay.

A view that has enqueued a generation answers at once, within milliseconds, with the name of the
stream that will carry the answer. Django finishes; no thread and no request context stay behind.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse

from inference_site.gateway.follower import Follower
from inference_site.streams.event_log import Batch

SCOPE_KEY = "inference_site.handoff"


@dataclass(frozen=True, slots=True)
class HandOff:
    """Which stream to relay, and whether its client wants SSE or one JSON body.

    ``opening`` are frames before those that are followed; they tell nothing yet, and are held back
    for what may fail at once. ``known`` is what was read of the log already. ``cancels``: whoever
    follows is the one it is made for, and when that client leaves the generation is stopped, unless
    the follower has a grace.
    """

    follower: Follower
    stream: bool
    opening: Sequence[bytes] = ()
    known: Sequence[Batch] = ()
    cancels: bool = True

    @property
    def generation_id(self) -> str:
        """The generation that is followed."""
        return self.follower.generation_id


class Place:
    """Where a view leaves its hand-off, or its feed, for the relay; lies in the ASGI scope.

    ``retry_for_s`` is set by a view that must wait for something that takes less than a client's
    patience but more than a view's: the relay asks it again for as long, and then takes its answer.
    """

    __slots__ = ("feed", "handoff", "retry_for_s")

    def __init__(self) -> None:
        self.handoff: HandOff | None = None
        self.feed: AsyncIterator[bytes] | None = None
        self.retry_for_s = 0.0


def hand_off(request: HttpRequest, handoff: HandOff) -> HttpResponse:
    """Leave the hand-off and return the response whose headers the relay will send.

    Raise RuntimeError when the request did not come through the relay.
    """
    place_of(request).handoff = handoff
    return HttpResponse(status=200)


def ask_again(request: HttpRequest, within_s: float) -> None:
    """Have the relay call the view again until the request is this old, unless it hands off.

    The view must not have changed anything that calling it again would change once more.
    """
    place_of(request).retry_for_s = within_s


def place_of(request: HttpRequest) -> Place:
    """Return the place of a request. Raise RuntimeError when it did not come through the relay."""
    place = getattr(request, "scope", {}).get(SCOPE_KEY)
    if not isinstance(place, Place):
        raise RuntimeError("Streams need the ASGI application of inference_site.asgi.")
    return place
