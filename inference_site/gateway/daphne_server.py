"""The web server: Daphne with bounded connections, and a drain before it stops.

Daphne ends every application at once. Here SIGTERM and SIGHUP close the port first, so that a
proxy or the next process gets new connections; answers say from then on that they close theirs.
Running requests and streams get ``DRAIN_TIMEOUT_S`` to end. The rest is cut off then, or at SIGINT,
and its generations are cancelled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from daphne.cli import CommandLineInterface
from daphne.http_protocol import HTTPFactory, WebRequest
from daphne.server import Server
from daphne.ws_protocol import WebSocketFactory
from django.conf import settings
from django.db import Error
from django.urls import resolve
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError
from twisted.internet import reactor
from twisted.internet.defer import Deferred

from inference_site.accounts import keys
from inference_site.catalogue.fleet.leases import live_view
from inference_site.catalogue.model_store.adapters import added_view
from inference_site.core.observability.tracing import start_tracing
from inference_site.core.process_lifecycle import (
    freeze_imported_objects,
    handle_stop_signals,
    notify,
    notify_stopping,
    switch_threads_often,
)
from inference_site.core.site_settings import models as site_settings
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.core.storage.redis import broker_client
from inference_site.gateway.bodies import SOCKET_MEMORY_KEY
from inference_site.gateway.connections import ClientConnections
from inference_site.gateway.daphne_protocols import (
    BoundedFactory,
    BoundedRequest,
    FlowControl,
    bounded_sockets,
)
from inference_site.gateway.delivery import ABORT, EVENTS
from inference_site.gateway.hub import hub
from inference_site.runs.kinds import import_kinds
from inference_site.runs.wake_ups import connect_to_broker

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that may wait to be accepted; the kernel lowers it to its own limit."""
_APPLICATION = "inference_site.asgi:application"
_PROTOCOL = "inference_site.protocol"
_BODY = "http.response.body"
_LARGEST_WRITE = 64 * 1024
"""Bytes; a larger part of an answer is written in pieces, as the client reads them."""
_LONGEST_HANDSHAKE_S = 30
"""What a handshake may take besides a statement that PostgreSQL does not answer."""
_DRAIN_CHECK_S = 0.1
_reactor: Any = reactor  # Its class is chosen at run time.
# By the wall clock, a clock that is set back would hold up all that waits, such as the removal of
# closed connections; one that is set ahead would end all waits at once.
_reactor.seconds = time.monotonic


class WebServer(Server):  # type: ignore[misc]  # Daphne has no types.
    """Daphne's server with the protocols of ``daphne_protocols``, and a drain before its end."""

    connections: dict[Any, dict[str, Any]]

    def __init__(self, application: Any, **options: Any) -> None:
        async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
            protocol = scope.pop(_PROTOCOL)
            if scope["type"] == "websocket":
                scope[SOCKET_MEMORY_KEY] = protocol.memory
            await application(scope, partial(protocol.receive, receive), send)

        super().__init__(app, **options)
        self.clients = ClientConnections()
        # A WebSocket message is a request's body.
        self.websocket_max_message_size = settings.MAX_BODY_BYTES
        self.websocket_max_frame_size = settings.MAX_BODY_BYTES
        # The key is checked before. Daphne's own limits, 5 and 20 s, close the connection without
        # an answer, or with a 403.
        longest_s = settings.DATABASE_TIMEOUT_S + _LONGEST_HANDSHAKE_S
        self.websocket_handshake_timeout = self.websocket_connect_timeout = longest_s
        self.is_draining = False
        self._ports: list[Any] = []
        self._drains_until = 0.0

    @property
    def http_factory(self) -> HTTPFactory:
        """The factory of connections. ``run`` sets Daphne's own just before it listens."""
        return self._http_factory

    @http_factory.setter
    def http_factory(self, _: HTTPFactory) -> None:
        self._http_factory = BoundedFactory(self)

    @property
    def ws_factory(self) -> WebSocketFactory:
        """The factory of WebSockets, likewise."""
        return self._ws_factory

    @ws_factory.setter
    def ws_factory(self, factory: WebSocketFactory) -> None:
        self._ws_factory = bounded_sockets(factory)

    def create_application(self, protocol: Any, scope: dict[str, Any]) -> Any:
        """Run the application for a request or a socket."""
        extensions = {**scope.get("extensions", {}), EVENTS: {}, ABORT: {}}
        scope = {**scope, _PROTOCOL: protocol, "extensions": extensions}
        return super().create_application(protocol, scope)

    async def handle_reply(self, protocol: FlowControl, message: dict[str, Any]) -> None:
        """Write a part of an answer; return when the client has read most of it."""
        for piece in pieces_of(message):
            await super().handle_reply(protocol, piece)
            await protocol.drained()

    def run(self) -> None:
        """Serve until stopped.

        The hub starts before the first request: the channel layer delivers nothing in the first
        tenth of a second of a subscription.
        """

        def begin() -> None:
            # Twisted does not take SIGHUP as a stop signal.
            handle_stop_signals(
                lambda: _reactor.callFromThread(_reactor.stop),
                lambda: _reactor.callFromThread(self._stop_draining),
            )
            notify("ready")

        _reactor.callLater(0, hub.ensure_running)
        _reactor.callWhenRunning(begin)
        super().run()

    def _stop_draining(self) -> None:
        self._drains_until = 0.0

    def listen_success(self, port: Any) -> None:
        """Keep the port, to close it."""
        self._ports.append(port)
        super().listen_success(port)

    def kill_all_applications(self) -> Deferred[Any]:
        """Drain, then stop. Twisted calls it and waits for the result."""
        self.is_draining = True
        for port in self._ports:
            port.stopListening()
        notify_stopping()
        logger.info("draining for %d s at most", settings.DRAIN_TIMEOUT_S)
        for protocol in self.connections:
            if isinstance(protocol, BoundedRequest):
                protocol.close_after_answer()
        drained: Deferred[Any] = Deferred()
        drained.addCallback(lambda _: self._kill())
        self._drains_until = time.monotonic() + settings.DRAIN_TIMEOUT_S
        self._check_drained(drained)
        return drained

    def _check_drained(self, drained: Deferred[Any], was_idle: bool = False) -> None:
        """Check again until nothing runs, twice: the last bytes are written after an end."""
        requests = sum(
            isinstance(protocol, WebRequest) and not details["application_instance"].done()
            for protocol, details in self.connections.items()
            if "application_instance" in details
        )
        running = max(requests, hub.followed())  # Idle WebSockets do not count.
        if time.monotonic() < self._drains_until and not (was_idle and not running):
            _reactor.callLater(_DRAIN_CHECK_S, self._check_drained, drained, not running)
            return
        if running:
            logger.warning("draining: %d requests and streams are cut off", running)
        drained.callback(None)

    def _kill(self) -> Deferred[Any]:
        # Daphne fails on connections that have sent no request.
        self.connections = {
            protocol: details
            for protocol, details in self.connections.items()
            if "application_instance" in details
        }
        killed: Deferred[Any] = super().kill_all_applications()
        return killed


