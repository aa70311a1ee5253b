"""Streams that began before their reader came: from the event log, or made anew."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence

from django.conf import settings
from django.utils import timezone

from inference_site.gateway.hub.follower import Follower
from inference_site.gateway.hub.hub import hub
from inference_site.generations.models import Generation
from inference_site.streams.batches import Batch, is_whole
from inference_site.streams.event_log import follow, outline

_CLOSING_S = 5
"""Within this time of its end a stream is closed in the log, unless Redis is away."""


def attach(
    follower: Follower, replay: Callable[[], list[Batch] | None], *, has_ended: bool
) -> list[Batch] | None:
    """Have a reader begin with what the log has, and go on live; return what it is not to read.

    That is the last batch, when nothing else is left of the stream, or what ``replay`` makes of a
    generation that has ended, and whose log does not have all frames and the end. For views. Raise
    RedisError.
    """
    public_id = follower.generation_id
    logged = outline(public_id)
    if has_ended and not (logged and is_whole(logged) and not _is_cut_off(public_id, logged)):
        return replay()
    if logged and logged[-1].ending and logged[-1].next <= follower.next_number:
        return logged[-1:]
    # It may have ended, and its log be closed only soon.
    follow(public_id, hub.channel)
    follower.is_behind = True
    return []


def _is_cut_off(public_id: str, logged: Sequence[Batch]) -> bool:
    """Whether the log of one that has ended will never say so: its worker died just before that,
    or Redis was away."""
    if logged[-1].ending is not None:
        return False
    patience = dt.timedelta(seconds=settings.EVENT_LOG_PATIENCE_S + _CLOSING_S)
    ended = Generation.objects.filter(public_id=public_id)
    return ended.filter(finished_at__lt=timezone.now() - patience).exists()
