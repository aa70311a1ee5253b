"""Accounting: adds each ended generation to the roll-ups and the budgets, exactly once.

A generation ends with ``is_accounted`` false. A step selects some of those rows, adds them up and
marks them in one transaction, so a crash neither loses a row nor counts it twice. Then it corrects
the token counts of the rate limits. Beat runs steps every second, and so does a request that a
budget or a limit of tokens is about to refuse. A generation itself writes no shared row when it
ends, so no generation waits for another.

``differences`` compares roll-ups and budgets with the usage log, which is the source of truth, in
one snapshot. ``rebuild`` computes them again from it; it holds the accounting lock and the row
locks of the budget counters.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.db import OperationalError, connection, transaction
from django.utils import timezone
from psycopg.errors import LockNotAvailable
from redis.exceptions import RedisError

from inference_site.accounts.budgets import period_start
from inference_site.accounts.models import BOUNDED, END_USER, TAG, Budget
from inference_site.accounts.rate_limits import AccountedGeneration, correct
from inference_site.runs.models import IS_INDEXING, TERMINAL, Generation
from inference_site.runs.usage.models import KEY as LATENCY_KEY
from inference_site.runs.usage.models import (
    LONGEST_VALUE,
    MOVE_LATE,
    NAMED_APART,
    OTHERS,
    DimensionRollup,
    KindRollup,
    LatencyHistogram,
    Period,
    Rollup,
    UsageRollup,
    add_sql,
    counts_sql,
)
from inference_site.runs.usage.pruning import KEPT_DAYS

logger = logging.getLogger(__name__)

_MAX_ROWS = 5_000
_REQUEST_ROWS, _REQUEST_WAIT_MS = 500, 500
"""Bounds of the step that a request runs before a budget or a limit refuses it."""
_MAX_RUN_S = 1.0
"""Beat starts no further step after this time."""
MAX_LISTED_ROWS = 100
"""Rows of one table of roll-ups and one period of which ``differences`` returns the counters."""
_LOCK = 0x1F5A_ACC0
"""The advisory lock that allows one step at a time."""

_SELECT_ENDED = """
SELECT id FROM generations_generation
WHERE NOT is_accounted AND status IN ('cancelled', 'completed', 'failed')
ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED
"""

_MARK_ACCOUNTED = f"""
UPDATE generations_generation SET is_accounted = true WHERE id = ANY(%(ids)s)
RETURNING project_id, api_key_id, model, created_at,
    CASE WHEN {IS_INDEXING} THEN 0 ELSE reserved_tokens END,
    input_tokens + output_tokens
