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
    """Run a statement on Django's connection; it is planned when this connection first runs it.

    Its text must be one of a few. Raise Django's errors.
    """
    connection.ensure_connection()
    connection.validate_no_broken_transaction()
    with connection.wrap_database_errors:
        cursor = psycopg.Cursor(connection.connection)
        values = {name: _typed(value) for name, value in given.items()}
        return cursor.execute(statement, values, prepare=True)


def _typed(value: Any) -> Any:
    """Return a whole number as one of a type: psycopg's depends on how large it is, and so would
    the plan."""
    return Int8(value) if isinstance(value, int) and not isinstance(value, bool) else value
