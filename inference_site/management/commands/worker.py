"""``manage.py worker --models a,b``: serve models on this host."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from inference_site.celery import app
from inference_site.core.domain.errors import EngineLoadError
from inference_site.core.process_lifecycle import raise_open_file_limit
from inference_site.core.storage.migrations import add_wait_option, wait_for_migrations
from inference_site.core.storage.postgresql import set_statement_timeout
from worker.runtime.process import run_worker

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class Command(BaseCommand):
    """Loads the models, then runs their generations until stopped."""

    help = "Serve models on this host: load them, then run generations until stopped."
    requires_system_checks: list[str] = []  # They import all pages; `web` runs them.

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--models", help="ids separated by commas, or none (default: START_MODELS, or all)"
        )
        parser.add_argument("--loglevel", type=str.upper, choices=_LOG_LEVELS, default="INFO")
        add_wait_option(parser)

    def handle(self, *_: Any, models: str | None, loglevel: str, **options: Any) -> None:
        set_statement_timeout(settings.DATABASE_TIMEOUT_S)
        raise_open_file_limit()
        names = settings.START_MODELS if models is None else models.split(",")
        try:
            # A worker with names takes no other models; on demand, requests load models.
            takes_new = not (names or settings.LOAD_ON_DEMAND)
            status = run_worker(
                app, names, loglevel, partial(wait_for_migrations, options), takes_new=takes_new
            )
        except (EngineLoadError, ImproperlyConfigured) as exc:
            raise CommandError(str(exc)) from exc
        sys.exit(status)
