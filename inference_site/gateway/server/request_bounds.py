"""Daphne that runs the application at a request's head, and paces what it reads and writes.

Daphne collects a whole body before it runs the application, so that whoever sends one, with a key
or without, fills memory or the disk (https://github.com/django/daphne/issues/483); and it keeps
what a client does not read in memory, without bound. Here the application runs when the head has
come: it takes the body as it comes, or answers without it. A write ends when the client has read
most of what was written before. Once Daphne does both, this module can go.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from autobahn.websocket.types import ConnectionDeny
from daphne.http_protocol import HTTPFactory, WebRequest
from daphne.ws_protocol import WebSocketFactory, WebSocketProtocol
from twisted.internet import reactor
from twisted.web.http_headers import Headers

from inference_site.accounts.keys import cached_caller, read_secret
from inference_site.errors.api_errors import (
    ApiError,
    InternalError,
    InvalidRequestError,
    RateLimitError,
)
from inference_site.gateway.bodies import MessageRoom
from inference_site.gateway.http_answers import EVENTS, SAFE_HEADERS
from inference_site.gateway.server.bounded_channel import BoundedChannel
from inference_site.gateway.server.pacing import Paced

_LINGER_S = 30.0
"""For how long a body that was answered without being taken is read and dropped: a client that
still sends would lose the answer if the connection were closed."""
_KEY_HEADERS = ("authorization", "x-api-key")
_TRY_AGAIN_LATER = 1013
"""The code with which a WebSocket is closed (IANA's registry of close codes)."""
_later: Any = reactor  # Its class is chosen at run time.


class _NotKept(io.BytesIO):
    """Daphne reads no body out of a file that is closed."""

    closed = True


class BoundedRequest(Paced, WebRequest):  # type: ignore[misc]  # Daphne has no types.
    """A request whose application runs from the end of its head on."""

    _is_streamed = _is_answered = _expects_continue = False
    _has_ended = True
    _timer: Any = None

    def __init__(self, channel: Any, queued: bool = False) -> None:
        # Forms are none of Twisted's business: it would parse them on the event loop.
        super().__init__(channel, queued, parsePOSTFormSubmission=False)

    def gotLength(self, length: int | None) -> None:  # Twisted's name: the head is complete.
        """Run the application, unless there is no body: then Daphne does."""
        self.channel.head_has_come()
        super().gotLength(0)
        if length == 0:
            return
        expectation = self.requestHeaders.getRawHeaders("Expect") or [""]
        self._expects_continue = expectation[0].lower() == "100-continue"
        self.requestHeaders.removeHeader("Expect")  # Twisted would ask for the body now.
        self.requestHeaders.removeHeader("Upgrade")  # Daphne would keep the body.
        self.content = _NotKept()
        self._is_streamed, self._has_ended = True, False
        channel = self.channel
        super().requestReceived(channel._command, channel._path, channel._version)

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        """Note the end of the body. Twisted's name."""
        if not self._is_streamed:
            super().requestReceived(command, path, version)
            return
        self._has_ended = True
        if self._is_answered:
            self.finish()
        elif self.application_queue is not None:
            self.application_queue.put_nowait({"type": "http.request", "more_body": False})

    def handleContentChunk(self, data: bytes) -> None:  # Twisted's name.
        """Pass on what comes of the body; drop what comes after the answer."""
        if self.application_queue is not None and not self._is_answered:
            self.application_queue.put_nowait(
                {"type": "http.request", "body": data, "more_body": True}
            )
            self.has_come(len(data))

    async def receive(self, receive: Any) -> Any:
        """Return the next message for the application; ask for the body if the client waits."""
        if self._expects_continue and self.clientproto == b"HTTP/1.1" and self.channel is not None:
            self._expects_continue = False
            self.channel.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        message = await receive()
        self.was_taken(len(message.get("body", b"")))
        return message

    def handle_reply(self, message: dict[str, Any]) -> None:
        """Write a part of the answer."""
        if self._is_answered:
            return
        if message["type"] == "http.response.start" and not self._response_started:
            self.requestHeaders = Headers()  # The application has its own; a stream may run long.
            self.registerProducer(self, True)
        if message["type"] == EVENTS:
            self._write_events(message["events"])
        else:
            super().handle_reply(message)

    def _write_events(self, events: Sequence[bytes]) -> None:
        """Write each event as a chunk of its own, all of them with one call."""
        if self.finished or self.channel is None:
            return
        if not self.startedWriting:  # The head goes out with the first.
            self.write(events[0])
            events = events[1:]
        if self.chunked and not self._disconnected:
            self.sentLength += sum(map(len, events))
            chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in events if event]
            self.channel.write(b"".join(chunks))
        else:
            self.write(b"".join(events))

    def finish(self) -> None:
        """End the answer; before the body has come, read and drop the rest of that for a while."""
        if self.producer is not None:
            self.unregisterProducer()
        if self._has_ended:
            self._stop_timer()
            super().finish()
        elif not self._is_answered:
            self._is_answered = True
            self.was_taken(self.untaken)
            self.channel.only_lingers()
            self._timer = _later.callLater(_LINGER_S, self.channel.forceAbortClient)

    def basic_error(self, status: int, status_text: bytes, body: str) -> None:  # Daphne's name.
        """Answer what no application answers: a head that is none, or a failure of Daphne's."""
        error: ApiError = InternalError()
        if status == HTTPStatus.BAD_REQUEST:
            error = InvalidRequestError(f"{body}.")
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(error.body)),
            **SAFE_HEADERS,
        }
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        start = {"type": "http.response.start", "status": error.status, "headers": encoded}
        self.handle_reply(start)
        self.handle_reply({"type": "http.response.body", "body": error.body})

    def connectionLost(self, reason: Any) -> None:  # Twisted's name.
        """End what waits for the client."""
        self._stop_timer()
        self.stopProducing()
        super().connectionLost(reason)

    def _stop_timer(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None


class BoundedSocket(Paced, WebSocketProtocol):  # type: ignore[misc]  # As above.
    """A WebSocket that is read and written at the pace of the application and the client."""

    _is_denied = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.room = MessageRoom()

    def onConnect(self, request: Any) -> Any:  # Autobahn's name.
        """Begin a handshake; refuse it at once if its project is known and has too many sockets."""
        try:
            secret = read_secret(*(request.headers.get(name, "") for name in _KEY_HEADERS))
            caller, _ = cached_caller(secret)
            if caller is not None:
                self.room.count_for(caller.project_id)
        except RateLimitError as exc:
            self._is_denied = True
            raise ConnectionDeny(exc.status, exc.message) from exc  # type: ignore[no-untyped-call]  # Autobahn's.
        except ApiError:
            pass  # The application refuses a request without a valid key.
        return super().onConnect(request)

    def onMessageFrameBegin(self, length: int) -> None:  # Autobahn's name.
        """Hold room for what comes, or close the socket: the client may try again later."""
        super().onMessageFrameBegin(length)
        if not self.failedByMe and not self.room.takes(length):
            self._fail_connection(_TRY_AGAIN_LATER, "Too many large messages are being received.")

    def onOpen(self) -> None:  # Autobahn's name.
        """Take the place of the HTTP connection that the socket was."""
        self.transport.unregisterProducer()
        self.transport.registerProducer(self, True)
        super().onOpen()

    def onMessage(self, payload: bytes, isBinary: bool) -> None:  # Autobahn's name.
        """Pass a message on."""
        super().onMessage(payload, isBinary)
        self.has_come(len(payload))

    async def receive(self, receive: Any) -> Any:
        """Return the next message for the application."""
        message = await receive()
        self.was_taken(len(message.get("bytes") or (message.get("text") or "").encode()))
        return message

    def connectionLost(self, reason: Any) -> None:  # Twisted's name.
        """Forget the connection, which this protocol took over from that of HTTP."""
        self.factory.server_class.clients.remove(self.transport)
        self.room.end()
        super().connectionLost(reason)

    def onClose(self, wasClean: bool, code: int, reason: str) -> None:  # Autobahn's name.
        """End what waits for the client."""
        self.stopProducing()
        if not self._is_denied:  # Else Daphne does not know it.
            super().onClose(wasClean, code, reason)


class BoundedFactory(HTTPFactory):  # type: ignore[misc]  # As above.
    """Makes connections of such requests."""

    protocol = BoundedChannel

    def buildProtocol(self, addr: Any) -> Any:  # Twisted's name.
        """Return a new connection; None to have it closed at once."""
        clients = self.server.clients
        has_room = clients.make_room(addr)
        if not has_room and not clients.may_tell_refused():
            return None
        protocol = super().buildProtocol(addr)
        protocol.requestFactory = BoundedRequest
        protocol.has_room = has_room
        return protocol

    def log(self, request: Any) -> None:  # Twisted's name.
        """Do nothing: ``gateway.access`` logs, and Twisted would write a line for nobody."""


def bounded_sockets(factory: WebSocketFactory) -> WebSocketFactory:
    """Have a factory make such sockets; they tell why they are closed, as with 1009 (too big)."""
    factory.protocol = BoundedSocket
    factory.setProtocolOptions(failByDrop=False, closeHandshakeTimeout=30)
    return factory
