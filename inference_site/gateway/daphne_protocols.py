"""Daphne's connections, requests and WebSockets with bounds: the subclasses of its protocols.

Daphne collects a whole body before it runs the application, so anybody, with or without a key, can
fill memory or the disk (https://github.com/django/daphne/issues/483). It also keeps what a client
does not read in memory, without bound. Here the application runs at the end of the request's head:
it reads the body as it comes, or answers without it. A connection is read no faster than the
application takes its data, and a write ends when the client has read most of what was written
before. Once Daphne does this, ``BoundedRequest``, ``BoundedSocket`` and ``FlowControl`` can go.

Twisted closes a connection whose head is too long without an answer, so that a proxy or a client
reports a failure of the server; and it waits for a head for as long as a byte of it comes each
minute. ``BoundedChannel`` answers such a head, and closes a connection that sends none in time.
"""

from __future__ import annotations

import asyncio
import io
import logging
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import orjson
from autobahn.websocket.types import ConnectionDeny
from daphne.http_protocol import HTTPFactory, WebRequest
from daphne.ws_protocol import WebSocketFactory, WebSocketProtocol
from django.conf import settings
from twisted.internet import reactor
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel
from twisted.web.http_headers import Headers

from inference_site.accounts.keys import cached_caller, read_secret
from inference_site.core.errors.api_errors import (
    ApiError,
    HeadersTooLargeError,
    InternalError,
    InvalidRequestError,
    RateLimitError,
    UnavailableError,
    UriTooLongError,
)
from inference_site.gateway.bodies import SocketMemory
from inference_site.gateway.connections import ClientConnections, dropped_without_head
from inference_site.gateway.delivery import ABORT, EVENTS, SAFE_HEADERS

logger = logging.getLogger(__name__)

_MOST_UNTAKEN = 256 * 1024
"""Bytes that may wait for the application before the connection is read no further."""
_REFUSAL_LINGER_S = 5
_BODY_LINGER_S = 30.0
"""How long a connection is read and its data dropped after a refusal, or after an answer to a body
that still comes: if it were closed at once, the client would lose the answer."""
_MOST_PATH = 1_000
"""Bytes of a URL that are read to find the API which an error is for."""
_ABSOLUTE_FORM = re.compile(rb"https?://(?P<host>[^/?#]*)/?", re.IGNORECASE)
"""The begin of a target with scheme and host, as clients send it to proxies (RFC 9112, 3.2.2)."""
_KEY_HEADERS = ("authorization", "x-api-key")
_TRY_AGAIN_LATER = 1013
"""A close code of WebSockets (IANA's registry)."""
_reactor: Any = reactor  # Its class is chosen at run time.


class FlowControl:
    """Stops reading a connection when the application is slow, and writing when the client is.

    Twisted buffers 64 KiB of writes, and what one write goes beyond that; then it calls
    ``pauseProducing``.
    """

    transport: Any
    untaken = 0
    _is_paused = False
    _drained: asyncio.Future[None] | None = None

    def note_received(self, size: int) -> None:
        """Count bytes that wait for the application; stop reading when they are too many."""
        self.untaken += size
        if self.untaken > _MOST_UNTAKEN and not self._is_paused:
            self._is_paused = True
            self.transport.pauseProducing()

    def note_taken(self, size: int) -> None:
        """Count bytes that the application has taken; read again when few are left."""
        self.untaken -= size
        if self._is_paused and self.untaken <= _MOST_UNTAKEN // 2:
            self._is_paused = False
            self.transport.resumeProducing()

    def pauseProducing(self) -> None:  # Twisted's name, as the next two.
        """The buffer of writes is full: the client does not read."""
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_future()

    def resumeProducing(self) -> None:
        """The buffer of writes is empty."""
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def stopProducing(self) -> None:
        """Nothing can be written any more."""
        self.resumeProducing()

    async def drained(self) -> None:
        """Return when there is room to write; disconnect a client that reads nothing in time."""
        if self._drained is None:
            return
        done, _ = await asyncio.wait({self._drained}, timeout=settings.READER_TIMEOUT_S)
        if not done:
            logger.info("a client that reads nothing is dropped")
            self.transport.abortConnection()


