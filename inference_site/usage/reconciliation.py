"""Reconciliation: checks that roll-ups and budgets equal the usage log, or rebuilds them.

The usage log is the source of truth. A check compares both sides in one snapshot; a rebuild holds
the accounting lock and the locks of budget counters.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.db import connection, transaction
from django.utils import timezone

from inference_site.accounts.budgets import period_start
from inference_site.accounts.models import Budget
from inference_site.generations.models import Generation
from inference_site.site_settings.current import usage_log_days
from inference_site.usage.accounting import (
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
from inference_site.usage.histograms import KEY as LATENCY_KEY
from inference_site.usage.histograms import MOVE_LATE, counts_sql
from inference_site.usage.models import LatencyHistogram, Period, UsageRollup
from inference_site.usage.pruning import KEPT_DAYS

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
    kept: Any
    true: Any

    def __str__(self) -> str:
        where = " ".join(f"{name}={value}" for name, value in self.where.items())
        return f"{self.counter} {where}: stored {self.kept}, usage log {self.true}"


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
    with _locked() as cursor:
        cursor.execute(MOVE_LATE)
        for period in Period.values:
            _rewrite(cursor, UsageRollup, period, _USAGE, f"{ROLLUP_KEY}, {', '.join(SUMS)}")
            _rewrite(cursor, LatencyHistogram, period, _LATENCY, f"{LATENCY_KEY}, count")
        _recount(cursor, list(Budget.objects.values_list("pk", flat=True)))


def count_spends(budget_id: int) -> None:
    """Rebuild the counters of one budget for its current period from the usage log."""
    with _locked() as cursor:
        _recount(cursor, [budget_id])


@contextmanager
def _locked() -> Iterator[Any]:
    with transaction.atomic(), connection.cursor() as cursor:
        hold_lock(cursor)
        yield cursor


def _since(kind: type[UsageRollup | LatencyHistogram], period: str) -> dt.datetime:
    """Return the time from which both sides are complete; earlier rows may have been pruned."""
    now, since = timezone.now(), _log_since()
    if (days := KEPT_DAYS[kind].get(period)) is not None:
        since = max(since, now - dt.timedelta(days=days))
    whole = since.astimezone(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return whole if whole == since else whole + dt.timedelta(days=1)


def _log_since() -> dt.datetime:
    oldest = Generation.objects.order_by("pk").values_list("created_at", flat=True).first()
    if not usage_log_days() or oldest is None:
        return _BEGINNING
    # Pruned generations may have ended after the oldest kept one began; no run lasts a day.
    return oldest + dt.timedelta(days=1)


def _compare(
    cursor: Any, kind: Any, period: str, truth: str, key: str, counters: tuple[str, ...]
) -> Iterator[Difference]:
    names = key.split(", ")
    table = kind._meta.db_table
    columns = ", ".join(f"coalesce(kept.{n}, 0), coalesce(log.{n}, 0)" for n in counters)
    differs = " OR ".join(_differs(name) for name in counters)
    cursor.execute(
        f"""SELECT {key}, {columns}
        FROM (SELECT * FROM {table} WHERE period = %(period)s AND start >= %(since)s) kept
        FULL JOIN ({truth}) log USING ({key})
        WHERE {differs} LIMIT 100""",  # noqa: S608
        {"period": period, "since": _since(kind, period)},
    )
    for row in cursor.fetchall():
        where = dict(zip(names, row, strict=False))
        values = row[len(names) :]
        for name, kept, true in zip(counters, values[::2], values[1::2], strict=True):
            if kept != true:
                yield Difference(name, where, kept, true)


def _differs(counter: str) -> str:
    # Sums of floats depend on the order of addition, so milliseconds may differ a little.
    apart = f"abs(coalesce(kept.{counter}, 0) - coalesce(log.{counter}, 0))"
    return f"{apart} > {1 if counter.endswith('_ms') else 0}"


def _rewrite(cursor: Any, kind: Any, period: str, truth: str, columns: str) -> None:
    since = _since(kind, period)
    kind.objects.filter(period=period, start__gte=since).delete()
    insert = f"INSERT INTO {kind._meta.db_table} ({columns}) {truth}"
    cursor.execute(insert, {"period": period, "since": since})


def _spends(cursor: Any, budgets: list[int]) -> dict[tuple[int, dt.date], tuple[Any, Any]]:
    """Return spent and reserved in the current periods, computed from the usage log."""
    month = timezone.now().replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    cursor.execute(_SPENDS, {"since": month, "budgets": budgets})
    return {(row[0], row[1]): (row[2], row[3]) for row in cursor.fetchall()}


def _month() -> dt.date:
    return period_start(Budget.Every.MONTH, timezone.now())


def _compare_spends(cursor: Any) -> list[Difference]:
    budgets = list(Budget.objects.values_list("pk", flat=True))
    true = _spends(cursor, budgets)
    cursor.execute(
        "SELECT budget_id, start, spent, reserved FROM accounts_budgetspend WHERE start >= %s",
        [_month()],
    )
    kept = {(row[0], row[1]): (row[2], row[3]) for row in cursor.fetchall()}
    nothing = (0, 0)
    return [
        Difference(counter, {"budget": budget, "start": start}, mine, theirs)
        for budget, start in sorted(true.keys() | kept.keys())
        for counter, mine, theirs in zip(
            ("spent", "reserved"),
            kept.get((budget, start), nothing),
            true.get((budget, start), nothing),
            strict=True,
        )
        if mine != theirs
    ]


def _recount(cursor: Any, budgets: list[int]) -> None:
    of_month = {"budgets": budgets, "month": _month()}
    # The rows of the current periods must exist so that they can be locked against reservations.
    cursor.execute(
        """INSERT INTO accounts_budgetspend (budget_id, start, spent, reserved)
        SELECT id, date_trunc(every, now(), 'UTC')::date, 0, 0
        FROM accounts_budget WHERE id = ANY(%(budgets)s) ORDER BY id ON CONFLICT DO NOTHING""",
        of_month,
    )
    cursor.execute(
        """SELECT id FROM accounts_budgetspend
        WHERE budget_id = ANY(%(budgets)s) AND start >= %(month)s ORDER BY id FOR UPDATE""",
        of_month,
    )
    cursor.execute(
        """UPDATE accounts_budgetspend SET spent = 0, reserved = 0
        WHERE budget_id = ANY(%(budgets)s) AND start >= %(month)s""",
        of_month,
    )
    cursor.executemany(
        """INSERT INTO accounts_budgetspend (budget_id, start, spent, reserved)
        VALUES (%s, %s, %s, %s)
        ON CONFLICT (budget_id, start) DO UPDATE
        SET spent = excluded.spent, reserved = excluded.reserved""",
        [(*key, *values) for key, values in _spends(cursor, budgets).items()],
    )
