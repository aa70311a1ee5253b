"""The HTTP server: Daphne, with a bound on what it takes in before the application sees it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from daphne import http_protocol
from daphne.cli import CommandLineInterface
from django.conf import settings
from django.urls import resolve

from inference_site.gateway.draining import DrainingServer
from inference_site.gc_freeze import freeze_imported_objects
from inference_site.observability.tracing import start_tracing

_APPLICATION = "inference_site.asgi:application"
_GIVE_UP_AT = 8
"""A body this many times over the limit is not read to its end; the connection is closed."""


class BoundedRequest(http_protocol.WebRequest):  # type: ignore[misc]  # Twisted's class is untyped.
    """Keeps one byte more of a body than is allowed, so that the relay can refuse it.

    Daphne collects the whole body, in memory or in a file, before the application runs; without a
    bound a client could fill both. The rest is read and dropped, so that the client is answered.
    """

    _kept = _received = 0

    def gotLength(self, length: int | None) -> None:  # Twisted's name.
        """Prepare for a body of this length."""
        super().gotLength(None if length is None else min(length, settings.MAX_BODY_BYTES + 1))

    def handleContentChunk(self, data: bytes) -> None:  # Twisted's name.
        """Keep what fits."""
        kept = data[: settings.MAX_BODY_BYTES + 1 - self._kept]
        self._kept += len(kept)
        self._received += len(data)
        if kept:
            super().handleContentChunk(kept)
        if self._received > _GIVE_UP_AT * settings.MAX_BODY_BYTES:
            self.channel.forceAbortClient()


def run_server(host: str, port: int) -> Any:
    """Serve until stopped; return the exit status."""
    http_protocol.WebRequest = BoundedRequest
    start_tracing("web")
    import_module(_APPLICATION.partition(":")[0])
    resolve("/v1/models")  # Imports the views.
    freeze_imported_objects()
    command = CommandLineInterface()
    command.server_class = DrainingServer
    return command.run(
        # -v 0: no access log of Daphne's; inference_site/gateway/access.py has one.
        ["-b", host, "-p", str(port), "-v", "0", "--no-server-name", _APPLICATION]
    )
