"""The HTTP server: Daphne, with a bound on requests and a drain before its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

from daphne.cli import CommandLineInterface
from django.db import Error
from django.urls import resolve
from redis.exceptions import RedisError

from inference_site.accounts.keys import find_caller
from inference_site.fleet.leases import live_view
from inference_site.gateway.server.draining import DrainingServer
from inference_site.generations.kinds import import_kinds
from inference_site.generations.wake_ups import prepare_to_send
from inference_site.observability.tracing import start_tracing
from inference_site.process_tuning import freeze_imported_objects, switch_threads_often
from inference_site.storage.postgresql import release_connection_after
from inference_site.storage.redis import broker_client
from inference_site.warm_up import warm_up

_APPLICATION = "inference_site.asgi:application"
BACKLOG = 4096
"""How many connections may wait to be accepted; the kernel lowers it to its own bound."""


def run_server(host: str, port: int, descriptor: int | None, wait: Callable[[], None]) -> None:
    """Serve until stopped. Raise SystemExit when the port cannot be had.

    ``descriptor`` is that of an IPv4 socket that listens already, instead of host and port.
    ``wait`` is called when everything is imported, before anything is connected.
    """
    import_module(_APPLICATION.partition(":")[0])
    resolve("/v1/models")  # Imports the views.
    import_kinds()
    wait()
    start_tracing("web")
    prepare_to_send()
    _connect()
    freeze_imported_objects()
    switch_threads_often()
    command = CommandLineInterface()
    command.server_class = DrainingServer
    interface = host.strip("[]").replace(":", r"\:")
    endpoint = f"tcp:port={port}:interface={interface}:backlog={BACKLOG}"
    listen = ["-e", endpoint] if descriptor is None else ["--fd", str(descriptor)]
    # -v 0: no access log of Daphne's; inference_site/gateway/access.py has one.
    command.run([*listen, "-v", "0", "--no-server-name", _APPLICATION])


def _connect() -> None:
    """Do once what each request does, as far as PostgreSQL and Redis are there."""
    with suppress(Error), release_connection_after():
        find_caller("")
    warm_up()
    with suppress(RedisError):
        broker_client().ping()
        live_view.workers()