class BoundedChannel(HTTPChannel):
    """A connection, whose request heads may have ``totalHeadersSize`` bytes.

    ``HEAD_TIMEOUT_S`` counts from the connection to the end of its first head, then from the first
    byte of each further request to the end of its head. Between requests Twisted's own timeout of a
    minute holds.
    """

    transport: Any
    callLater: Any
    _path: Any  # Twisted's: the target of the request whose head comes.
    has_room = True
    """False if there are too many connections: this one only gets a refusal."""
    _head_bytes = 0
    _is_refused = False
    _head_timer: Any = None
    _has_request = False

    @property
    def _clients(self) -> ClientConnections:
        clients: ClientConnections = self.factory.server.clients
        return clients

    def connectionMade(self) -> None:  # Twisted's name, as those below.
        """Count the connection; start the timeout of its head, or refuse it."""
        super().connectionMade()  # type: ignore[no-untyped-call]  # Twisted's.
        self._clients.add(self.transport, is_refused=not self.has_room)
        if self.has_room:
            self._start_head_timer()
        else:
            self._refuse(UnavailableError("The server has too many open connections."), b"")

    def dataReceived(self, data: bytes) -> None:
        """Pass data on, unless it belongs to a refused request."""
        if self._is_refused:
            return
        if not self._has_request and self._head_timer is None:
            self._start_head_timer()
        super().dataReceived(data)  # type: ignore[no-untyped-call]  # Twisted's.

    def lineReceived(self, line: bytes) -> None:
        """Pass on a line of a head; refuse a head that is too long."""
        if self._is_refused:
            return
        is_first = not self._head_bytes
        self._head_bytes = self._head_bytes + len(line) if line else 0
        if self._head_bytes > self.totalHeadersSize:
            self._refuse(UriTooLongError() if is_first else HeadersTooLargeError(), line)
        else:
            super().lineReceived(line)  # type: ignore[no-untyped-call]  # Twisted's.

    def lineLengthExceeded(self, line: bytes) -> None:
        """Refuse a line that is too long, of which a part has come."""
        if not self._is_refused:
            self._refuse(HeadersTooLargeError() if self._head_bytes else UriTooLongError(), line)

    def head_received(self, request: Any) -> None:
        """The head is complete: a request runs. Its target is the path, the host is a header."""
        if absolute := _ABSOLUTE_FORM.match(self._path):
            self._path = b"/" + self._path[absolute.end() :]
            request.requestHeaders.setRawHeaders(b"host", [absolute["host"]])
        self._stop_head_timer()
        self._has_request = True
        self._clients.note_busy(self.transport)

    def only_lingers(self) -> None:
        """The request is answered; only the rest of its body may still come."""
        self._clients.note_idle(self.transport)

    def checkPersistence(self, request: Any, version: bytes) -> bool:
        """Whether the connection is kept after this request: not while the server drains."""
        if not super().checkPersistence(request, version):  # type: ignore[no-untyped-call]
            return False
        if self.factory.server.is_draining:
            request.close_after_answer()
            return False
        return True

    def requestDone(self, request: Any) -> None:
        """End a request; the connection may wait for the next one."""
        self._has_request = False
        self._clients.note_idle(self.transport)
        super().requestDone(request)  # type: ignore[no-untyped-call]  # Twisted's.

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Forget the connection."""
        self._stop_head_timer()
        self._clients.remove(self.transport)
        super().connectionLost(reason)  # type: ignore[no-untyped-call]  # Twisted's.

    def _start_head_timer(self) -> None:
        def late() -> None:
            self._head_timer = None
            dropped_without_head()
            self.transport.abortConnection()

        self._head_timer = self.callLater(settings.HEAD_TIMEOUT_S, late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: ApiError, line: bytes) -> None:
        """Answer without a request object, and close the connection after a while.

        ``line`` is the first one of the head, as far as it has come, unless that was read before.
        """
        self._is_refused = True
        # Twisted sets the path with the first line, and deletes it after the request.
        target = getattr(self, "_path", None) or b"".join(line[:_MOST_PATH].split(b" ")[1:2])
        body = _error_body(error, target)
        self._stop_head_timer()
        logger.info("a request is refused: %s", error.message)
        status = HTTPStatus(error.status)
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **SAFE_HEADERS,
            **error.headers,
        }
        lines = [f"HTTP/1.1 {status.value} {status.phrase}", *map(": ".join, headers.items())]
        self.transport.write("\r\n".join([*lines, "\r\n"]).encode() + body)
        self.transport.loseWriteConnection()
        self.setTimeout(_REFUSAL_LINGER_S)  # type: ignore[no-untyped-call]  # Twisted's.


def _error_body(error: ApiError, target: bytes) -> bytes:
    """Return the body of an error for a request to this target, of which more may come."""
    path = target[:_MOST_PATH].partition(b"?")[0].decode("latin-1")
    return orjson.dumps(error.shown_at(path))


class _StreamedBody(io.BytesIO):
    """The content of a request whose body is streamed: Daphne reads no closed file."""

    closed = True


class BoundedRequest(FlowControl, WebRequest):  # type: ignore[misc]  # Daphne has no types.
    """A request whose application starts at the end of its head."""

    _is_streamed = _is_answered = _expects_continue = False
    _has_ended = True
    _timer: Any = None

    def __init__(self, channel: Any, queued: bool = False) -> None:
        # Twisted would parse forms on the event loop.
        super().__init__(channel, queued, parsePOSTFormSubmission=False)

    def gotLength(self, length: int | None) -> None:  # Twisted's name: the head is complete.
        """Run the application, unless there is no body: then Daphne does."""
        self.channel.head_received(self)
        super().gotLength(0)
        if length == 0:
            return
        expectation = self.requestHeaders.getRawHeaders("Expect") or [""]
        self._expects_continue = expectation[0].lower() == "100-continue"
        self.requestHeaders.removeHeader("Expect")  # Twisted would ask for the body now.
        self.requestHeaders.removeHeader("Upgrade")  # Daphne would keep the body.
        self.content = _StreamedBody()
        self._is_streamed, self._has_ended = True, False
        channel = self.channel
        super().requestReceived(channel._command, channel._path, channel._version)

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        """The body is complete. Twisted's name."""
        if not self._is_streamed:
            super().requestReceived(command, path, version)
            return
        self._has_ended = True
        if self._is_answered:
            self.finish()
        elif self.application_queue is not None:
            self.application_queue.put_nowait({"type": "http.request", "more_body": False})

    def handleContentChunk(self, data: bytes) -> None:  # Twisted's name.
        """Pass on a part of the body; drop it after the answer."""
        if self.application_queue is not None and not self._is_answered:
            self.application_queue.put_nowait(
                {"type": "http.request", "body": data, "more_body": True}
            )
            self.note_received(len(data))

    async def receive(self, receive: Any) -> Any:
        """Return the next message for the application; ask for the body if the client waits."""
        if self._expects_continue and self.clientproto == b"HTTP/1.1" and self.channel is not None:
            self._expects_continue = False
            self.channel.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        message = await receive()
        self.note_taken(len(message.get("body", b"")))
        return message

    def close_after_answer(self) -> None:
        """Have the connection closed after the answer, whose head says so.

        A client that is not told may send its next request into the end of the connection. So one
        that has read the head of this answer may send another request.
        """
        # A request that is answered has no channel any more.
        channel = getattr(self, "channel", None)
        if channel is not None and not self.startedWriting:
            self.responseHeaders.setRawHeaders("connection", ["close"])
            channel.persistent = False

    def handle_reply(self, message: dict[str, Any]) -> None:
        """Write a part of the answer."""
        if self._is_answered:
            return
        if message["type"] == "http.response.start" and not self._response_started:
            self.requestHeaders = Headers()  # The application has its own; a stream may run long.
            self.registerProducer(self, True)
        if self.method == b"HEAD" and message["type"] == "http.response.body":
            # Twisted drops the first write only, because Daphne does not call what it puts in the
            # place of ``write``. The client would read more as the answer to its next request.
            message = {**message, "body": b""}
        if message["type"] == ABORT:
            self.transport.abortConnection()
        elif message["type"] != EVENTS:
            super().handle_reply(message)
        elif not self.finished and self.channel is not None:
            events: Sequence[bytes] = message["events"]
            if not self.startedWriting:  # The head is written with the first.
                self.write(events[0])
                events = events[1:]
            if self.chunked and not self._disconnected:
                self.sentLength += sum(map(len, events))
                # Each event is a chunk of its own; one call writes all of them.
                chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in events if event]
                self.channel.write(b"".join(chunks))
            else:
                self.write(b"".join(events))

    def finish(self) -> None:
        """End the answer; if the body still comes, read and drop it for a while."""
        if self.producer is not None:
            self.unregisterProducer()
        if self._has_ended:
            self._stop_timer()
            super().finish()
        elif not self._is_answered:
            self._is_answered = True
            self.note_taken(self.untaken)
            self.channel.only_lingers()
            self._timer = _reactor.callLater(_BODY_LINGER_S, self.channel.forceAbortClient)

    def basic_error(self, status: int, status_text: bytes, body: str) -> None:  # Daphne's name.
        """Answer a malformed head, or a failure of Daphne's, in place of an application."""
        error: ApiError = InternalError()
        if status == HTTPStatus.BAD_REQUEST:
            error = InvalidRequestError(f"{body}.")
        encoded_error = _error_body(error, self.uri)
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(encoded_error)),
            **SAFE_HEADERS,
        }
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        start = {"type": "http.response.start", "status": error.status, "headers": encoded}
        self.handle_reply(start)
        self.handle_reply({"type": "http.response.body", "body": encoded_error})

    def connectionLost(self, reason: Any) -> None:  # Twisted's name.
        """End what waits for the client."""
        self._stop_timer()
        self.stopProducing()
        super().connectionLost(reason)

    def _stop_timer(self) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None