"""  # noqa: S608  # A constant.
"""What is returned of each is for the rate limits."""

SUMS = {
    "requests": "count(*)",
    "completed": "count(*) FILTER (WHERE status = 'completed')",
    "failed": "count(*) FILTER (WHERE status = 'failed')",
    "cancelled": "count(*) FILTER (WHERE status = 'cancelled')",
    "input_tokens": "sum(input_tokens)",
    "cached_tokens": "sum(cached_tokens)",
    "output_tokens": "sum(output_tokens)",
    "reasoning_tokens": "sum(reasoning_tokens)",
    "queue_ms": "coalesce(sum(extract(epoch FROM claimed_at - created_at) * 1000), 0)",
    "prefill_ms": "sum(prefill_ms)",
    "decode_ms": "sum(decode_ms)",
    "cost": "sum(cost)",
}
"""The columns of a usage roll-up, and the SQL that computes each from the usage log."""

ROLLUP_KEY = "period, start, project_id, api_key_id, model"
PERIODS = "unnest(ARRAY['minute', 'hour', 'day']) AS period"
START = "date_trunc(period, finished_at, 'UTC')"

_KIND_KEY = f"{ROLLUP_KEY}, kind"
_KINDS = ", ".join(f"'{kind}'" for kind in NAMED_APART)
_OF_KINDS = f"kind IN ({_KINDS})"
_DIMENSION_KEY = f"{ROLLUP_KEY}, dimension, value"
_DIMENSIONS = f"""LATERAL (
    SELECT '{END_USER}', left(end_user, {LONGEST_VALUE}) WHERE end_user <> ''
    UNION ALL
    SELECT '{TAG}' || split_part(tag, '=', 1),
        left(substr(tag, strpos(tag, '=') + 1), {LONGEST_VALUE})
    FROM unnest(tags) AS tag
) AS counted (dimension, value)"""  # noqa: S608


def _sums(key: str, periods: str, where: str) -> str:
    """Return the query of sums by a key, of the generations for which the condition holds."""
    columns = key.replace("start", f"{START} AS start")
    sums = ", ".join(f"{value} AS {name}" for name, value in SUMS.items())
    return f"""
    SELECT {columns}, {sums} FROM generations_generation, {periods} WHERE {where}
    GROUP BY {key.replace("start", START)}
    """  # noqa: S608  # All statements here are built from constants.


def _add(table: str, key: str, where: str, periods: str = PERIODS) -> str:
    """Return the statement that adds the generations with ``ids`` to a table of roll-ups."""
    return f"""
    INSERT INTO {table} AS kept ({key}, {", ".join(SUMS)}) {_sums(key, periods, where)}
    ON CONFLICT ({key}) DO UPDATE
    SET {", ".join(f"{name} = kept.{name} + excluded.{name}" for name in SUMS)}
    """  # noqa: S608


_ROLL_UP = _add("usage_usagerollup", ROLLUP_KEY, "id = ANY(%(ids)s)")
_ROLL_UP_KINDS = _add("usage_kindrollup", _KIND_KEY, f"id = ANY(%(ids)s) AND {_OF_KINDS}")
_ROLL_UP_DIMENSIONS = _add(
    "usage_dimensionrollup", _DIMENSION_KEY, "id = ANY(%(ids)s)", f"{PERIODS}, {_DIMENSIONS}"
)
_ROLL_UP_LATENCY = add_sql(counts_sql(START, PERIODS, "id = ANY(%(ids)s)"))

USED = "CASE unit WHEN 'cost' THEN cost ELSE input_tokens + output_tokens END"
RESERVED = "CASE unit WHEN 'cost' THEN reserved_cost ELSE reserved_tokens END"
HAS_RESERVATION = "generation.created_at >= budget.created_at"
"""A generation from before the budget has no reservation in it."""
AFFECTS = """
    budget.project_id = generation.project_id
    AND (budget.api_key_id IS NULL OR budget.api_key_id = generation.api_key_id)
    AND budget.model IN ('', generation.model)
"""
"""The budgets that the usage of a generation counts against."""

SPEND_START = "date_trunc(budget.every, generation.created_at, 'UTC')::date"
BUDGET_VALUE = f"""LATERAL (SELECT CASE budget.each
    WHEN '' THEN '' WHEN '{END_USER}' THEN nullif(generation.end_user, '')
    ELSE (SELECT substr(tag, strpos(tag, '=') + 1) FROM unnest(generation.tags) AS tag
          WHERE '{TAG}' || split_part(tag, '=', 1) = budget.each)
END AS value) AS counted"""  # noqa: S608
"""For whom the usage counts in a budget: "" for all; null if the budget does not bound it."""

_USED_BY_BUDGET = f"""
SELECT budget.id, {SPEND_START}, counted.value, sum({USED}),
    coalesce(sum({RESERVED}) FILTER (WHERE {HAS_RESERVATION}), 0)
