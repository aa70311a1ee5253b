"""``manage.py beat``: the periodic work of the site. Run one process; a second does no harm."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from inference_site.batches.jobs import feed, prepare
from inference_site.cases.jobs import collect_results
from inference_site.catalogue.model_store.entries import watch_models
from inference_site.console.alarms.evaluation import evaluate
from inference_site.core.observability.metrics import MAINTENANCE_DONE, serve_beat_metrics
from inference_site.core.process_lifecycle import (
    freeze_imported_objects,
    handle_stop_signals,
    notify,
    notify_stopping,
)
from inference_site.core.storage.migrations import add_wait_option, wait_for_migrations
from inference_site.core.storage.postgresql import (
    release_connection_after,
    set_statement_timeout,
    statement_timeout,
)
from inference_site.mcp.connections import end_grants
from inference_site.outbox.delivery import Deliverer
from inference_site.runs.maintenance import maintain, repair_inconsistent, try_and_log
from inference_site.runs.usage.accounting import account_ended
from inference_site.runs.usage.dimensions import Bound
from inference_site.runs.usage.pruning import prune_old

_STOP_S = 10.0
"""How long to wait at the end for a job that runs."""


class Command(BaseCommand):
    """Runs each job in its own thread, so that a slow job does not delay the others."""

    help = "Do the periodic work of the site. One process for the whole site."
    requires_system_checks: list[str] = []  # They import all pages; `web` runs them.

    def add_arguments(self, parser: CommandParser) -> None:
        add_wait_option(parser)

    def handle(self, *_: Any, **options: Any) -> None:
        set_statement_timeout(settings.DATABASE_TIMEOUT_S)
        wait_for_migrations(options)
        watch_models()
        serve_beat_metrics()
        freeze_imported_objects()
        stopped = threading.Event()
        handle_stop_signals(stopped.set)
        notify("ready")
        run_periodically(stopped)


def run_periodically(stopped: threading.Event) -> None:
    """Run all jobs, each with its period in seconds, until the event is set."""
    jobs = (
        ("maintenance", _maintain, 1.0),
        ("mending", repair_inconsistent, 1.0),
        ("batches", feed, 0.1),
        ("batch files", prepare, 0.5),
        ("runs of cases", collect_results, 2.0),
        ("accounting", _with_long_timeout(account_ended), 1.0),
        ("values of usage", _with_long_timeout(Bound()), 60.0),
        ("alarms", evaluate, 5.0),
        ("outbox", Deliverer().start, 1.0),
        ("ended access", end_grants, 5.0),
        ("pruning", _with_long_timeout(partial(prune_old, stopped)), 60.0),
    )
    threads = [
        threading.Thread(target=repeat, args=(*job, stopped), name=job[0], daemon=True)
        for job in jobs
    ]
    for thread in threads:
        thread.start()
    stopped.wait()
    notify_stopping()
    for thread in threads:
        thread.join(_STOP_S)


def repeat(name: str, act: Callable[[], None], period_s: float, stopped: threading.Event) -> None:
    """Run a job once a period; a longer run delays the next one, and missed runs are skipped."""
    while not stopped.is_set():
        started = time.monotonic()
        with release_connection_after():
            try_and_log(name, act)
        stopped.wait(max(0.0, started + period_s - time.monotonic()))


def _with_long_timeout(act: Callable[[], None]) -> Callable[[], None]:
    """Allow more time to the statements of a job that reads or writes many rows."""

    def run() -> None:
        with statement_timeout(settings.DATABASE_LONG_TIMEOUT_S):
            act()

    return run


def _maintain() -> None:
    maintain()
    MAINTENANCE_DONE.set_to_current_time()