class BoundedSocket(FlowControl, WebSocketProtocol):  # type: ignore[misc]  # As above.
    """A WebSocket whose messages take memory that is reserved for them."""

    _is_denied = False
    _status: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.memory = SocketMemory()

    def onConnect(self, request: Any) -> Any:  # Autobahn's name.
        """Begin a handshake; refuse it if the project is known and has too many sockets."""
        try:
            secret = read_secret(*(request.headers.get(name, "") for name in _KEY_HEADERS))
            caller, _ = cached_caller(secret)
            if caller is not None:
                self.memory.count_for(caller.project_id)
        except RateLimitError as exc:
            self._is_denied = True
            raise ConnectionDeny(exc.status, exc.message) from exc  # type: ignore[no-untyped-call]  # Autobahn's.
        except ApiError:
            pass  # The application refuses a request without a valid key.
        return super().onConnect(request).addErrback(self._with_status)

    def handle_reply(self, message: dict[str, Any]) -> None:  # Daphne's name.
        """Send a message of the application; the code of a refused handshake is its status."""
        if message["type"] == "websocket.close":
            self._status = message.get("code")
        super().handle_reply(message)

    def _with_status(self, failure: Any) -> Any:
        """Refuse the handshake with the status that the application has chosen; Daphne's is 403."""
        if self._status == HTTPStatus.UNAUTHORIZED and failure.check(ConnectionDeny):
            raise ConnectionDeny(self._status, HTTPStatus.UNAUTHORIZED.phrase)  # type: ignore[no-untyped-call]  # Autobahn's.
        return failure

    def onMessageFrameBegin(self, length: int) -> None:  # Autobahn's name.
        """Reserve memory for a frame, or close the socket: the client may try again later."""
        super().onMessageFrameBegin(length)
        if not self.failedByMe and not self.memory.try_reserve(length):
            self._fail_connection(_TRY_AGAIN_LATER, "Too many large messages are being received.")

    def onOpen(self) -> None:  # Autobahn's name.
        """Replace the HTTP connection as the producer of the transport."""
        self.transport.unregisterProducer()
        self.transport.registerProducer(self, True)
        super().onOpen()

    def onMessage(self, payload: bytes, isBinary: bool) -> None:  # Autobahn's name.
        """Pass a message on."""
        super().onMessage(payload, isBinary)
        self.note_received(len(payload))

    async def receive(self, receive: Any) -> Any:
        """Return the next message for the application."""
        message = await receive()
        self.note_taken(len(message.get("bytes") or (message.get("text") or "").encode()))
        return message

    def connectionLost(self, reason: Any) -> None:  # Twisted's name.
        """Forget the connection, which the HTTP channel had counted."""
        self.factory.server_class.clients.remove(self.transport)
        self.memory.end()
        super().connectionLost(reason)

    def onClose(self, wasClean: bool, code: int, reason: str) -> None:  # Autobahn's name.
        """End what waits for the client."""
        self.stopProducing()
        if not self._is_denied:  # Else Daphne does not know it.
            super().onClose(wasClean, code, reason)


class BoundedFactory(HTTPFactory):  # type: ignore[misc]  # As above.
    """Makes bounded connections."""

    protocol = BoundedChannel

    def buildProtocol(self, addr: Any) -> Any:  # Twisted's name.
        """Return a new connection; None to have it closed at once."""
        clients = self.server.clients
        has_room = clients.make_room(addr)
        if not has_room and not clients.may_answer_refused():
            return None
        protocol = super().buildProtocol(addr)
        protocol.requestFactory = BoundedRequest
        protocol.has_room = has_room
        return protocol

    def log(self, request: Any) -> None:  # Twisted's name.
        """Do nothing: ``gateway.access`` has the access log."""


def bounded_sockets(factory: WebSocketFactory) -> WebSocketFactory:
    """Have a factory make bounded sockets, which close with a code, such as 1009 (too big)."""
    factory.protocol = BoundedSocket
    factory.setProtocolOptions(failByDrop=False, closeHandshakeTimeout=30)
    return factory