FROM generations_generation generation JOIN accounts_budget budget ON {AFFECTS}, {BUDGET_VALUE}
WHERE generation.id = ANY(%(ids)s) AND counted.value IS NOT NULL
GROUP BY 1, 2, 3
"""  # noqa: S608
_USED_ROWS = """unnest(
    %(budgets)s::bigint[], %(starts)s::date[], %(values)s::text[], %(amounts)s::numeric[],
    %(held)s::numeric[]
) AS used (budget_id, start, value, amount, held)"""
# Inserted in the order in which ``budgets.reserve`` does, to avoid deadlocks.
_INSERT_SPENDS = f"""
INSERT INTO accounts_budgetspend (budget_id, start, value, spent, reserved)
SELECT budget_id, start, value, 0, 0 FROM {_USED_ROWS} ORDER BY 1, 2, 3 ON CONFLICT DO NOTHING
"""  # noqa: S608
# Locked in the order of their ids, as ``budgets.reserve`` does, to avoid deadlocks.
_LOCK_SPENDS = f"""
SELECT id FROM accounts_budgetspend WHERE (budget_id, start, value) IN (
    SELECT budget_id, start, value FROM {_USED_ROWS}
) ORDER BY id FOR UPDATE
"""  # noqa: S608
_UPDATE_SPENDS = f"""
UPDATE accounts_budgetspend spend
SET spent = spend.spent + used.amount, reserved = greatest(spend.reserved - used.held, 0)
FROM {_USED_ROWS}
WHERE spend.budget_id = used.budget_id AND spend.start = used.start AND spend.value = used.value
"""  # noqa: S608
_BEGINNING = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
_PERIOD = "(SELECT %(period)s::text AS period) AS periods"
_PRUNED = "(SELECT project_id AS pruned_id, complete_since FROM usage_prunedlog) AS pruned"
_ACCOUNTED = f"""
is_accounted AND finished_at >= %(since)s AND NOT EXISTS (
    SELECT FROM {_PRUNED} WHERE pruned_id = project_id AND finished_at < complete_since
)
"""
_COMPLETE = f"""
start >= %(since)s AND NOT EXISTS (
    SELECT FROM {_PRUNED}
    WHERE (pruned_id = project_id OR project_id = {LatencyHistogram.EVERY})
        AND start < complete_since
)
"""
"""The condition on a roll-up that the usage log has all of its generations. A sum over all projects
needs the logs of all."""
_USAGE = _sums(ROLLUP_KEY, _PERIOD, _ACCOUNTED)
_USAGE_OF_KINDS = _sums(_KIND_KEY, _PERIOD, f"{_OF_KINDS} AND {_ACCOUNTED}")
_USAGE_OF_DIMENSIONS = _sums(_DIMENSION_KEY, f"{_PERIOD}, {_DIMENSIONS}", _ACCOUNTED)
_HAS_ALL_VALUES = f"""(period, start, dimension, project_id) NOT IN (
    SELECT period, start, dimension, project_id FROM usage_dimensionrollup WHERE value = '{OTHERS}'
)"""  # noqa: S608
"""Whether a project has a row for each value in a period; otherwise the log has values that were
added up."""
_COMPARED_DIMENSIONS = f"""
SELECT * FROM ({_USAGE_OF_DIMENSIONS}) AS sums WHERE {_HAS_ALL_VALUES}
"""  # noqa: S608
_LATENCY = f"""
SELECT * FROM ({counts_sql(START, _PERIOD, _ACCOUNTED)}) AS counts WHERE {_COMPLETE}
"""  # noqa: S608
_IS_COUNTED = "(budget.each = '' OR {start} = date_trunc(budget.every, now(), 'UTC')::date)"
"""Whether a counter is compared: for each end user or tag, only the current period is kept."""
_SPENDS = f"""
SELECT budget.id AS budget_id, {SPEND_START} AS start, counted.value,
    coalesce(sum({USED}) FILTER (WHERE is_accounted), 0) AS spent,
    coalesce(sum({RESERVED}) FILTER (WHERE NOT is_accounted AND {HAS_RESERVATION}), 0) AS reserved
