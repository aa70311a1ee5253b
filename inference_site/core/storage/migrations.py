"""Migrations: the option ``--wait-for-migrations``, and an operation that several apps use."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

from django.core.management.base import CommandParser
from django.db import connection
from django.db.migrations import RunSQL
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

from inference_site.core.storage.postgresql import DATABASE_UNAVAILABLE

logger = logging.getLogger(__name__)

_PERIOD_S = 0.25
"""At a first start three processes wait, and each check takes processor time from ``migrate``."""


def add_wait_option(parser: CommandParser) -> None:
    """Add ``--wait-for-migrations`` to a command that starts a process."""
    parser.add_argument(
        "--wait-for-migrations",
        action="store_true",
        help="start only after the database has all migrations of this release",
    )


def wait_for_migrations(options: Mapping[str, Any]) -> None:
    """With ``--wait-for-migrations``, return once the database has all migrations of this release.

    Return if the database is not reachable: a process can start and answer without it.
    """
    if not options["wait_for_migrations"]:
        return
    is_logged = False
    try:
        while migrations_of_release() - MigrationRecorder(connection).applied_migrations().keys():
            if not is_logged:
                logger.info("waiting until the database is migrated")
            is_logged = True
            connection.close()
            time.sleep(_PERIOD_S)
    except DATABASE_UNAVAILABLE as exc:
        logger.warning("not waiting for migrations: the database is not reachable: %s", exc)
    finally:
        connection.close()


@cache
def migrations_of_release() -> frozenset[tuple[str, str]]:
    """Return the app and the name of each migration of this release."""
    loader = MigrationLoader(None, load=False)
    loader.load_disk()  # The graph of the migrations is not needed.
    return frozenset(loader.disk_migrations or ())


def drop_like_index(table: str, name: str) -> RunSQL:
    """Return the operation that drops the index which Django adds to a unique text for ``LIKE``.

    It blocks no writes. A migration with it must not be atomic.
    """
    return RunSQL(
        f"DROP INDEX CONCURRENTLY IF EXISTS {name}",
        f"CREATE INDEX CONCURRENTLY {name} ON {table} (public_id varchar_pattern_ops)",
    )
