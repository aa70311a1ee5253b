"""HTTP/1.1 connections whose waiting ends as soon as the run that waits is cancelled.

A blocking read cannot be interrupted from another thread, so a read waits in slices of ``POLL_S``
and looks between two of them whether its run still wants the answer. A read that finds something
costs nothing more than a plain one. The run is the one of the calling thread (``watching``).
"""

from __future__ import annotations

import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import httpcore
import httpx

POLL_S = 0.1
"""Between two looks at cancellation while nothing comes."""


class Watched(Protocol):
    """Who waits: a sink, or what stands for one."""

    @property
    def cancelled(self) -> bool:
        """Whether the waiting is in vain."""


_watched: ContextVar[Watched | None] = ContextVar("watched", default=None)

_ERRORS: tuple[tuple[type[Exception], type[httpx.TransportError]], ...] = (
    (httpcore.ConnectTimeout, httpx.ConnectTimeout),
    (httpcore.ReadTimeout, httpx.ReadTimeout),
    (httpcore.WriteTimeout, httpx.WriteTimeout),
    (httpcore.PoolTimeout, httpx.PoolTimeout),
    (httpcore.ConnectError, httpx.ConnectError),
    (httpcore.NetworkError, httpx.ReadError),
    (httpcore.ProtocolError, httpx.RemoteProtocolError),
    (httpcore.UnsupportedProtocol, httpx.UnsupportedProtocol),
)
"""httpcore's exceptions as httpx's; the first row that fits counts."""


class Cancelled(Exception):
    """The run that waited was cancelled; its connection is closed."""


@contextmanager
def watching(watched: Watched) -> Iterator[None]:
    """Have this thread's reads and connects raise Cancelled once their run is cancelled."""
    token = _watched.set(watched)
    try:
        yield
    finally:
        _watched.reset(token)


def raise_if_cancelled() -> None:
    """Raise Cancelled if this thread's run is."""
    watched = _watched.get()
    if watched is not None and watched.cancelled:
        raise Cancelled


def pause(seconds: float) -> None:
    """Sleep. Raise Cancelled as soon as the run is."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        raise_if_cancelled()
        time.sleep(min(left, POLL_S))
    raise_if_cancelled()


class PolledTransport(httpx.BaseTransport):
    """A pool of such connections (see ``httpx.BaseTransport``)."""

    def __init__(self, idle_connections: int, keep_alive_s: float) -> None:
        self._pool = httpcore.ConnectionPool(
            ssl_context=httpx.create_ssl_context(),
            max_connections=None,  # As many as there are runs: the slots bound them.
            max_keepalive_connections=idle_connections,
            keepalive_expiry=keep_alive_s,
            network_backend=_Network(),
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; return once the head of the answer is there."""
        assert isinstance(request.stream, httpx.SyncByteStream)
        url = request.url
        asked = httpcore.Request(
            method=request.method,
            url=httpcore.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
            ),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        with _told_by_httpx():
            answer = self._pool.handle_request(asked)
        return httpx.Response(answer.status, headers=answer.headers, stream=_Body(answer))

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()


class _Body(httpx.SyncByteStream):
    def __init__(self, answer: httpcore.Response) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        with _told_by_httpx():
            yield from self._answer.iter_stream()

    def close(self) -> None:
        self._answer.close()


@contextmanager
def _told_by_httpx() -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        for theirs, ours in _ERRORS:
            if isinstance(exc, theirs):
                raise ours(str(exc) or type(exc).__name__) from exc
        raise


class _Network(httpcore.NetworkBackend):
    """Opens sockets."""

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first of the host's addresses that answers."""
        deadline = time.monotonic() + (timeout or 0.0)
        error: OSError | None = None
        for family, kind, protocol, _, address in _addresses(host, port, deadline):
            sock = socket.socket(family, kind, protocol)
            try:
                _connect(sock, address, deadline)
            except OSError as exc:
                sock.close()
                error = exc
            except BaseException:
                sock.close()
                raise
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return _Stream(sock)
        raise httpcore.ConnectError(error)


def _addresses(host: str, port: int, deadline: float) -> list[Any]:
    """Return what the system's resolver says, which takes its time and cannot be interrupted."""
    found: queue.SimpleQueue[list[Any] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as exc:
            found.put(exc)

    threading.Thread(target=ask, name="resolver", daemon=True).start()
    while True:
        try:
            answer = found.get(timeout=POLL_S)
        except queue.Empty:
            raise_if_cancelled()
            if time.monotonic() > deadline:
                raise httpcore.ConnectTimeout(f"{host} is not resolved") from None
        else:
            break
    if isinstance(answer, Exception):
        raise httpcore.ConnectError(answer) from answer
    return answer


def _connect(sock: socket.socket, address: Any, deadline: float) -> None:
    sock.setblocking(False)
    sock.connect_ex(address)
    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    while not poller.poll(POLL_S * 1000):
        raise_if_cancelled()
        if time.monotonic() > deadline:
            raise httpcore.ConnectTimeout
    if problem := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(problem, f"{address[0]}:{address[1]}")


class _Stream(httpcore.NetworkStream):
    """One connection, plain or TLS."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(POLL_S)
        self._sock = sock

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return what has come. Raise ReadTimeout when nothing does for so long."""
        waited = 0.0
        while True:
            try:
                return self._sock.recv(max_bytes)
            except TimeoutError:
                raise_if_cancelled()
                waited += POLL_S
                if timeout is not None and waited >= timeout:
                    raise httpcore.ReadTimeout(f"nothing came for {timeout:g} s") from None
            except OSError as exc:
                raise httpcore.ReadError(exc) from exc

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send it all. Raise WriteTimeout when nothing is taken for so long."""
        left, waited = memoryview(buffer), 0.0
        while left:
            try:
                left, waited = left[self._sock.send(left) :], 0.0
            except TimeoutError:
                raise_if_cancelled()
                waited += POLL_S
                if timeout is not None and waited >= timeout:
                    raise httpcore.WriteTimeout(f"nothing was taken for {timeout:g} s") from None
            except OSError as exc:
                raise httpcore.WriteError(exc) from exc

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        """Return the connection with TLS on it."""
        self._sock.settimeout(timeout)
        try:
            return _Stream(ssl_context.wrap_socket(self._sock, server_hostname=server_hostname))
        except TimeoutError as exc:
            self.close()
            raise httpcore.ConnectTimeout(exc) from exc
        except OSError as exc:
            self.close()
            raise httpcore.ConnectError(exc) from exc

    def get_extra_info(self, info: str) -> Any:
        """Return what httpcore asks for: whether an idle connection has been closed meanwhile."""
        match info:
            case "is_readable":
                poller = select.poll()
                poller.register(self._sock, select.POLLIN)
                return self._sock.fileno() < 0 or bool(poller.poll(0))
            case "ssl_object":
                return self._sock if isinstance(self._sock, ssl.SSLSocket) else None
            case _:
                return None

    def close(self) -> None:
        """Close it."""
        self._sock.close()
