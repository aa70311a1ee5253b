"""A connection that is closed when no request comes, and says so when a head is too long.

Twisted closes a connection whose head is too long without a word, so that a proxy or a client
reports a failure of the server. And it takes a head for as long as a byte of it comes each minute.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from django.conf import settings
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel

from inference_site.errors.api_errors import (
    ApiError,
    HeadersTooLargeError,
    UnavailableError,
    UriTooLongError,
)
from inference_site.gateway.http_answers import SAFE_HEADERS
from inference_site.gateway.server.client_connections import (
    ClientConnections,
    dropped_without_head,
)

logger = logging.getLogger(__name__)

_LINGER_S = 5
"""For how long what the client still sends is dropped: if the connection were closed before, the
client would lose the answer."""


class BoundedChannel(HTTPChannel):
    """Twisted's connection, whose heads may have ``totalHeadersSize`` bytes.

    ``HEAD_TIMEOUT_S`` runs from the connection to the end of its first head, then from the first
    byte of each further request to the end of its head. Between requests Twisted's own time-out,
    a minute, holds.
    """

    transport: Any
    callLater: Any
    has_room = True
    """False: there are too many connections, and this one is only told so."""
    _head_bytes = 0
    _is_refused = False
    _head_timer: Any = None
    _runs = False

    @property
    def _clients(self) -> ClientConnections:
        clients: ClientConnections = self.factory.server.clients
        return clients

    def connectionMade(self) -> None:  # Twisted's name, as those below.
        """Count the connection, and have it send a head in time, or refuse it."""
        super().connectionMade()  # type: ignore[no-untyped-call]  # Twisted's.
        self._clients.add(self.transport, is_refused=not self.has_room)
        if self.has_room:
            self._expect_head()
        else:
            self._refuse(UnavailableError("The server has too many open connections."))

    def dataReceived(self, data: bytes) -> None:
        """Take what comes, unless it is what is left of a request that was refused."""
        if self._is_refused:
            return
        if not self._runs and self._head_timer is None:
            self._expect_head()
        super().dataReceived(data)  # type: ignore[no-untyped-call]  # Twisted's.

    def lineReceived(self, line: bytes) -> None:
        """Take a line of a head."""
        if self._is_refused:
            return
        is_first = not self._head_bytes
        self._head_bytes = self._head_bytes + len(line) if line else 0
        if self._head_bytes > self.totalHeadersSize:
            self._refuse(UriTooLongError() if is_first else HeadersTooLargeError())
        else:
            super().lineReceived(line)  # type: ignore[no-untyped-call]  # Twisted's.

    def lineLengthExceeded(self, line: bytes) -> None:
        """Refuse a line that is too long, of which only a part has come."""
        if not self._is_refused:
            self._refuse(HeadersTooLargeError() if self._head_bytes else UriTooLongError())

    def head_has_come(self) -> None:
        """Note that a request runs from now on."""
        self._stop_head_timer()
        self._runs = True
        self._clients.is_busy(self.transport)

    def only_lingers(self) -> None:
        """Note that the request is answered, and only the rest of its body may still come."""
        self._clients.is_idle(self.transport)

    def requestDone(self, request: Any) -> None:
        """End a request; the connection may wait for the next one."""
        self._runs = False
        self._clients.is_idle(self.transport)
        super().requestDone(request)  # type: ignore[no-untyped-call]  # Twisted's.

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Forget the connection."""
        self._stop_head_timer()
        self._clients.remove(self.transport)
        super().connectionLost(reason)  # type: ignore[no-untyped-call]  # Twisted's.

    def _expect_head(self) -> None:
        self._head_timer = self.callLater(settings.HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        dropped_without_head()
        self.transport.abortConnection()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: ApiError) -> None:
        self._is_refused = True
        self._stop_head_timer()
        logger.info("a request is refused: %s", error.message)
        status = HTTPStatus(error.status)
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(error.body)),
            "Connection": "close",
            **SAFE_HEADERS,
            **error.headers,
        }
        lines = [f"HTTP/1.1 {status.value} {status.phrase}", *map(": ".join, headers.items())]
        self.transport.write("\r\n".join([*lines, "\r\n"]).encode() + error.body)
        self.transport.loseWriteConnection()
        self.setTimeout(_LINGER_S)  # type: ignore[no-untyped-call]  # Twisted's.
