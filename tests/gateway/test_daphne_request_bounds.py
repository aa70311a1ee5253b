"""Daphne builds its requests as ours: this fails when it makes its factory in another way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from daphne import server as daphne_server
from twisted.internet.defer import Deferred

from inference_site.gateway.daphne_protocols import BoundedRequest
from inference_site.gateway.daphne_server import WebServer


class Endpoint:
    """A port; it keeps the factory that it is to make connections with."""

    factory: Any = None

    def listen(self, factory: Any) -> Deferred[Any]:
        self.factory = factory
        return Deferred()


def test_every_connection_bounds_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint()
    nothing = SimpleNamespace(
        callLater=lambda *_: None, addSystemEventTrigger=lambda *_: None, _asyncioEventloop=None
    )
    monkeypatch.setattr(daphne_server, "serverFromString", lambda *_: endpoint)
    monkeypatch.setattr(daphne_server, "reactor", nothing)
    monkeypatch.setattr(
        daphne_server, "globalLogBeginner", SimpleNamespace(beginLoggingTo=lambda *_, **__: None)
    )
    monkeypatch.setattr(daphne_server.asyncio, "set_event_loop", lambda _: None)
    server = WebServer(None, endpoints=["tcp:port=0"])
    server.abort_start = True  # All but the reactor's loop.
    monkeypatch.setattr(daphne_server, "WebSocketFactory", lambda *_, **__: _Options())
    server.run()
    assert endpoint.factory.buildProtocol(None).requestFactory is BoundedRequest


class _Options:
    def setProtocolOptions(self, **_: Any) -> None:  # Autobahn's name.
        """Take no options."""