def pieces_of(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Split a large part of a body, or many events, into messages of about ``_LARGEST_WRITE``."""
    if message["type"] == EVENTS:
        group, size = list[bytes](), 0
        for event in message["events"]:
            if group and size + len(event) > _LARGEST_WRITE:
                yield from _group(message, group)
                group, size = [], 0
            group.append(event)
            size += len(event)
        yield from _group(message, group)
        return
    body = message.get("body", b"")
    if message["type"] != _BODY or len(body) <= _LARGEST_WRITE:
        yield message
        return
    more = message.get("more_body", False)
    for start in range(0, len(body), _LARGEST_WRITE):
        piece = body[start : start + _LARGEST_WRITE]
        yield {**message, "body": piece, "more_body": more or start + len(piece) < len(body)}


def _group(message: dict[str, Any], events: list[bytes]) -> Iterator[dict[str, Any]]:
    """Yield events as one message; a single one, which may be large, as parts of a body."""
    if len(events) > 1:
        yield {**message, "events": events}
    else:
        yield from pieces_of({"type": _BODY, "body": events[0], "more_body": True})


def run_server(host: str, port: int, descriptor: int | None, wait: Callable[[], None]) -> None:
    """Serve until stopped. Raise SystemExit when the port cannot be bound.

    ``descriptor`` is that of a listening IPv4 socket, to be used instead of host and port.
    ``wait`` is called when everything is imported, before anything is connected.
    """
    import_module(_APPLICATION.partition(":")[0])
    resolve("/v1/models")  # Imports the views.
    import_kinds()
    wait()
    start_tracing("web")
    # Do once what each request does, as far as PostgreSQL and Redis are up.
    with suppress(Error), release_connection_after():
        keys.find_caller("")
    with suppress(RedisError):
        broker_client().ping()
        live_view.workers()
    for read_by_every_request in (keys, live_view, added_view, site_settings):
        read_by_every_request.keep_fresh()
    with suppress(OperationalError):
        connect_to_broker()
    freeze_imported_objects()
    switch_threads_often()
    command = CommandLineInterface()
    command.server_class = WebServer
    interface = host.strip("[]").replace(":", r"\:")
    endpoint = f"tcp:port={port}:interface={interface}:backlog={BACKLOG}"
    listen = ["-e", endpoint] if descriptor is None else ["--fd", str(descriptor)]
    # -v 0: no access log of Daphne's; inference_site/gateway/access.py has one.
    command.run([*listen, "-v", "0", "--no-server-name", _APPLICATION])
