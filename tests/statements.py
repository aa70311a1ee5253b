"""How much this session has asked of PostgreSQL; only differences of two counts say something."""

from __future__ import annotations

from django.db import connection


def prepared_runs() -> int:
    """Return how often prepared statements were run, which Django does not count."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT sum(generic_plans + custom_plans) FROM pg_prepared_statements")
        [(runs,)] = cursor.fetchall()
    return int(runs or 0)


def planned_each_time() -> list[str]:
    """Return the prepared statements that still have no plan after the fifth run."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT statement FROM pg_prepared_statements "
            "WHERE generic_plans = 0 AND custom_plans > 5"
        )
        return [statement for (statement,) in cursor.fetchall()]


def rows_fetched(table: str) -> int:
    """Return how many rows of a table were fetched by indexes."""
    return _count("idx_tup_fetch", table)


def rows_updated(table: str) -> int:
    """Return how many rows of a table were updated."""
    return _count("n_tup_upd", table)


def _count(what: str, table: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT {what} FROM pg_stat_xact_user_tables WHERE relname = %s",  # noqa: S608
            [table],
        )
        [(rows,)] = cursor.fetchall()
    return int(rows)
