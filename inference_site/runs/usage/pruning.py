"""Retention: deletes old roll-ups, generations, refused requests and failed logins.

Rows are deleted in batches, oldest first, with a transaction for each batch, so that writers of the
same table wait for one batch at most.
"""

from __future__ import annotations

import datetime as dt
import math
import time
from typing import Any

from axes.models import AccessFailureLog
from django.conf import settings
from django.db import models
from django.utils import timezone

from inference_site.core.site_settings.models import usage_log_days
from inference_site.core.storage.postgresql import delete_older
from inference_site.runs.kinds import retentions
from inference_site.runs.models import Generation
from inference_site.runs.request_log.models import Refusal
from inference_site.runs.usage.models import LatencyHistogram, Period, UsageRollup

BATCH = 2_000
KEPT_DAYS: dict[type[models.Model], dict[str, int]] = {
    UsageRollup: {Period.MINUTE: 2, Period.HOUR: 400},
    LatencyHistogram: {Period.MINUTE: 2, Period.HOUR: 35},
}
"""Retention of roll-ups in days, by period; roll-ups by day are kept for ever."""
_LOGIN_FAILURE_DAYS = 90
_MAX_RUN_S = 1.0


def prune_old() -> None:
    """Delete some of the rows past their retention, also those of the API apps. Beat calls this."""
    prune(time.monotonic() + _MAX_RUN_S)
    for app in retentions():
        app.prune(time.monotonic() + _MAX_RUN_S)


def prune(until: float = math.inf) -> int:
    """Delete rows past their retention; return the number of deleted rows.

    Stop after the batch during which the monotonic clock passes ``until``.
    """
    now = timezone.now()
    deleted = 0
    for rollup, kept in KEPT_DAYS.items():
        for period, days in kept.items():
            limit = now - dt.timedelta(days=days)
            old = rollup._default_manager.filter(period=period, start__lt=limit)
            deleted += _delete(old.order_by("start"), until)
    limit = now - dt.timedelta(days=_LOGIN_FAILURE_DAYS)
    failures = AccessFailureLog.objects.filter(attempt_time__lt=limit)
    deleted += _delete(failures.order_by("pk"), until)
    if days := usage_log_days():
        deleted += prune_log(now - dt.timedelta(days=days), until)
    if settings.REFUSALS_DAYS:
        limit = now - dt.timedelta(days=settings.REFUSALS_DAYS)
        deleted += delete_older(Refusal.objects.all(), limit, until, BATCH)
    return deleted


def prune_log(limit: dt.datetime, until: float) -> int:
    """Delete accounted generations that were created before ``limit``."""
    deleted, after = 0, 0
    while time.monotonic() < until:
        # Ids grow with time, so the scan ends at the first row that is younger.
        rows = Generation.objects.filter(pk__gt=after).order_by("pk")
        oldest = list(rows.values_list("pk", "is_accounted", "created_at")[:BATCH])
        old = [pk for pk, is_accounted, created_at in oldest if is_accounted and created_at < limit]
        deleted += Generation.objects.filter(pk__in=old).delete()[0]
        if len(oldest) < BATCH or oldest[-1][2] >= limit:
            break
        after = oldest[-1][0]
    return deleted


def _delete(rows: models.QuerySet[Any], until: float) -> int:
    deleted = 0
    while time.monotonic() < until and (ids := list(rows.values_list("pk", flat=True)[:BATCH])):
        deleted += rows.model._default_manager.filter(pk__in=ids).delete()[0]
    return deleted
