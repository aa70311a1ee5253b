"""The hand-off: how a short view leaves a long answer to the relay.

A view that has enqueued a generation answers at once, within milliseconds, with the name of the
stream that will carry the answer. Django finishes; no thread and no request context stay behind.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse

from inference_site.http.hub import Follower

SCOPE_KEY = "inference_site.handoff"


@dataclass(frozen=True, slots=True)
class HandOff:
    """Which stream to relay, and whether its client wants SSE or one JSON body."""

    follower: Follower
    stream: bool

    @property
    def generation_id(self) -> str:
        """The generation that is followed."""
        return self.follower.generation_id


class Place:
    """Where a view leaves its hand-off for the relay; lies in the ASGI scope."""

    __slots__ = ("handoff",)

    def __init__(self) -> None:
        self.handoff: HandOff | None = None


def hand_off(request: HttpRequest, handoff: HandOff) -> HttpResponse:
    """Leave the hand-off and return the response whose headers the relay will send.

    Raise RuntimeError when the request did not come through the relay.
    """
    place = getattr(request, "scope", {}).get(SCOPE_KEY)
    if not isinstance(place, Place):
        raise RuntimeError("Streams need the ASGI application of inference_site.asgi.")
    place.handoff = handoff
    return HttpResponse(status=200)
