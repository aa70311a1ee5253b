"""Steps of migrations that several apps take."""

from __future__ import annotations

from django.db.migrations import RunSQL


def drop_like_index(table: str, name: str) -> RunSQL:
    """Return the step that drops the index which Django adds to a unique text for ``LIKE 'x%'``.

    It holds up no write. Its migration is not atomic.
    """
    return RunSQL(
        f"DROP INDEX CONCURRENTLY IF EXISTS {name}",
        f"CREATE INDEX CONCURRENTLY {name} ON {table} (public_id varchar_pattern_ops)",
    )
