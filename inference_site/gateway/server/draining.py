"""Daphne that lets what it answers come to an end before it stops.

Daphne ends every application at once. Here SIGTERM and SIGHUP close the port first, so that a
proxy goes elsewhere or the next process accepts, and streams and requests get ``DRAIN_TIMEOUT_S``.
What is left then, or at SIGINT, is cut off, and its generations are cancelled.
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
from inference_site.process_lifecycle import handle_stop_signals, notify, notify_stopping

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
        self._drains_until = 0.0

    def run(self) -> None:
        """Serve until stopped; the hub listens before the first request.

        The channel layer hands on nothing in the first tenth of a second after it has subscribed.
        """
        _reactor.callLater(0, hub.ensure_running)
        _reactor.callWhenRunning(self._begin)
        super().run()

    def _begin(self) -> None:
        """Take the stop signals from Twisted, for which SIGHUP is none, and say that it serves."""
        handle_stop_signals(
            lambda: _reactor.callFromThread(_reactor.stop),
            lambda: _reactor.callFromThread(self._cut),
        )
        notify("ready")

    def _cut(self) -> None:
        self._drains_until = 0.0

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
        notify_stopping()
        logger.info("draining for %d s at most", settings.DRAIN_TIMEOUT_S)
        for protocol in self.connections:
            _close_after(protocol)
        drained: Deferred[Any] = Deferred()
        drained.addCallback(lambda _: self._kill())
        self._drains_until = time.monotonic() + settings.DRAIN_TIMEOUT_S
        self._look(drained)
        return drained

    def _look(self, drained: Deferred[Any], was_idle: bool = False) -> None:
        """Look again until nothing is left, twice: the last bytes are written after their end."""
        left = self._unfinished()
        if time.monotonic() < self._drains_until and not (was_idle and not left):
            _reactor.callLater(_LOOK_S, self._look, drained, not left)
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