FROM generations_generation generation JOIN accounts_budget budget ON {AFFECTS}, {BUDGET_VALUE}
WHERE generation.created_at >= %(since)s AND budget.id = ANY(%(budgets)s)
    AND counted.value IS NOT NULL AND {_IS_COUNTED.format(start=SPEND_START)}
GROUP BY 1, 2, 3
"""  # noqa: S608


_FROM_DELETED = """
coalesce(start < (
    SELECT complete_since FROM accounts_budget JOIN usage_prunedlog USING (project_id)
    WHERE accounts_budget.id = budget_id
), false)
"""
"""Whether generations in the period of a budget's counter may have been deleted; then the log does
not have all that was spent."""


def hold_lock(cursor: Any) -> None:
    """Take the accounting lock until the end of this transaction."""
    cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])


def _try_lock(cursor: Any, wait_ms: int) -> bool:
    """Try for ``wait_ms`` to take the accounting lock until the end of this transaction."""
    if not wait_ms:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [_LOCK])
        return bool(cursor.fetchone()[0])
    try:
        with transaction.atomic():
            cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{wait_ms}ms"])
            hold_lock(cursor)
    except OperationalError as exc:
        if isinstance(exc.__cause__, LockNotAvailable):
            return False
        raise
    cursor.execute("SELECT set_config('lock_timeout', '0', true)")
    return True


def account(max_rows: int = _MAX_ROWS, wait_ms: int = 0) -> list[AccountedGeneration]:
    """Account at most ``max_rows`` ended generations in roll-ups and budgets, and return them.

    If another step is running, wait for it for at most ``wait_ms``, then do nothing.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        if not _try_lock(cursor, wait_ms):
            return []
        cursor.execute(MOVE_LATE)
        cursor.execute(_SELECT_ENDED, [max_rows])
        ids = {"ids": [id_ for (id_,) in cursor.fetchall()]}
        if not ids["ids"]:
            return []
        cursor.execute(_ROLL_UP, ids)
        cursor.execute(_ROLL_UP_KINDS, ids)
        cursor.execute(_ROLL_UP_DIMENSIONS, ids)
        cursor.execute(_ROLL_UP_LATENCY, ids)
        cursor.execute(_MARK_ACCOUNTED, ids)
        accounted = [AccountedGeneration(*row) for row in cursor.fetchall()]
        # Budgets are last, because requests with these budgets wait from here to the commit. When
        # they came before the marking of 5,000 rows, a request waited up to 0.6 s.
        cursor.execute(_USED_BY_BUDGET, ids)
        names = ("budgets", "starts", "values", "amounts", "held")
        used = dict(zip(names, map(list, zip(*cursor.fetchall(), strict=True)), strict=False))
        if used:
            for statement in (_INSERT_SPENDS, _LOCK_SPENDS, _UPDATE_SPENDS):
                cursor.execute(statement, used)
        return accounted


def settle(max_rows: int = _MAX_ROWS, wait_ms: int = 0) -> list[AccountedGeneration]:
    """Run one step as ``account`` does, and correct the token counts of the rate limits."""
    accounted = account(max_rows, wait_ms)
    try:
        correct(accounted, time.time())
    except RedisError as exc:
        logger.warning("rate limits: token counts not corrected: %s", exc)
    return accounted


def settle_for_request(project_id: int) -> None:
    """Run a step that is small enough for a waiting request, if it may give the project room."""
    ended = Generation.objects.filter(status__in=sorted(TERMINAL), is_accounted=False)
    if ended.filter(project=project_id).exists():
        settle(_REQUEST_ROWS, _REQUEST_WAIT_MS)


