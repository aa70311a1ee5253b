"""Daphne's server with requests and sockets that are paced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from daphne.http_protocol import HTTPFactory
from daphne.server import Server
from daphne.ws_protocol import WebSocketFactory
from django.conf import settings

from inference_site.gateway.bodies import ROOM_KEY
from inference_site.gateway.http_answers import EVENTS
from inference_site.gateway.server.client_connections import ClientConnections
from inference_site.gateway.server.pacing import Paced
from inference_site.gateway.server.request_bounds import BoundedFactory, bounded_sockets

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
