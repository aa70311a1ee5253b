"""Database connections: borrowed from the pool for a short time, or outside of it; and what it
means that the database is unavailable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from django.db import InterfaceError, OperationalError, connection, transaction

from inference_site.storage.pooled_connection import PooledConnection, limit_s

DATABASE_UNAVAILABLE = (OperationalError, InterfaceError)
"""What is raised when PostgreSQL cannot do now what it could do later: it is down, silent, full,
out of connections, a standby or read-only, or a lock or a time-out was in the way. The one
definition: ``PooledConnection`` raises these classes for all of it, and for nothing that is wrong
with the statement itself."""

_LOCK_TIMEOUT_MS = 2_000
_STATEMENT_TIMEOUT_S = 30.0
_BEFORE_LIMIT_S = 0.5
"""The server ends a statement so much before this process would close the connection."""
_STILL_MS = 10_000


@contextmanager
def lent_connection() -> Iterator[None]:
    """Return the connection to the pool after the block, unless a transaction is open around it.

    A worker thread lives as long as a generation. If each held its connection, a worker would need
    one connection for every slot.
    """
    try:
        yield
    finally:
        if not connection.in_atomic_block:
            connection.close()


@contextmanager
def impatient_transaction(lock_ms: int | None = None) -> Iterator[None]:
    """Run the block in a transaction that does not wait long for a locked row or table.

    It waits for ``lock_ms``, or 2 s.

    Who holds it may be frozen, and one row must not hold up what is to be done with the others.
    Nor does a statement take long for another reason. Raise OperationalError then (``is_held_up``).
    """
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(*impatience(lock_ms))
        yield


def impatience(lock_ms: int | None = None) -> tuple[str, dict[str, str]]:
    """Return a statement, and its values, that bounds the waits of the transaction it is in."""
    statement = (
        "SELECT set_config('lock_timeout', %(lock_ms)s, true), "
        "set_config('statement_timeout', %(statement_ms)s, true)"
    )
    limit = limit_s()
    statement_s = _STATEMENT_TIMEOUT_S if limit is None else max(0.1, limit - _BEFORE_LIMIT_S)
    return statement, {
        "lock_ms": str(_LOCK_TIMEOUT_MS if lock_ms is None else lock_ms),
        "statement_ms": str(round(1000 * min(_STATEMENT_TIMEOUT_S, statement_s))),
    }


def is_held_up(error: Exception) -> bool:
    """Whether an ``impatient_transaction`` failed because it would have had to wait."""
    held_up = (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled)
    return isinstance(error.__cause__, held_up)


def end_if_still() -> None:
    """Have the server end this transaction when it hears nothing for ``_STILL_MS``.

    For one that holds a row which others wait for: this process may be stopped in it.
    """
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL idle_in_transaction_session_timeout = {_STILL_MS}")


def own_connection() -> psycopg.Connection[Any]:
    """Connect to PostgreSQL without the pool, whose connections may hang when the server does."""
    parameters = connection.get_connection_params()
    parameters.pop("pool", None)
    parameters.pop("context", None)
    parameters |= {"connect_timeout": 1, "cursor_factory": psycopg.Cursor}
    return PooledConnection.connect(**parameters)