def account_ended() -> None:
    """Run steps until no ended generation is left, or time is up. Beat calls this every second."""
    until = time.monotonic() + _MAX_RUN_S
    while settle() and time.monotonic() < until:
        pass


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
    """Return the counters that differ from the usage log; normally there are none.

    Those of roll-ups are of at most ``MAX_LISTED_ROWS`` rows of each table and period.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        found: list[Difference] = []
        for period in Period.values:
            found += _compare(cursor, UsageRollup, period, _USAGE, ROLLUP_KEY, tuple(SUMS))
            found += _compare(cursor, KindRollup, period, _USAGE_OF_KINDS, _KIND_KEY, tuple(SUMS))
            found += _compare(
                cursor,
                DimensionRollup,
                period,
                _COMPARED_DIMENSIONS,
                _DIMENSION_KEY,
                tuple(SUMS),
                _HAS_ALL_VALUES,
            )
            found += _compare(cursor, LatencyHistogram, period, _LATENCY, LATENCY_KEY, ("count",))
        return found + _compare_spends(cursor)


def rebuild() -> None:
    """Rebuild roll-ups and budget counters from the usage log, as far back as it reaches."""
    with transaction.atomic(), connection.cursor() as cursor:
        hold_lock(cursor)
        # Until the end nothing is deleted from the log (``pruning.prune_log`` writes that table).
        cursor.execute("LOCK TABLE usage_prunedlog IN SHARE MODE")
        cursor.execute(MOVE_LATE)
        for period in Period.values:
            for rollup, log, key in (
                (UsageRollup, _USAGE, ROLLUP_KEY),
                (KindRollup, _USAGE_OF_KINDS, _KIND_KEY),
                (DimensionRollup, _USAGE_OF_DIMENSIONS, _DIMENSION_KEY),
            ):
                _rewrite(cursor, rollup, period, log, f"{key}, {', '.join(SUMS)}")
            _rewrite(cursor, LatencyHistogram, period, _LATENCY, f"{LATENCY_KEY}, count")
        _recount_spends(cursor, list(Budget.objects.values_list("pk", flat=True)))


def forget_other_spends(budget: Budget) -> None:
    """Delete the counters of a budget that is about to bound something else than before.

    ``count_spends`` counts again what the usage log has; where generations are deleted, it would
    keep tokens as an amount of money.
    """
    same = {name: budget.serializable_value(name) for name in BOUNDED}
    if Budget.objects.filter(pk=budget.pk, **same).exists():
        return
    with transaction.atomic(), connection.cursor() as cursor:
        hold_lock(cursor)  # Before the rows, as accounting does, to avoid deadlocks.
        budget.spends.all().delete()


def lock_budgets(project_id: int) -> None:
    """Lock the budgets of a project, of which this transaction changes or deletes some.

    Accounting and reservations wait for its end. To avoid deadlocks, the accounting lock is taken
    before the rows, then all budgets and all their counters since the start of this month, in the
    order in which ``budgets.reserve`` locks them.
    """
    with connection.cursor() as cursor:
        hold_lock(cursor)
        found = Budget.objects.select_for_update().filter(project=project_id).order_by("pk")
        _lock_spends(cursor, _of_this_month([budget.pk for budget in found]))


def count_spends(budget_id: int) -> None:
    """Rebuild the counters of one budget for its current period from the usage log."""
    with transaction.atomic(), connection.cursor() as cursor:
        hold_lock(cursor)
        _recount_spends(cursor, [budget_id])


def _complete_since(rollup: type[Rollup], period: str) -> dt.datetime:
    """Return the first midnight since which no roll-ups of this period were pruned."""
    if (days := KEPT_DAYS[rollup].get(period)) is None:
        return _BEGINNING
    since = (timezone.now() - dt.timedelta(days=days - 1)).astimezone(dt.UTC)
    return since.replace(hour=0, minute=0, second=0, microsecond=0)


def _compare(
    cursor: Any,
    rollup: Any,
    period: str,
    log: str,
    key: str,
    counters: tuple[str, ...],
    condition: str = "true",
) -> Iterator[Difference]:
    """Yield the differences between the query ``log`` and the rows of a table with a condition."""
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
              WHERE period = %(period)s AND {_COMPLETE} AND {condition}) kept
        FULL JOIN ({log}) log USING ({key})
        WHERE {differs} LIMIT {MAX_LISTED_ROWS}""",  # noqa: S608
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
    given = {"period": period, "since": _complete_since(rollup, period)}
    table = rollup._meta.db_table
    cursor.execute(f"DELETE FROM {table} WHERE period = %(period)s AND {_COMPLETE}", given)  # noqa: S608
    cursor.execute(f"INSERT INTO {table} ({columns}) {log}", given)


