"""Retention: deletes old roll-ups, generations, refused requests, failed logins and sessions.

Rows are deleted in batches, oldest first, with a transaction for each batch, so that writers of the
same table wait for one batch at most.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from typing import Any

from axes.models import AccessFailureLog
from django.contrib.sessions.models import Session
from django.db import connection, models
from django.utils import timezone

from inference_site.accounts.models import retention_cutoffs
from inference_site.core.site_settings.models import retention_days
from inference_site.core.storage.old_rows import delete_in_batches, delete_older, old_ids
from inference_site.runs.kinds import retentions
from inference_site.runs.models import Generation
from inference_site.runs.request_log.models import Refusal
from inference_site.runs.usage.models import (
    DimensionRollup,
    KindRollup,
    LatencyHistogram,
    Period,
    UsageRollup,
)

BATCH = 2_000
KEPT_DAYS: dict[type[models.Model], dict[str, int]] = {
    UsageRollup: {Period.MINUTE: 2, Period.HOUR: 400},
    KindRollup: {Period.MINUTE: 2, Period.HOUR: 400},
    DimensionRollup: {Period.MINUTE: 2, Period.HOUR: 35},
    LatencyHistogram: {Period.MINUTE: 2, Period.HOUR: 35},
}
"""Retention of roll-ups in days, by period; roll-ups by day are kept for ever, but those of
dimensions as long as the generations (see ``dimensions.prune``)."""
_LOGIN_FAILURE_DAYS = 90
_SLICE_S, _LONGEST_SLICE_S = 0.5, 8.0
"""How long each kind is deleted before the next has its turn: twice as long after each round in
which that was too short, because most of it may be what it takes to find the rows."""
_DAY = dt.timedelta(days=1)
_DELETE_GENERATIONS = """
WITH deleted AS (
    DELETE FROM generations_generation
    WHERE id = ANY(%(ids)s) AND is_accounted AND created_at < %(limit)s
    RETURNING public_id, finished_at
), calls AS (
    DELETE FROM tool_calls_toolcall WHERE generation_id IN (SELECT public_id FROM deleted)
), noted AS (
    INSERT INTO usage_prunedlog AS known (project_id, complete_since)
    SELECT %(project)s, greatest(
        %(complete_since)s, date_trunc('day', max(finished_at), 'UTC') + interval '24 hours'
    ) FROM deleted HAVING count(*) > 0
    ON CONFLICT (project_id) DO UPDATE
    SET complete_since = greatest(known.complete_since, excluded.complete_since)
)
SELECT count(*) FROM deleted
"""


def prune_old(stopped: threading.Event) -> None:
    """Delete the rows past their retention, also those of the API apps. Beat calls this.

    A purge of many rows goes on until it is done, or the event is set. After each round it rests as
    long as the round took, so that requests have the larger part of the database. A kind that fails
    is left out of the next rounds; raise the errors as a group at the end.
    """
    kinds = (prune_counts, prune_generations, prune_refusals)
    slices = dict.fromkeys((*kinds, *(app.prune for app in retentions())), _SLICE_S)
    errors, is_done = list[Exception](), False
    while not is_done:
        began, is_done = time.monotonic(), True
        for prune, slice_s in list(slices.items()):
            if stopped.is_set():
                break
            until = time.monotonic() + slice_s
            try:
                deleted = prune(until)
            except Exception as exc:  # noqa: BLE001  # It is raised with the rest.
                exc.add_note(prune.__module__)
                errors.append(exc)
                del slices[prune]
                continue
            if deleted > 0 and time.monotonic() >= until:
                is_done = False  # The slice of time was too short for all.
                slices[prune] = min(2 * slice_s, _LONGEST_SLICE_S)
        if stopped.wait(0.0 if is_done else time.monotonic() - began):
            break
    if errors:
        raise ExceptionGroup("pruning", errors)


def prune_counts(until: float) -> int:
    """Delete old roll-ups and failed logins, and sessions that have expired; return how many.

    Stop, as the other functions do, after the batch during which the monotonic clock passes
    ``until``.
    """
    now = timezone.now()
    deleted = 0
    for rollup, kept in KEPT_DAYS.items():
        for period, days in kept.items():
            limit = now - days * _DAY
            old = rollup._default_manager.filter(period=period, start__lt=limit)
            deleted += delete_in_batches(old.order_by("start"), until, BATCH)
    limit = now - _LOGIN_FAILURE_DAYS * _DAY
    failures = AccessFailureLog.objects.filter(attempt_time__lt=limit)
    deleted += delete_in_batches(failures.order_by("pk"), until, BATCH)
    sessions = Session.objects.filter(expire_date__lt=now)
    return deleted + delete_in_batches(sessions.order_by("expire_date"), until, BATCH)


def prune_generations(until: float) -> int:
    """Delete accounted generations past the retention of their projects; return how many."""
    cutoffs = retention_cutoffs("generations_days", until)
    return sum(prune_log(project, limit, until) for project, limit in cutoffs)


def prune_refusals(until: float) -> int:
    """Delete refused requests past the retention of their projects; return how many."""
    rows, deleted = Refusal.objects.all(), 0
    if days := retention_days("refusals_days"):
        # Those of unknown keys; first, because many projects take all of the time.
        limit = timezone.now() - days * _DAY
        deleted += delete_older(rows.filter(project=None), limit, until, BATCH)
    for project, limit in retention_cutoffs("refusals_days", until):
        deleted += delete_older(rows.filter(project=project), limit, until, BATCH)
    return deleted


def prune_log(project: int, limit: dt.datetime, until: float) -> int:
    """Delete accounted generations of a project that were created before ``limit``, with the calls
    of tools that the site has made for them; return how many generations.

    The statement also records since when the log of the project is complete.
    """
    # Most of the deleted ones have ended by then. Some waited for days in the background.
    complete_since = (limit + 2 * _DAY).astimezone(dt.UTC)
    complete_since = complete_since.replace(hour=0, minute=0, second=0, microsecond=0)
    given: dict[str, Any] = {"limit": limit, "project": project, "complete_since": complete_since}
    deleted = 0
    for ids in old_ids(Generation.objects.filter(project=project), limit, until, BATCH):
        with connection.cursor() as cursor:
            cursor.execute(_DELETE_GENERATIONS, {**given, "ids": ids})
            deleted += cursor.fetchone()[0]
    return deleted
