"""Statements that every request runs: PostgreSQL plans them once for each connection.

To plan them takes it ten times as long as to run them. Django's own statements are planned each
time, because their values are part of their text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from django.db import connection
from psycopg.types.numeric import Int8


def execute_prepared(statement: str, given: Mapping[str, Any]) -> psycopg.Cursor[Any]:
    """Run a statement; it is planned when its connection first runs it.

    That is Django's connection if the thread has one, and else one that is lent for this statement.
    The text must be one of a few. Raise Django's errors.
    """
    values = {name: _typed(value) for name, value in given.items()}
    with connection.wrap_database_errors:
        pool: Any = getattr(connection, "pool", None)  # Django's stubs do not know it.
        if connection.connection is not None or pool is None:
            connection.ensure_connection()
            connection.validate_no_broken_transaction()
            return _run(connection.connection, statement, values)
        pool.open()
        lent = pool.getconn()
        try:
            return _run(lent, statement, values)
        finally:
            pool.putconn(lent)


def _run(
    lent: psycopg.Connection[Any], statement: str, values: Mapping[str, Any]
) -> psycopg.Cursor[Any]:
    return psycopg.Cursor(lent).execute(statement, values, prepare=True)


def _typed(value: Any) -> Any:
    """Return a whole number as one of a type: psycopg's depends on how large it is, and so would
    the plan."""
    return Int8(value) if isinstance(value, int) and not isinstance(value, bool) else value
