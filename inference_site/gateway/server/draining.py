"""Daphne that lets what it answers come to an end before it stops.

Daphne ends every application at once. Here SIGTERM closes the port first, so that a proxy goes
elsewhere, and streams and requests get ``DRAIN_TIMEOUT_S``; what is left then is cut off, and its
generations are cancelled.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from daphne.http_protocol import WebRequest
from django.conf import settings
from twisted.internet import reactor
from twisted.internet.defer import Deferred

from inference_site.gateway.hub.hub import hub
from inference_site.gateway.server.paced_server import PacedServer

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_reactor: Any = reactor  # Its class is chosen at run time.


class DrainingServer(PacedServer):
    """Daphne's server with a drain before its end."""

    connections: dict[Any, dict[str, Any]]

    def __init__(self, application: Any, **options: Any) -> None:
        super().__init__(application, **options)
        self._ports: list[Any] = []
        self.is_draining = False

    def run(self) -> None:
        """Serve until stopped; the hub listens before the first request.

        The channel layer hands on nothing in the first tenth of a second after it has subscribed.
        """
        _reactor.callLater(0, hub.ensure_running)
        super().run()

    def listen_success(self, port: Any) -> None:
        """Keep the port, to close it."""
        self._ports.append(port)
        super().listen_success(port)

    def protocol_connected(self, protocol: Any) -> None:
        """While draining, a connection that was kept alive serves one request more."""
        super().protocol_connected(protocol)
        if self.is_draining:
            _close_after(protocol)

    def kill_all_applications(self) -> Deferred[Any]:
        """Stop: called by Twisted, which waits for the result."""
        self.is_draining = True
        for port in self._ports:
            port.stopListening()
        for protocol in self.connections:
            _close_after(protocol)
        drained: Deferred[Any] = Deferred()
        drained.addCallback(lambda _: self._kill())
        self._look(drained, time.monotonic() + settings.DRAIN_TIMEOUT_S)
        return drained

    def _look(self, drained: Deferred[Any], deadline: float, was_idle: bool = False) -> None:
        """Look again until nothing is left, twice: the last bytes are written after their end."""
        left = self._unfinished()
        if time.monotonic() < deadline and not (was_idle and not left):
            _reactor.callLater(_LOOK_S, self._look, drained, deadline, not left)
            return
        if left:
            logger.warning("draining: %d requests and streams are cut off", left)
        drained.callback(None)

    def _unfinished(self) -> int:
        """Return how many requests and followed streams there are; idle WebSockets are none."""
        requests = sum(
            isinstance(protocol, WebRequest) and not details["application_instance"].done()
            for protocol, details in self.connections.items()
            if "application_instance" in details
        )
        return max(requests, hub.followed())

    def _kill(self) -> Deferred[Any]:
        # Daphne fails on connections that have sent no request.
        self.connections = {
            protocol: details
            for protocol, details in self.connections.items()
            if "application_instance" in details
        }
        killed: Deferred[Any] = super().kill_all_applications()
        return killed


def _close_after(protocol: Any) -> None:
    """Have the connection closed once its request is answered."""
    # A request that is answered has no channel any more.
    channel = getattr(protocol, "channel", None)
    if isinstance(protocol, WebRequest) and channel is not None:
        channel.persistent = False
