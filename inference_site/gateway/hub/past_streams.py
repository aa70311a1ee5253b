"""Streams that began before their reader came: from the event log, or made anew."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from django.conf import settings
from django.utils import timezone

from inference_site.gateway.hub.follower import ENDING_ONLY, Follower
from inference_site.gateway.hub.hub import hub
from inference_site.generations.models import Generation
from inference_site.streams.batches import Batch
from inference_site.streams.ending import Ending
from inference_site.streams.event_log import Look, follow, look

_CLOSING_S = 5
"""Within this time of its end a stream is closed in the log, unless Redis is away."""


def attach(follower: Follower, *, has_ended: bool) -> Sequence[Batch] | None:
    """Have a reader begin with what the log has, and go on live; return what else it is to read.

    That is an end without frames, when it knows all of them. Return None when the generation
    ``has_ended``, and its log has not the frame that the reader needs, or will never have the end.
    A hole that comes later in the log is found by who reads it. For views. Raise RedisError.
    """
    public_id, number = follower.generation_id, follower.next_number
    found = look(public_id, number)
    if has_ended and _is_lost(public_id, found, number):
        return None
    if found.has_ended and found.next is not None and found.next < number < ENDING_ONLY:
        return [Batch(number, (), Ending((), 200, b""))]
    if not found.has_ended:  # Its generation may have, and its log be closed only soon.
        follow(public_id, hub.channel)
    follower.is_behind = True
    return ()


def _is_lost(public_id: str, found: Look, number: int) -> bool:
    """Whether the log of one that has ended lacks what a reader needs from this frame on."""
    if found.is_empty or (found.first is not None and found.first > number):
        return True
    return not found.has_ended and _is_cut_off(public_id)


def _is_cut_off(public_id: str) -> bool:
    """Whether the log of one that has ended will never say so: its worker died just before that,
    or Redis was away."""
    patience = dt.timedelta(seconds=settings.EVENT_LOG_PATIENCE_S + _CLOSING_S)
    ended = Generation.objects.filter(public_id=public_id)
    return ended.filter(finished_at__lt=timezone.now() - patience).exists()
