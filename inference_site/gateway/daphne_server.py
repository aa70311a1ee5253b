"""Daphne's server with requests and sockets that are paced.

Daphne that lets what it answers come to an end before it stops.

Daphne ends every application at once. Here SIGTERM and SIGHUP close the port first, so that a
proxy goes elsewhere or the next process accepts, and streams and requests get ``DRAIN_TIMEOUT_S``.
What is left then, or at SIGINT, is cut off, and its generations are cancelled.

The HTTP server: Daphne, with a bound on requests and a drain before its end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
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
from redis.exceptions import RedisError
from twisted.internet import reactor
from twisted.internet.defer import Deferred

from inference_site.accounts.keys import find_caller
from inference_site.fleet.leases import live_view
from inference_site.gateway.bodies import ROOM_KEY
from inference_site.gateway.connections import ClientConnections
from inference_site.gateway.daphne_protocols import BoundedFactory, Paced, bounded_sockets
from inference_site.gateway.delivery import EVENTS
from inference_site.gateway.hub import hub
from inference_site.gc_freeze import freeze_imported_objects
from inference_site.generations.kinds import import_kinds
from inference_site.generations.wake_ups import prepare_to_send
from inference_site.observability.tracing import start_tracing
from inference_site.process_lifecycle import handle_stop_signals, notify, notify_stopping
from inference_site.rehearsal import rehearse
from inference_site.storage.connections import lent_connection
from inference_site.storage.redis_clients import broker_client
from inference_site.thread_switches import switch_threads_often

logger = logging.getLogger(__name__)


_PROTOCOL = "inference_site.protocol"
_BODY = "http.response.body"
_LARGEST_WRITE = 64 * 1024
"""Bytes. Between the writes of a larger part of an answer, the client has to read."""


class PacedServer(Server):  # type: ignore[misc]  # Daphne has no types.
    """Daphne's server, with paced connections on all its ports."""

    def __init__(self, application: Any, **options: Any) -> None:
        super().__init__(_receiving(application), **options)
        self.clients = ClientConnections()
        # A message of a socket is a request's body.
        self.websocket_max_message_size = settings.MAX_BODY_BYTES
        self.websocket_max_frame_size = settings.MAX_BODY_BYTES

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
        extensions = {**scope.get("extensions", {}), EVENTS: {}}
        scope = {**scope, _PROTOCOL: protocol, "extensions": extensions}
        return super().create_application(protocol, scope)

    async def handle_reply(self, protocol: Paced, message: dict[str, Any]) -> None:
        """Write a part of an answer, and wait until the client has read what was before."""
        for part in _parts(message):
            await super().handle_reply(protocol, part)
            await protocol.drained()


def _receiving(application: Any) -> Any:
    """Return the application, with a ``receive`` that its protocol counts."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        protocol = scope.pop(_PROTOCOL)
        if scope["type"] == "websocket":
            scope[ROOM_KEY] = protocol.room
        await application(scope, partial(protocol.receive, receive), send)

    return app


def _parts(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Cut a part of a body, or many events, into smaller ones."""
    if message["type"] == EVENTS:
        for group in _groups(message["events"]):
            if len(group) > 1:
                yield {**message, "events": group}
            else:
                yield from _parts({"type": _BODY, "body": group[0], "more_body": True})
        return
    body = message.get("body", b"")
    if message["type"] != _BODY or len(body) <= _LARGEST_WRITE:
        yield message
        return
    more = message.get("more_body", False)
    for start in range(0, len(body), _LARGEST_WRITE):
        part = body[start : start + _LARGEST_WRITE]
        yield {**message, "body": part, "more_body": more or start + len(part) < len(body)}


def _groups(events: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Cut events into groups of about the size of a write; one that is larger is alone."""
    group, size = list[bytes](), 0
    for event in events:
        if group and size + len(event) > _LARGEST_WRITE:
            yield group
            group, size = [], 0
        group.append(event)
        size += len(event)
    yield group


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
    with suppress(Error), lent_connection():
        find_caller("")
    rehearse()
    with suppress(RedisError):
        broker_client().ping()
        live_view.workers()
