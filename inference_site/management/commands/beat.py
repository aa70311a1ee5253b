"""``manage.py beat``: the clock of the site, and the worker of what it asks for. Run one of it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from typing import Any

from celery.beat import EmbeddedService
from django.core.management.base import BaseCommand, CommandParser

from inference_site.celery import app
from inference_site.observability.process_health import watch_upkeep
from inference_site.storage.migrated import add_wait, wait_if_asked


class Command(BaseCommand):
    """Beat in a thread of a worker that hears the maintenance queue alone.

    Apart from the model workers, so that upkeep never waits behind generations; and in a thread,
    because Celery's own ``-B`` forks a process that survives when the worker is killed.
    """

    help = "Schedule the periodic work of the site and run it. One process for the whole site."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--loglevel", default="INFO")
        add_wait(parser)

    def handle(self, *_: Any, loglevel: str, **options: Any) -> None:
        wait_if_asked(options)
        watch_upkeep()
        clock: Any = EmbeddedService(app, thread=True)
        clock.start()
        threading.Thread(target=_end_with, args=(clock,), daemon=True).start()
        worker = app.Worker(
            hostname=f"maintenance-{os.getpid()}@{socket.gethostname()}",
            pool_cls="solo",
            queues=["maintenance"],
            loglevel=loglevel,
            without_gossip=True,
            without_mingle=True,
            without_heartbeat=True,
            quiet=True,  # No banner among the lines of the log.
        )
        worker.start()
        clock.stop()
        sys.exit(worker.exitcode or 0)


def _end_with(clock: Any) -> None:
    """End this process when the clock has stopped, so that its supervisor starts a new one."""
    clock.join()
    os.kill(os.getpid(), signal.SIGTERM)
