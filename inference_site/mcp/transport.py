"""The HTTP transport of MCP's clients: bounded in bytes, connected to checked addresses only.

All bytes that an operation receives are counted before anything decodes them. The name of each
request is resolved once, and its connection goes to an address that is allowed, also after a
redirect. This module imports the HTTP library of the SDK, so other modules import it inside
functions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import anyio
import anyio.to_thread
import httpx2

from inference_site.core.checked_connections import ssl_context
from inference_site.core.domain.addresses import AllowedAddresses
from inference_site.core.host import resolve_within


@dataclass(slots=True)
class Traffic:
    """What one operation has received. ``is_sent``: the call may have reached the server.

    ``version`` is that of the protocol, once the session is open.
    """

    limit: int
    scope: anyio.CancelScope
    version: str = ""
    bytes: int = 0
    status: int = 0
    is_sent: bool = False
    is_exceeded: bool = False
    is_refused: bool = False

    def take(self, size: int) -> None:
        """Count received bytes. End the operation if there are too many; raise ReadError."""
        self.bytes += size
        if self.bytes > self.limit:
            self.is_exceeded = True
            self.scope.cancel()
            raise httpx2.ReadError("The server sends too much.")


class CheckedTransport(httpx2.AsyncBaseTransport):
    """Connects to allowed addresses only, and counts what it receives."""

    def __init__(self, allowed: AllowedAddresses, traffic: Traffic) -> None:
        self._allowed, self._traffic = allowed, traffic
        self._inner = httpx2.AsyncHTTPTransport(verify=ssl_context())

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request to an address of its host that is allowed. Raise ConnectError."""
        response = await self._connect(request)
        if request.method == "POST":  # A server may refuse the GET for messages of its own.
            self._traffic.status = response.status_code
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise httpx2.DecodingError("The server compresses what should not be compressed.")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _CountedStream(response.stream, self._traffic)
        return response

    async def _connect(self, request: httpx2.Request) -> httpx2.Response:
        host = request.url.host
        addresses = await anyio.to_thread.run_sync(resolve_within, host, self._seconds_left())
        if not addresses or not all(self._allowed.has(host, one) for one in addresses):
            self._traffic.is_refused = True
            raise httpx2.ConnectError("The host has no address that may be connected to.")
        failure: Exception | None = None
        for untried, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            timeout = {"connect": self._seconds_left() / untried, "pool": None}
            names = {} if host == address else {"sni_hostname": host}
            checked = httpx2.Request(
                request.method,
                request.url.copy_with(host=address),
                headers=request.headers,  # With the name, in ``Host``.
                stream=request.stream,
                extensions={**request.extensions, **names, "timeout": timeout},
            )
            try:
                return await self._inner.handle_async_request(checked)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as exc:
                failure = exc
        raise httpx2.ConnectError("No address of the host accepts the connection.") from failure

    def _seconds_left(self) -> float:
        return max(0.01, self._traffic.scope.deadline - anyio.current_time())

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


class _CountedStream(httpx2.AsyncByteStream):
    """The body of a response, whose bytes count."""

    def __init__(self, inner: httpx2.AsyncByteStream, traffic: Traffic) -> None:
        self._inner, self._traffic = inner, traffic

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._inner:
            self._traffic.take(len(chunk))
            yield chunk

    async def aclose(self) -> None:
        """Close the response."""
        await self._inner.aclose()
