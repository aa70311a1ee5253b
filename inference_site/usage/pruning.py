"""Retention: roll-ups, and the usage log, are kept for so long and no longer.

Rows go in batches, oldest first, each batch in a transaction of its own: a table that others write
to is never locked for longer than a batch takes.
"""

from __future__ import annotations

import datetime as dt
import math
import time
from typing import Any

from django.conf import settings
from django.db import models
from django.utils import timezone

from inference_site.generations.models import Generation
from inference_site.usage.models import LatencyRollup, Period, UsageRollup

_BATCH = 2_000
KEPT_DAYS: dict[type[models.Model], dict[str, int]] = {
    UsageRollup: {Period.MINUTE: 2, Period.HOUR: 400},
    LatencyRollup: {Period.MINUTE: 2, Period.HOUR: 35},
}
"""How long the roll-ups of each period are kept; those of days are kept for ever."""


def prune(until: float = math.inf) -> int:
    """Delete what is older than it is kept for; return how many rows that were.

    Stops at the end of a batch when the monotonic clock has passed ``until``.
    """
    now = timezone.now()
    deleted = 0
    for rollup, kept in KEPT_DAYS.items():
        for period, days in kept.items():
            limit = now - dt.timedelta(days=days)
            old = rollup._default_manager.filter(period=period, start__lt=limit)
            deleted += _delete(old.order_by("start"), until)
    if settings.USAGE_LOG_DAYS:
        deleted += _prune_log(now - dt.timedelta(days=settings.USAGE_LOG_DAYS), until)
    return deleted


def _prune_log(limit: dt.datetime, until: float) -> int:
    """Delete the generations that are older, ended and accounted."""
    deleted, after = 0, 0
    while time.monotonic() < until:
        # By id, which grows with time: what is old lies before the first that is not.
        oldest = list(Generation.objects.filter(pk__gt=after).order_by("pk")[:_BATCH])
        gone = [row.pk for row in oldest if row.is_accounted and row.created_at < limit]
        deleted += Generation.objects.filter(pk__in=gone).delete()[0]
        if len(oldest) < _BATCH or oldest[-1].created_at >= limit:
            break
        after = oldest[-1].pk
    return deleted


def _delete(rows: models.QuerySet[Any], until: float) -> int:
    deleted = 0
    while time.monotonic() < until and (ids := list(rows.values_list("pk", flat=True)[:_BATCH])):
        deleted += rows.model._default_manager.filter(pk__in=ids).delete()[0]
    return deleted
