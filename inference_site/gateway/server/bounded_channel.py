"""A connection that tells its client when the head of a request is too long.

Twisted closes it without a word, so that a proxy or a client reports a failure of the server.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from twisted.web.http import HTTPChannel

from inference_site.errors.api_errors import ApiError, HeadersTooLargeError, UriTooLongError

logger = logging.getLogger(__name__)

_LINGER_S = 5
"""For how long what the client still sends is dropped: if the connection were closed before, the
client would lose the answer."""


class BoundedChannel(HTTPChannel):
    """Twisted's connection, whose heads may have ``totalHeadersSize`` bytes."""

    transport: Any
    _head_bytes = 0
    _is_refused = False

    def dataReceived(self, data: bytes) -> None:  # Twisted's name, as the next two.
        """Take what comes, unless it is what is left of a request that was refused."""
        if not self._is_refused:
            super().dataReceived(data)  # type: ignore[no-untyped-call]  # Twisted's.

    def lineReceived(self, line: bytes) -> None:
        """Take a line of a head."""
        if self._is_refused:
            return
        is_first = not self._head_bytes
        self._head_bytes = self._head_bytes + len(line) if line else 0
        if self._head_bytes > self.totalHeadersSize:
            self._refuse(is_first=is_first)
        else:
            super().lineReceived(line)  # type: ignore[no-untyped-call]  # Twisted's.

    def lineLengthExceeded(self, line: bytes) -> None:
        """Refuse a line that is too long, of which only a part has come."""
        if not self._is_refused:
            self._refuse(is_first=not self._head_bytes)

    def _refuse(self, *, is_first: bool) -> None:
        self._is_refused = True
        error: ApiError = UriTooLongError() if is_first else HeadersTooLargeError()
        logger.info("a request is refused: %s", error.message)
        status = HTTPStatus(error.status)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(error.body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + error.body)
        self.transport.loseWriteConnection()
        self.setTimeout(_LINGER_S)  # type: ignore[no-untyped-call]  # Twisted's.
