"""Reconciliation: compares roll-ups and budgets with the usage log, or rebuilds them from it.

The usage log is the source of truth. The comparison runs in one snapshot; a rebuild holds the
accounting lock and the row locks of the budget counters.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.db import connection, transaction
from django.utils import timezone

from inference_site.accounts.budgets import period_start
from inference_site.accounts.models import Budget
from inference_site.core.site_settings.models import usage_log_days
from inference_site.runs.models import Generation
from inference_site.runs.usage.accounting import (
    AFFECTS,
    HAS_RESERVATION,
    RESERVED,
    ROLLUP_KEY,
    SPEND_START,
    START,
    SUMS,
    USED,
    hold_lock,
)
from inference_site.runs.usage.models import KEY as LATENCY_KEY
from inference_site.runs.usage.models import (
    MOVE_LATE,
    LatencyHistogram,
    Period,
    UsageRollup,
    counts_sql,
)
from inference_site.runs.usage.pruning import KEPT_DAYS

_BEGINNING = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
_PERIOD = "(SELECT %(period)s::text AS period) AS periods"
_ACCOUNTED = "is_accounted AND finished_at >= %(since)s"

_USAGE = f"""
SELECT period, {START} AS start, project_id, api_key_id, model,
    {", ".join(f"{value} AS {name}" for name, value in SUMS.items())}
FROM generations_generation, {_PERIOD} WHERE {_ACCOUNTED}
GROUP BY period, {START}, project_id, api_key_id, model
"""  # noqa: S608  # All statements here are built from constants.
_LATENCY = counts_sql(START, _PERIOD, _ACCOUNTED)
_SPENDS = f"""
SELECT budget.id AS budget_id, {SPEND_START} AS start,
    coalesce(sum({USED}) FILTER (WHERE is_accounted), 0) AS spent,
    coalesce(sum({RESERVED}) FILTER (WHERE NOT is_accounted AND {HAS_RESERVATION}), 0) AS reserved
FROM generations_generation generation JOIN accounts_budget budget ON {AFFECTS}
WHERE generation.created_at >= %(since)s AND budget.id = ANY(%(budgets)s)
GROUP BY 1, 2
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class Difference:
    """A counter that differs from the usage log; ``where`` identifies its row."""

    counter: str
    where: dict[str, Any]
    stored: Any
    true: Any

    def __str__(self) -> str:
        where = " ".join(f"{name}={value}" for name, value in self.where.items())
        return f"{self.counter} {where}: stored {self.stored}, usage log {self.true}"


