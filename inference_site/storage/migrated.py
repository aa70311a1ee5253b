"""Waiting for a database that is being migrated."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser
from django.db import OperationalError, connection
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

logger = logging.getLogger(__name__)

_PERIOD_S = 0.1


def add_wait(parser: CommandParser) -> None:
    """Let a command be told to wait."""
    parser.add_argument(
        "--wait-for-migrations",
        action="store_true",
        help="begin when the database has every migration of this release",
    )


def wait_if_asked(options: Mapping[str, Any]) -> None:
    """Wait, if the command was told to."""
    if options["wait_for_migrations"]:
        wait_for_migrations()


def wait_for_migrations() -> None:
    """Return when the database has every migration of this release.

    One that cannot be reached is not waited for: a process answers without it, and says so.
    """
    wanted = set(MigrationLoader(None).disk_migrations or ())
    told = False
    try:
        while wanted - MigrationRecorder(connection).applied_migrations().keys():
            if not told:
                logger.info("waiting until the database is migrated")
            told = True
            connection.close()
            time.sleep(_PERIOD_S)
    except OperationalError as exc:
        logger.warning("not waiting for migrations: %s", exc)
    finally:
        connection.close()
