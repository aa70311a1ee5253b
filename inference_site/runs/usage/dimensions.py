"""Dimensions of usage: end users, and the values of the metadata keys that the site has chosen.

Clients choose the values, so there may be any number of them. ``bound`` keeps the rows of a
project and period to ``MOST_VALUES`` values: those with the highest costs. It adds up all others in
rows with the value ``OTHERS``. Rows with values are kept as long as the project's generations.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

from django.db import connection, transaction
from django.utils import timezone

from inference_site.accounts.budgets import period_start
from inference_site.accounts.models import (
    END_USER,
    Budget,
    BudgetSpend,
    retention_cutoffs,
)
from inference_site.core.site_settings.models import site_settings
from inference_site.core.storage.fields import replace_nul
from inference_site.core.storage.old_rows import delete_in_batches
from inference_site.runs.models import TERMINAL, Generation
from inference_site.runs.usage.accounting import SUMS, account, hold_lock
from inference_site.runs.usage.models import (
    LONGEST_VALUE,
    OTHERS,
    DimensionRollup,
    Period,
)
from inference_site.runs.usage.pruning import BATCH

MOST_VALUES = 1_000
"""Values of one dimension with rows of their own, in one period of one project."""
_ACCOUNT_WAIT_MS = 10_000
_DAY = dt.timedelta(days=1)
_LATE = {
    Period.MINUTE: dt.timedelta(minutes=10),
    Period.HOUR: dt.timedelta(hours=2),
    Period.DAY: dt.timedelta(days=1),
}
"""How long before the last ``bound`` a period may have begun that has changed since."""
_BUCKET = "period, start, dimension, project_id"
_FULL = f"""
SELECT {_BUCKET} FROM usage_dimensionrollup
WHERE period = %(period)s AND start >= %(since)s AND value <> '{OTHERS}'
GROUP BY {_BUCKET} HAVING count(DISTINCT value) > %(most)s
"""  # noqa: S608  # All statements here are built from constants.
_THIS = " AND ".join(f"{name} = %({name})s" for name in _BUCKET.split(", "))
_KEY = f"{_BUCKET}, api_key_id, model"
# By an array of ids: a join of new rows, which the planner expects to be few, took minutes.
_ADD_UP_OTHERS = f"""
WITH summed AS (
    SELECT id, value, sum(cost) OVER same AS cost, sum(input_tokens + output_tokens) OVER same
        AS tokens, sum(requests) OVER same AS requests
    FROM usage_dimensionrollup WHERE {_THIS} AND value <> '{OTHERS}'
    WINDOW same AS (PARTITION BY value)
), ranked AS (
    SELECT id, dense_rank() OVER (ORDER BY cost DESC, tokens DESC, requests DESC, value) AS place
    FROM summed
), gone AS (
    DELETE FROM usage_dimensionrollup
    WHERE id = ANY(ARRAY(SELECT id FROM ranked WHERE place > %(most)s)) RETURNING *
)
INSERT INTO usage_dimensionrollup AS kept ({_KEY}, value, {", ".join(SUMS)})
SELECT {_KEY}, '{OTHERS}', {", ".join(f"sum({name})" for name in SUMS)} FROM gone GROUP BY {_KEY}
ON CONFLICT ({_KEY}, value) DO UPDATE
SET {", ".join(f"{name} = kept.{name} + excluded.{name}" for name in SUMS)}
"""  # noqa: S608


def tags_of(metadata: Mapping[str, str] | None) -> list[str]:
    """Return the tags of a request, as ``Generation.tags`` has them."""
    if not metadata:
        return []
    keys = site_settings().usage_tags
    return [f"{key}={replace_nul(metadata[key])}" for key in keys if metadata.get(key)]


class Bound:
    """Keeps the number of values bounded; each call looks at what has changed since the last."""

    def __init__(self) -> None:
        self._last: dt.datetime | None = None

    def __call__(self) -> None:
        """Add up the small values of each project and period that has too many."""
        now = timezone.now()
        bound(self._last)
        self._last = now


def bound(last: dt.datetime | None = None) -> None:
    """Add up the small values of the periods that may have changed since ``last``; None: of all.

    Accounting waits for one period of one project at a time.
    """
    for period, late in _LATE.items():
        since = dt.datetime(2000, 1, 1, tzinfo=dt.UTC) if last is None else last - 2 * late
        with connection.cursor() as cursor:
            given: dict[str, Any] = {"period": period.value, "since": since, "most": MOST_VALUES}
            cursor.execute(_FULL, given)
            full = cursor.fetchall()
        names = _BUCKET.split(", ")
        for bucket in full:
            with transaction.atomic(), connection.cursor() as cursor:
                hold_lock(cursor)
                given = dict(zip(names, bucket, strict=True)) | {"most": MOST_VALUES}
                cursor.execute(_ADD_UP_OTHERS, given)


def prune(until: float) -> int:
    """Delete the rows whose generations are past the retention of their project, and what end users
    and values of tags have spent of budgets in earlier periods; return how many.

    Stop after the batch during which the monotonic clock passes ``until``.
    """
    deleted = 0
    # Before the projects: many of them take all of the time.
    for every in Budget.Every.values:
        # Of two days ago: a generation that ends now counts for the period of its acceptance.
        start = period_start(every, timezone.now() - 2 * _DAY)
        old_spends = BudgetSpend.objects.filter(budget__every=every, start__lt=start)
        deleted += delete_in_batches(old_spends.exclude(value=""), until, BATCH)
    for project, limit in retention_cutoffs("generations_days", until):
        for period in Period.values:
            # A day earlier, because the period that contains the limit begins before it.
            old = DimensionRollup.objects.filter(
                project=project, period=period, start__lt=limit - _DAY
            )
            deleted += delete_in_batches(old.order_by("start"), until, BATCH)
    return deleted


def forget(
    end_user: str, project_id: int | None, generation_ids: Sequence[str]
) -> Mapping[str, int]:
    """Delete the usage of an end user (see ``inference_site.runs.kinds.Forgetting``)."""
    # A generation that is accounted later would count for its end user again.
    theirs = Generation.objects.filter(
        public_id__in=generation_ids, is_accounted=False, status__in=TERMINAL
    )
    while theirs.exists():
        account(wait_ms=_ACCOUNT_WAIT_MS)
    rows = DimensionRollup.objects.filter(dimension=END_USER, value=end_user[:LONGEST_VALUE])
    spends = BudgetSpend.objects.filter(budget__each=END_USER, value=end_user)
    if project_id is not None:
        rows = rows.filter(project=project_id)
        spends = spends.filter(budget__project=project_id)
    return {"counts of usage": rows.delete()[0] + spends.delete()[0]}
