"""The option ``--wait-for-migrations`` of the commands that start a process."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser
from django.db import connection
from django.db.migrations import RunSQL
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

from inference_site.storage.postgresql import DATABASE_UNAVAILABLE

logger = logging.getLogger(__name__)

_PERIOD_S = 0.25
"""Three processes wait on a first start, and to look costs the one that migrates its processor."""


def add_wait(parser: CommandParser) -> None:
    """Add the option to a command."""
    parser.add_argument(
        "--wait-for-migrations",
        action="store_true",
        help="start only after the database has all migrations of this release",
    )


def wait_if_asked(options: Mapping[str, Any]) -> None:
    """Wait for the migrations if the option was given."""
    if options["wait_for_migrations"]:
        wait_for_migrations()


def wait_for_migrations() -> None:
    """Return when the database has all migrations of this release.

    Return at once if the database is not reachable: a process can start and answer without it.
    """
    loader = MigrationLoader(None, load=False)
    loader.load_disk()  # Their graph is for who applies them.
    wanted = set(loader.disk_migrations or ())
    is_logged = False
    try:
        while wanted - MigrationRecorder(connection).applied_migrations().keys():
            if not is_logged:
                logger.info("waiting until the database is migrated")
            is_logged = True
            connection.close()
            time.sleep(_PERIOD_S)
    except DATABASE_UNAVAILABLE as exc:
        logger.warning("not waiting for migrations: the database is not reachable: %s", exc)
    finally:
        connection.close()


# The module's text:
# """Steps of migrations that several apps take."""


def drop_like_index(table: str, name: str) -> RunSQL:
    """Return the step that drops the index which Django adds to a unique text for ``LIKE 'x%'``.

    It holds up no write. Its migration is not atomic.
    """
    return RunSQL(
        f"DROP INDEX CONCURRENTLY IF EXISTS {name}",
        f"CREATE INDEX CONCURRENTLY {name} ON {table} (public_id varchar_pattern_ops)",
    )