def _of_this_month(budgets: list[int]) -> dict[str, Any]:
    """Return the parameters of ``_SPENDS``; ``month`` is the start of the month as a day."""
    month = period_start(Budget.Every.MONTH, timezone.now())
    since = dt.datetime.combine(month, dt.time(), dt.UTC)
    return {"budgets": budgets, "month": month, "since": since}


def _compare_spends(cursor: Any) -> list[Difference]:
    params = _of_this_month(list(Budget.objects.values_list("pk", flat=True)))
    cursor.execute(_SPENDS, params)
    true = {row[:3]: row[3:] for row in cursor.fetchall()}
    cursor.execute(
        f"""SELECT budget_id, start, value, spent, reserved, {_FROM_DELETED}
        FROM accounts_budgetspend spend JOIN accounts_budget budget ON budget.id = budget_id
        WHERE start >= %(month)s AND {_IS_COUNTED.format(start="start")}""",  # noqa: S608
        params,
    )
    stored = {}
    for *key, spent, reserved, is_from_deleted in cursor.fetchall():
        row = tuple(key)
        logged, held = true.get(row, (0, 0))
        stored[row] = spent, reserved
        if is_from_deleted:
            true[row] = max(spent, logged), held
    nothing = (0, 0)
    return [
        Difference(counter, {"budget": budget, "start": start, "value": value}, mine, theirs)
        for budget, start, value in sorted(true.keys() | stored.keys())
        for counter, mine, theirs in zip(
            ("spent", "reserved"),
            stored.get((budget, start, value), nothing),
            true.get((budget, start, value), nothing),
            strict=True,
        )
        if mine != theirs
    ]


def _lock_spends(cursor: Any, params: dict[str, Any]) -> None:
    cursor.execute(
        """SELECT id FROM accounts_budgetspend
        WHERE budget_id = ANY(%(budgets)s) AND start >= %(month)s ORDER BY id FOR UPDATE""",
        params,
    )


def _recount_spends(cursor: Any, budgets: list[int]) -> None:
    """Replace the counters of these budgets since the start of this month."""
    params = _of_this_month(budgets)
    # The rows of the current periods must exist so that they can be locked against reservations.
    cursor.execute(
        f"""INSERT INTO accounts_budgetspend (budget_id, start, value, spent, reserved)
        SELECT id, date_trunc(every, now(), 'UTC')::date, '', 0, 0
        FROM accounts_budget WHERE id = ANY(%(budgets)s) AND each = ''
        UNION SELECT budget_id, start, value, 0, 0 FROM ({_SPENDS}) AS logged
        ORDER BY 1, 2, 3 ON CONFLICT DO NOTHING""",  # noqa: S608
        params,
    )
    _lock_spends(cursor, params)
    cursor.execute(
        f"""UPDATE accounts_budgetspend
        SET spent = CASE WHEN {_FROM_DELETED} THEN spent ELSE 0 END, reserved = 0
        WHERE budget_id = ANY(%(budgets)s) AND start >= %(month)s""",  # noqa: S608
        params,
    )
    cursor.execute(
        f"""INSERT INTO accounts_budgetspend AS kept (budget_id, start, value, spent, reserved)
        {_SPENDS}
        ON CONFLICT (budget_id, start, value) DO UPDATE
        SET spent = greatest(kept.spent, excluded.spent), reserved = excluded.reserved""",  # noqa: S608
        params,
    )
