"""How the tests empty the database: what migrations have written stays.

Django's ``flush`` truncates every table, which takes PostgreSQL as long as some tests, and then
makes all content types and permissions anew; roles and rules are gone after it.
"""

from __future__ import annotations

from typing import Any

from django.core.management import get_commands
from django.core.management.base import BaseCommand
from django.db import connections, transaction

WRITTEN_BY_MIGRATIONS = {
    *("django_content_type", "alarms_rule"),
    *("auth_permission", "auth_group", "auth_group_permissions"),
}


class EmptyTables(BaseCommand):
    """Stands in for ``flush``, with which Django empties the database after a test."""

    stealth_options = (
        *("database", "interactive"),
        *("reset_sequences", "allow_cascade", "inhibit_post_migrate"),
    )

    def handle(self, *_: Any, database: str, **options: Any) -> None:
        """Delete the rows of every other table; the constraints are checked at the end."""
        connection = connections[database]
        quote = connection.ops.quote_name
        known = connection.introspection.django_table_names(only_existing=True, include_views=False)
        tables = sorted({*known} - WRITTEN_BY_MIGRATIONS)
        with transaction.atomic(using=database), connection.cursor() as cursor:
            asked = ", ".join(f"EXISTS (SELECT FROM {quote(table)})" for table in tables)
            cursor.execute(f"SELECT {asked}")
            for table, has_rows in zip(tables, cursor.fetchone(), strict=True):
                if has_rows:
                    cursor.execute(f"DELETE FROM {quote(table)}")  # noqa: S608  # Our tables.


def use_it() -> None:
    """Have Django's tests call it."""
    get_commands()["flush"] = EmptyTables()  # type: ignore[assignment]  # Or the command itself.
