"""Connections that go nowhere but to addresses that were checked.

The check is made where the connection is: the name is resolved once, each of its addresses is
looked at, and one of these very addresses is connected to. A name that resolves to something else a
moment later gains nothing.
"""

from __future__ import annotations

import queue
import socket
import ssl
import threading
from collections.abc import Iterable
from typing import Any

import httpcore
from django.conf import settings

from inference_site.domain.addresses import is_public
from worker.media.allowance import Allowance, MediaError, time_is_up


class CheckedBackend(httpcore.NetworkBackend):
    """Opens the connections of one request's fetches, all within its time."""

    def __init__(self, allowance: Allowance, inner: httpcore.NetworkBackend | None = None) -> None:
        self._allowance = allowance
        self._inner = inner or httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first address that answers. Raise MediaError unless all are public."""
        addresses = resolve(host, self._allowance)
        if not addresses or not (settings.MEDIA_ALLOW_PRIVATE or all(map(is_public, addresses))):
            # One message for both: which internal names exist is nobody's business.
            raise MediaError("The host of the image has no public address.")
        for untried, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            share_s = self._allowance.seconds_left() / untried
            try:
                stream = self._inner.connect_tcp(
                    address, port, share_s, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
            return TimedStream(stream, self._allowance)
        raise MediaError("The image could not be fetched: its host does not answer.")


class TimedStream(httpcore.NetworkStream):
    """A stream whose waits add up to no more than the time left, however little each brings."""

    def __init__(self, inner: httpcore.NetworkStream, allowance: Allowance) -> None:
        self._inner, self._allowance = inner, allowance

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return what has come."""
        return self._inner.read(max_bytes, self._allowance.seconds_left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send all of it."""
        self._inner.write(buffer, self._allowance.seconds_left())

    def close(self) -> None:
        """Hang up."""
        self._inner.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        """Go on encrypted; the certificate is checked for the name, not for the address."""
        seconds = self._allowance.seconds_left()
        encrypted = self._inner.start_tls(ssl_context, server_hostname, seconds)
        return TimedStream(encrypted, self._allowance)

    def get_extra_info(self, info: str) -> Any:
        """Return what httpcore wants to know of the socket."""
        return self._inner.get_extra_info(info)


def resolve(host: str, allowance: Allowance) -> list[str]:
    """Return the addresses of a host name or number; none for one that does not exist.

    The system's resolver knows no time limit, so it runs on a thread that may be left behind.
    """
    found: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    threading.Thread(target=lambda: found.put(look_up(host)), daemon=True).start()
    try:
        return found.get(timeout=allowance.seconds_left())
    except queue.Empty:
        raise time_is_up() from None


def look_up(host: str) -> list[str]:
    """Ask the system for the addresses of a host, in the order in which they are to be tried."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