def differences() -> list[Difference]:
    """Return every counter that differs from the usage log; normally there are none."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        found: list[Difference] = []
        for period in Period.values:
            found += _compare(cursor, UsageRollup, period, _USAGE, ROLLUP_KEY, tuple(SUMS))
            found += _compare(cursor, LatencyHistogram, period, _LATENCY, LATENCY_KEY, ("count",))
        return found + _compare_spends(cursor)


def rebuild() -> None:
    """Rebuild roll-ups and budget counters from the usage log, as far back as it reaches."""
    with transaction.atomic(), connection.cursor() as cursor:
        hold_lock(cursor)
        cursor.execute(MOVE_LATE)
        for period in Period.values:
            _rewrite(cursor, UsageRollup, period, _USAGE, f"{ROLLUP_KEY}, {', '.join(SUMS)}")
            _rewrite(cursor, LatencyHistogram, period, _LATENCY, f"{LATENCY_KEY}, count")
        _recount_spends(cursor, list(Budget.objects.values_list("pk", flat=True)))


def count_spends(budget_id: int) -> None:
    """Rebuild the counters of one budget for its current period from the usage log."""
    with transaction.atomic(), connection.cursor() as cursor:
        hold_lock(cursor)
        _recount_spends(cursor, [budget_id])


def _complete_since(rollup: type[UsageRollup | LatencyHistogram], period: str) -> dt.datetime:
    """Return the first midnight since which neither the roll-up nor the usage log was pruned."""
    since = _BEGINNING
    oldest = Generation.objects.order_by("pk").values_list("created_at", flat=True).first()
    if usage_log_days() and oldest is not None:
        # A pruned generation may have ended after the oldest one began, but no run lasts a day.
        since = oldest + dt.timedelta(days=1)
    if (days := KEPT_DAYS[rollup].get(period)) is not None:
        since = max(since, timezone.now() - dt.timedelta(days=days))
    midnight = since.astimezone(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight if midnight == since else midnight + dt.timedelta(days=1)


def _compare(
    cursor: Any, rollup: Any, period: str, log: str, key: str, counters: tuple[str, ...]
) -> Iterator[Difference]:
    """Yield the differences between a roll-up table and the query ``log``."""
    names = key.split(", ")
    columns = ", ".join(f"coalesce(kept.{n}, 0), coalesce(log.{n}, 0)" for n in counters)
    # Sums of floats depend on the order of addition, so milliseconds may differ by one.
    differs = " OR ".join(
        f"abs(coalesce(kept.{n}, 0) - coalesce(log.{n}, 0)) > {1 if n.endswith('_ms') else 0}"
        for n in counters
    )
    cursor.execute(
        f"""SELECT {key}, {columns}
        FROM (SELECT * FROM {rollup._meta.db_table}
              WHERE period = %(period)s AND start >= %(since)s) kept
        FULL JOIN ({log}) log USING ({key})
        WHERE {differs} LIMIT 100""",  # noqa: S608
        {"period": period, "since": _complete_since(rollup, period)},
    )
    for row in cursor.fetchall():
        where = dict(zip(names, row, strict=False))
        values = row[len(names) :]
        for name, stored, true in zip(counters, values[::2], values[1::2], strict=True):
            if stored != true:
                yield Difference(name, where, stored, true)


def _rewrite(cursor: Any, rollup: Any, period: str, log: str, columns: str) -> None:
    """Replace the rows of a roll-up table by the result of the query ``log``."""
    since = _complete_since(rollup, period)
    rollup.objects.filter(period=period, start__gte=since).delete()
    insert = f"INSERT INTO {rollup._meta.db_table} ({columns}) {log}"
    cursor.execute(insert, {"period": period, "since": since})


def _spends_of_log(cursor: Any, budgets: list[int]) -> dict[tuple[int, dt.date], tuple[Any, Any]]:
    """Return (spent, reserved) by (budget id, period start) since the start of this month."""
    month = timezone.now().replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    cursor.execute(_SPENDS, {"since": month, "budgets": budgets})
    return {(row[0], row[1]): (row[2], row[3]) for row in cursor.fetchall()}


def _compare_spends(cursor: Any) -> list[Difference]:
    true = _spends_of_log(cursor, list(Budget.objects.values_list("pk", flat=True)))
    cursor.execute(
        "SELECT budget_id, start, spent, reserved FROM accounts_budgetspend WHERE start >= %s",
        [period_start(Budget.Every.MONTH, timezone.now())],
    )
    stored = {(row[0], row[1]): (row[2], row[3]) for row in cursor.fetchall()}
    nothing = (0, 0)
    return [
        Difference(counter, {"budget": budget, "start": start}, mine, theirs)
        for budget, start in sorted(true.keys() | stored.keys())
        for counter, mine, theirs in zip(
            ("spent", "reserved"),
            stored.get((budget, start), nothing),
            true.get((budget, start), nothing),
            strict=True,
        )
        if mine != theirs
    ]


def _recount_spends(cursor: Any, budgets: list[int]) -> None:
    """Replace the counters of these budgets since the start of this month."""
    month = period_start(Budget.Every.MONTH, timezone.now())
    params = {"budgets": budgets, "month": month}
    # The rows of the current periods must exist so that they can be locked against reservations.
    cursor.execute(
        """INSERT INTO accounts_budgetspend (budget_id, start, spent, reserved)
        SELECT id, date_trunc(every, now(), 'UTC')::date, 0, 0
        FROM accounts_budget WHERE id = ANY(%(budgets)s) ORDER BY id ON CONFLICT DO NOTHING""",
        params,
    )
    cursor.execute(
        """SELECT id FROM accounts_budgetspend
        WHERE budget_id = ANY(%(budgets)s) AND start >= %(month)s ORDER BY id FOR UPDATE""",
        params,
    )
    cursor.execute(
        """UPDATE accounts_budgetspend SET spent = 0, reserved = 0
        WHERE budget_id = ANY(%(budgets)s) AND start >= %(month)s""",
        params,
    )
    cursor.executemany(
        """INSERT INTO accounts_budgetspend (budget_id, start, spent, reserved)
        VALUES (%s, %s, %s, %s)
        ON CONFLICT (budget_id, start) DO UPDATE
        SET spent = excluded.spent, reserved = excluded.reserved""",
        [(*key, *values) for key, values in _spends_of_log(cursor, budgets).items()],
    )
