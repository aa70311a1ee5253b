"""The HTTP server: Daphne, with a bound on requests and a drain before its end."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from daphne.cli import CommandLineInterface
from django.urls import resolve

from inference_site.gateway.server.draining import DrainingServer
from inference_site.gc_freeze import freeze_imported_objects
from inference_site.generations.kinds import import_kinds
from inference_site.observability.tracing import start_tracing

_APPLICATION = "inference_site.asgi:application"


def run_server(host: str, port: int) -> Any:
    """Serve until stopped; return the exit status."""
    start_tracing("web")
    import_module(_APPLICATION.partition(":")[0])
    resolve("/v1/models")  # Imports the views.
    import_kinds()
    freeze_imported_objects()
    command = CommandLineInterface()
    command.server_class = DrainingServer
    return command.run(
        # -v 0: no access log of Daphne's; inference_site/gateway/access.py has one.
        ["-b", host, "-p", str(port), "-v", "0", "--no-server-name", _APPLICATION]
    )
