"""Accounting: adds each ended generation to the roll-ups and the budgets, exactly once.

A generation ends with ``is_accounted`` false. A step selects some of those rows, adds them up and
marks them in one transaction, so a crash neither loses a row nor counts it twice. Then it corrects
the token counts of the rate limits. Beat runs steps every second, and so does a request that a
budget is about to refuse. A generation itself writes no shared row when it ends, so no generation
waits for another.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from django.db import OperationalError, connection, transaction
from psycopg.errors import LockNotAvailable
from redis.exceptions import RedisError

from inference_site.accounts.rate_limits import AccountedGeneration, correct
from inference_site.runs.usage.models import MOVE_LATE, add_sql, counts_sql

logger = logging.getLogger(__name__)

_MAX_ROWS = 5_000
_REQUEST_ROWS, _REQUEST_WAIT_MS = 500, 500
"""Bounds of the step that a request runs before a budget refuses it."""
_MAX_RUN_S = 1.0
"""Beat starts no further step after this time."""
_LOCK = 0x1F5A_ACC0
"""The advisory lock that allows one step at a time."""

_SELECT_ENDED = """
SELECT id FROM generations_generation
WHERE NOT is_accounted AND status IN ('cancelled', 'completed', 'failed')
ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED
"""

_MARK_ACCOUNTED = """
UPDATE generations_generation SET is_accounted = true WHERE id = ANY(%(ids)s)
RETURNING project_id, api_key_id, created_at, reserved_tokens, input_tokens + output_tokens
"""

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

_ROLL_UP = f"""
INSERT INTO usage_usagerollup AS kept ({ROLLUP_KEY}, {", ".join(SUMS)})
SELECT period, {START}, project_id, api_key_id, model, {", ".join(SUMS.values())}
FROM generations_generation, {PERIODS}
WHERE id = ANY(%(ids)s)
GROUP BY period, {START}, project_id, api_key_id, model
ON CONFLICT ({ROLLUP_KEY}) DO UPDATE
SET {", ".join(f"{name} = kept.{name} + excluded.{name}" for name in SUMS)}
"""  # noqa: S608  # All statements here are built from constants.


_ROLL_UP_LATENCY = add_sql(counts_sql(START, PERIODS, "id = ANY(%(ids)s)"))

USED = "CASE unit WHEN 'cost' THEN cost ELSE input_tokens + output_tokens END"
RESERVED = "CASE unit WHEN 'cost' THEN reserved_cost ELSE reserved_tokens END"
HAS_RESERVATION = "generation.created_at >= budget.created_at"
"""A generation from before the budget has no reservation in it."""
AFFECTS = """
    budget.project_id = generation.project_id
    AND (budget.api_key_id IS NULL OR budget.api_key_id = generation.api_key_id)
"""
"""The budgets that the usage of a generation counts against."""

SPEND_START = "date_trunc(budget.every, generation.created_at, 'UTC')::date"

_USED_BY_BUDGET = f"""
SELECT budget.id, {SPEND_START}, sum({USED}),
    coalesce(sum({RESERVED}) FILTER (WHERE {HAS_RESERVATION}), 0)
FROM generations_generation generation JOIN accounts_budget budget ON {AFFECTS}
WHERE generation.id = ANY(%(ids)s)
GROUP BY 1, 2
"""  # noqa: S608
_USED_ROWS = """unnest(
    %(budgets)s::bigint[], %(starts)s::date[], %(amounts)s::numeric[], %(held)s::numeric[]
) AS used (budget_id, start, amount, held)"""
_INSERT_SPENDS = f"""
INSERT INTO accounts_budgetspend (budget_id, start, spent, reserved)
SELECT budget_id, start, 0, 0 FROM {_USED_ROWS} ON CONFLICT DO NOTHING
"""  # noqa: S608
# Locked in the order of their ids, as ``budgets.reserve`` does, to avoid deadlocks.
_LOCK_SPENDS = f"""
SELECT id FROM accounts_budgetspend WHERE (budget_id, start) IN (
    SELECT budget_id, start FROM {_USED_ROWS}
) ORDER BY id FOR UPDATE
"""  # noqa: S608
_UPDATE_SPENDS = f"""
UPDATE accounts_budgetspend spend
SET spent = spend.spent + used.amount, reserved = greatest(spend.reserved - used.held, 0)
FROM {_USED_ROWS} WHERE spend.budget_id = used.budget_id AND spend.start = used.start
"""  # noqa: S608


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
        cursor.execute(_ROLL_UP_LATENCY, ids)
        cursor.execute(_MARK_ACCOUNTED, ids)
        accounted = [AccountedGeneration(*row) for row in cursor.fetchall()]
        # Budgets are last, because requests with these budgets wait from here to the commit. When
        # they came before the marking of 5,000 rows, a request waited up to 0.6 s.
        cursor.execute(_USED_BY_BUDGET, ids)
        names = ("budgets", "starts", "amounts", "held")
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


def settle_for_request() -> None:
    """Run a step that is small enough for a waiting request."""
    settle(_REQUEST_ROWS, _REQUEST_WAIT_MS)


def account_ended() -> None:
    """Run steps until no ended generation is left, or time is up. Beat calls this every second."""
    until = time.monotonic() + _MAX_RUN_S
    while settle() and time.monotonic() < until:
        pass
