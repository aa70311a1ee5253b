"""``manage.py beat``: the periodic work of the site. Run one of it; a second does no harm."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from inference_site.alarms.evaluation import evaluate
from inference_site.alarms.outbox import deliver
from inference_site.generations.maintenance import attempt, maintain, mend_torn
from inference_site.model_store.watching import watch_models
from inference_site.observability.metrics import MAINTENANCE_DONE
from inference_site.observability.metrics_server import watch_maintenance
from inference_site.process_lifecycle import handle_stop_signals, notify, notify_stopping
from inference_site.process_tuning import freeze_imported_objects
from inference_site.storage.migrations import add_wait, wait_if_asked
from inference_site.storage.postgresql import lent_connection, limit_statements, statements_within
from inference_site.usage.periodic import account_ended, prune_old

_STOP_S = 10.0
"""How long a run that is going on is waited for at the end."""


class Command(BaseCommand):
    """Each job has a thread of its own, so that a slow one delays no other."""

    help = "Do the periodic work of the site. One process for the whole site."
    requires_system_checks: list[str] = []  # They import all pages; `web` runs them.

    def add_arguments(self, parser: CommandParser) -> None:
        add_wait(parser)

    def handle(self, *_: Any, **options: Any) -> None:
        limit_statements(settings.DATABASE_TIMEOUT_S)
        wait_if_asked(options)
        watch_models()
        watch_maintenance()
        freeze_imported_objects()
        stopped = threading.Event()
        handle_stop_signals(stopped.set)
        notify("ready")
        run_periodically(stopped)


def run_periodically(stopped: threading.Event) -> None:
    """Do all jobs, each with its period, until the event is set."""
    jobs = (
        ("maintenance", _maintain, 1.0),
        ("mending", mend_torn, 1.0),
        ("accounting", _patiently(account_ended), 1.0),
        ("alarms", evaluate, 5.0),
        ("notices", deliver, 2.0),
    )
    threads = [
        threading.Thread(target=repeat, args=(*job, stopped), name=job[0], daemon=True)
        for job in (*jobs, ("pruning", _patiently(prune_old), 60.0))
    ]
    for thread in threads:
        thread.start()
    stopped.wait()
    notify_stopping()
    for thread in threads:
        thread.join(_STOP_S)


def repeat(name: str, act: Callable[[], None], period_s: float, stopped: threading.Event) -> None:
    """Do it once a period; a run that takes longer delays the next, and none is made up for."""
    while not stopped.is_set():
        started = time.monotonic()
        with lent_connection():
            attempt(name, act)
        stopped.wait(max(0.0, started + period_s - time.monotonic()))


def _patiently(act: Callable[[], None]) -> Callable[[], None]:
    """Let the statements of what reads or writes many rows take longer."""

    def run() -> None:
        with statements_within(settings.DATABASE_LONG_TIMEOUT_S):
            act()

    return run


def _maintain() -> None:
    maintain()
    MAINTENANCE_DONE.set_to_current_time()
