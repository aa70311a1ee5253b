"""``manage.py web``: serve HTTP with Daphne."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from inference_site.gateway.server.daphne import run_server
from inference_site.status import metrics
from inference_site.storage.migrated import add_wait, wait_if_asked


class Command(BaseCommand):
    """Daphne with the options this site needs."""

    help = "Serve the API and the admin over HTTP."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", type=int, default=8000)
        parser.add_argument(
            "--fd",
            type=int,
            help="an inherited IPv4 socket that listens already, instead of --host and --port",
        )
        add_wait(parser)

    def handle(self, *_: Any, host: str, port: int, fd: int | None, **options: Any) -> None:
        wait_if_asked(options)
        metrics.register()
        sys.exit(run_server(host, port, fd))
