"""Statements that every request runs: PostgreSQL plans them once for each connection.

To plan them takes it ten times as long as to run them. Django's own statements are planned each
time, because their values are part of their text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
from django.db import connection
from psycopg.types.numeric import Int8

from inference_site.storage.connections import impatience


def execute_prepared(statement: str, given: Mapping[str, Any]) -> psycopg.Cursor[Any]:
    """Run a statement; it is planned when its connection first runs it.

    That is Django's connection if the thread has one, and else one that is lent for this statement.
    The text must be one of a few. Raise Django's errors.
    """
    with _lent() as lent:
        return _run(lent, statement, given)


def execute_impatiently(statement: str, given: Mapping[str, Any]) -> psycopg.Cursor[Any]:
    """Run one statement like ``execute_prepared``, as the whole of an ``impatient_transaction``.

    It takes one round trip in place of four: what a pipeline sends is one transaction, unless one
    is open already.
    """
    with _lent() as lent, lent.pipeline():
        _run(lent, *impatience())
        return _run(lent, statement, given)


def execute_together(
    *statements: tuple[str, Mapping[str, Any]],
) -> list[psycopg.Cursor[Any]]:
    """Run statements like ``execute_prepared``, in one round trip and as one transaction.

    They become part of a transaction that is open already.
    """
    with _lent() as lent, lent.pipeline():
        return [_run(lent, statement, given) for statement, given in statements]


@contextmanager
def _lent() -> Iterator[psycopg.Connection[Any]]:
    with connection.wrap_database_errors:
        pool: Any = getattr(connection, "pool", None)  # Django's stubs do not know it.
        if connection.connection is not None or pool is None:
            connection.ensure_connection()
            connection.validate_no_broken_transaction()
            yield connection.connection
            return
        pool.open()
        lent = pool.getconn()
        try:
            yield lent
        finally:
            pool.putconn(lent)


def _run(
    lent: psycopg.Connection[Any], statement: str, given: Mapping[str, Any]
) -> psycopg.Cursor[Any]:
    values = {name: _typed(value) for name, value in given.items()}
    return psycopg.Cursor(lent).execute(statement, values, prepare=True)


def _typed(value: Any) -> Any:
    """Return whole numbers as one type: psycopg's depends on how large each is, and so would the
    plan."""
    if isinstance(value, list):
        return [_typed(entry) for entry in value]
    return Int8(value) if isinstance(value, int) and not isinstance(value, bool) else value
