"""``manage.py beat``: the periodic work of the site. Run one process; a second does no harm.

The jobs for batches and for runs of cases cost almost nothing while there are none. What works on
them imports the whole handling of requests, so it is imported when the first one is there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser
from django.db.models import QuerySet

from inference_site.batches.models import Batch
from inference_site.cases.models import CaseRun, RunState
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.model_store.entries import watch_models
from inference_site.console.alarms.evaluation import evaluate
from inference_site.core.observability.metrics import MAINTENANCE_DONE, serve_beat_metrics
from inference_site.core.observability.outages import OutageLog
from inference_site.core.process_lifecycle import (
    freeze_imported_objects,
    handle_stop_signals,
    notify,
    notify_stopping,
)
from inference_site.core.storage.migrations import add_wait_option, wait_for_migrations
from inference_site.core.storage.postgresql import (
    cached_sql,
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

if TYPE_CHECKING:
    from inference_site.batches.feeding import Feeder

logger = logging.getLogger(__name__)

_STOP_S = 10.0
"""How long to wait at the end for a job that runs."""
_FEED_S, _LOOK_S = 0.1, 0.5
_looked_at, _has_open = 0.0, False
_feeder_lock = threading.Lock()
_known_feeder: Feeder | None = None


class Command(BaseCommand):
    """Runs each job in its own thread, so that a slow job does not delay the others."""

    help = "Do the periodic work of the site. One process for the whole site."
    requires_system_checks: list[str] = []  # They import all pages; `web` runs them.

    def add_arguments(self, parser: CommandParser) -> None:
        add_wait_option(parser)

    def handle(self, *_: Any, **options: Any) -> None:
        set_statement_timeout(settings.DATABASE_TIMEOUT_S)
        catalogue()  # A bad models file would fail the jobs one by one.
        wait_for_migrations(options)
        watch_models()
        serve_beat_metrics()
        freeze_imported_objects()
        stops: SimpleQueue[None] = SimpleQueue()  # An Event must not be set by a signal handler.
        handle_stop_signals(partial(stops.put, None))
        notify("ready")
        run_periodically(stops.get)


def run_periodically(wait: Callable[[], object]) -> None:
    """Run all jobs, each with its period in seconds, until ``wait`` returns."""
    stopped = threading.Event()
    jobs = (
        ("maintenance", _maintain, 1.0),
        ("mending", repair_inconsistent, 1.0),
        ("batches", _feed_batches, _feeding_period_s),
        ("batch files", _prepare_batches, _LOOK_S),
        ("runs of cases", _collect_results, 2.0),
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
    wait()
    stopped.set()
    notify_stopping()
    for thread in threads:
        thread.join(_STOP_S)


def repeat(
    name: str,
    act: Callable[[], None],
    period_s: float | Callable[[], float],
    stopped: threading.Event,
) -> None:
    """Run a job once a period; a longer run delays the next one, and missed runs are skipped."""
    outage = OutageLog(logger, name)
    while not stopped.is_set():
        started = time.monotonic()
        with release_connection_after():
            try_and_log(name, act, outage)
        next_at = started + (period_s() if callable(period_s) else period_s)
        stopped.wait(max(0.0, next_at - time.monotonic()))


def _with_long_timeout(act: Callable[[], None]) -> Callable[[], None]:
    """Allow more time to the statements of a job that reads or writes many rows."""

    def run() -> None:
        with statement_timeout(settings.DATABASE_LONG_TIMEOUT_S):
            act()

    return run


def _maintain() -> None:
    maintain()
    MAINTENANCE_DONE.set_to_current_time()


def _feed_batches() -> None:
    """Put the lines of batches into the queue."""
    if _has_open_batches():
        _feeder().feed()


def _feeding_period_s() -> float:
    """Return a short period while there are batches: an idle site wakes rarely."""
    return _FEED_S if _has_open else _LOOK_S


def _prepare_batches() -> None:
    """Validate new batches, and write the results of ended ones."""
    if _has_open_batches():
        _feeder().prepare()


def _has_open_batches() -> bool:
    """Whether a batch has not ended; looks twice a second while there is none."""
    global _looked_at, _has_open  # noqa: PLW0603  # One value for the process.
    if _has_open or time.monotonic() - _looked_at >= _LOOK_S:
        _has_open = bool(_one_open_batch())  # An error reaches each job that asks.
        _looked_at = time.monotonic()
    return _has_open


@cached_sql
def _one_open_batch() -> QuerySet[Any, Any]:
    return Batch.objects.open().values_list("pk")[:1]


def _feeder() -> Feeder:
    global _known_feeder  # noqa: PLW0603  # One for the process.
    with _feeder_lock:  # The jobs have a thread each.
        if _known_feeder is None:
            from inference_site.batches.feeding import Feeder

            _known_feeder = Feeder()
        return _known_feeder


def _collect_results() -> None:
    """Take the results of runs of cases."""
    if _one_open_run():
        from inference_site.cases.running import collect

        collect()


@cached_sql
def _one_open_run() -> QuerySet[Any, Any]:
    return CaseRun.objects.exclude(state=RunState.ENDED).values_list("pk")[:1]
