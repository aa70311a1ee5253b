"""``manage.py web``: serve HTTP with Daphne."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.model_store.entries import watch_models
from inference_site.core.process_lifecycle import exit_within, raise_open_file_limit
from inference_site.core.storage.migrations import add_wait_option, wait_for_migrations
from inference_site.core.storage.postgresql import set_statement_timeout
from inference_site.gateway.daphne_server import run_server
from inference_site.ops import status
from inference_site.runs.request_log.refusals import refusal_writer

_ENDS_S = 10.0
"""How long the process may take to end after the last request is answered."""


class Command(BaseCommand):
    """Runs Daphne with the options of this site."""

    help = "Serve the API and the admin over HTTP."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", type=int, default=8000)
        parser.add_argument(
            "--fd",
            type=_open_file,
            help="an inherited IPv4 socket that listens already, instead of --host and --port",
        )
        parser.add_argument(
            "--wait-for-fd",
            type=_open_file,
            help="an inherited pipe: start only after its other end is closed",
        )
        add_wait_option(parser)

    def handle(self, *_: Any, host: str, port: int, fd: int | None, **options: Any) -> None:
        raise_open_file_limit()
        set_statement_timeout(settings.DATABASE_TIMEOUT_S)
        try:  # A missing or wrong setting would fail requests one by one.
            catalogue()
            settings.SECRET_KEY  # noqa: B018  # Django refuses an empty one when it is read.
        except ImproperlyConfigured as exc:
            raise CommandError(f"{exc} See docs/settings.md.") from exc
        root = settings.STATIC_ROOT
        if root and not Path(root, "staticfiles.json").is_file():  # Each page would fail.
            raise CommandError(f"STATIC_ROOT: run `manage.py collectstatic` to fill {root}.")
        status.register()

        def wait() -> None:
            wait_for_migrations(options)
            if (pipe := options["wait_for_fd"]) is not None:
                os.read(pipe, 1)
            watch_models()
            refusal_writer.start()

        run_server(host, port, fd, wait)
        exit_within(_ENDS_S, status=0)
        refusal_writer.stop()


def _open_file(text: str) -> int:
    """Return a descriptor that this process has."""
    descriptor = int(text)
    try:
        os.fstat(descriptor)
    except (OSError, OverflowError) as exc:
        raise ArgumentTypeError(f"{text} is not open in this process") from exc
    return descriptor
