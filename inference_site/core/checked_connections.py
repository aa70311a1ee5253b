"""HTTP connections to hosts that clients or users choose, to public addresses only.

The check is made where the connection is made: the name is resolved once, every address is checked,
and the connection goes to one of the checked addresses. A name that resolves differently a moment
later gains nothing.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import httpcore
import httpx

from inference_site.core.domain.addresses import is_public
from inference_site.core.host import resolve_within

_READ_STEP_S = 1.0

SecondsLeft = Callable[[], float]
"""Returns the seconds until a deadline; raises an exception of the caller once it has passed."""


class NoPublicAddress(Exception):
    """The host has an address that is not public, or is unknown.

    One error for both cases: clients must not learn which internal names exist.
    """


class NoAnswer(Exception):
    """No address of the host accepts the connection."""


def checked_pool(seconds_left: SecondsLeft, *, allow_private: bool) -> httpcore.ConnectionPool:
    """Return a connection pool that uses ``CheckedBackend``.

    It takes neither proxies nor passwords from the environment, and follows no redirect.
    """
    backend = CheckedBackend(seconds_left, allow_private=allow_private)
    return httpcore.ConnectionPool(ssl_context(), network_backend=backend)


@cache
def ssl_context() -> ssl.SSLContext:
    """Return the context of all pools; reading the certificates takes 20 ms."""
    return httpcore.default_ssl_context()


def target_of(url: httpx.URL) -> httpcore.URL:
    """Return the URL by its parts: httpcore would parse a text differently from httpx."""
    return httpcore.URL(
        scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
    )


class CheckedBackend(httpcore.NetworkBackend):
    """Connects to public addresses only, within the time that is left."""

    def __init__(
        self,
        seconds_left: SecondsLeft,
        *,
        allow_private: bool,
        inner: httpcore.NetworkBackend | None = None,
    ) -> None:
        self._seconds_left, self._allow_private = seconds_left, allow_private
        self._inner = inner or httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first address that answers. Raise NoPublicAddress, or NoAnswer."""
        try:
            addresses = resolve_within(host, self._seconds_left())
        except TimeoutError as exc:
            raise httpcore.ConnectTimeout from exc
        if not addresses or not (self._allow_private or all(map(is_public, addresses))):
            raise NoPublicAddress
        failure: Exception | None = None
        for untried, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            share_s = self._seconds_left() / untried
            try:
                stream = self._inner.connect_tcp(
                    address, port, share_s, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as exc:
                failure = exc
            else:
                return _TimedStream(stream, self._seconds_left)
        raise NoAnswer(str(failure)) from failure


class _TimedStream(httpcore.NetworkStream):
    """A stream whose reads and writes together take no longer than the time that is left.

    A host that sends one byte at a time cannot exceed it. Reads ask for the time left once a
    second, so its function may also end them by an exception.
    """

    def __init__(self, inner: httpcore.NetworkStream, seconds_left: SecondsLeft) -> None:
        self._inner, self._seconds_left = inner, seconds_left

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        while True:
            seconds = self._seconds_left()
            try:
                return self._inner.read(max_bytes, min(seconds, _READ_STEP_S))
            except httpcore.ReadTimeout:
                if seconds <= _READ_STEP_S:
                    raise

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, self._seconds_left())

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        """Encrypt the stream; the certificate is checked for the name, not for the address."""
        encrypted = self._inner.start_tls(ssl_context, server_hostname, self._seconds_left())
        return _TimedStream(encrypted, self._seconds_left)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
