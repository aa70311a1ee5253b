"""How many connections clients may have open: in all, from one address, and for one project.

A connection takes a file descriptor. A process without free descriptors can accept no connection,
read no file and reach no database, so some stay free. When a new connection needs room, the oldest
one without a running request is closed, first one of the address that has most of them. So a client
that opens connections without sending requests takes no room from others.

Requests and WebSockets are counted for their projects as well: each takes memory for as long as it
is open, which may be an hour.
"""

from __future__ import annotations

import collections
import ipaddress
import logging
import time
from types import TracebackType
from typing import Any, Self

from django.conf import settings
from prometheus_client import Counter, Gauge
from twisted.internet.error import ConnectionAborted
from twisted.python.failure import Failure

from inference_site.core.errors.api_errors import RateLimitError
from inference_site.core.process_lifecycle import max_client_connections

logger = logging.getLogger(__name__)

_MOST_REFUSED = 16
"""Refused connections that stay open until their clients have read the error; others are closed."""
_IPV6_SITE = 64
"""Bits of the network that one IPv6 subscriber has; all its addresses count as one."""
_LOG_EVERY_S = 10.0

_OPEN = Gauge("inference_http_connections", "Connections of clients that are open.")
_DROPPED = Counter(
    "inference_http_connections_dropped",
    "Connections that were closed or refused: no request head in time, or no room for more.",
    ["reason"],
)
_requests: collections.Counter[int] = collections.Counter()
_websockets: collections.Counter[int] = collections.Counter()


class ClientConnections:
    """Counts connections by address and closes idle ones. For the event loop's thread only.

    A connection is identified by its transport. ``_most`` bounds all together; ``_most_of_one``
    each address that is not in ``TRUSTED_PROXIES``: all clients of a proxy have its address.
    """

    def __init__(self) -> None:
        self._most = max_client_connections()
        self._most_of_one = settings.CONNECTIONS_PER_ADDRESS or self._most // 2
        self._addresses: dict[Any, str] = {}
        self._open: dict[str, int] = {}
        self._idle: dict[str, dict[Any, None]] = {}  # By address, the oldest first.
        self._refused: set[Any] = set()
        self._logged_at = 0.0

    def __len__(self) -> int:
        return len(self._addresses)

    def make_room(self, peer: Any) -> bool:
        """Return whether a new connection of this peer has room; close an idle one if needed."""
        address = _address_of(peer)
        if self._open.get(address, 0) >= self._most_of_one and not _is_trusted(address):
            has_room = self._close_oldest(address, "address")
        elif len(self) < self._most:
            has_room = True
        else:
            most_idle = max(self._idle, key=lambda address: len(self._idle[address]), default="")
            has_room = self._close_oldest(most_idle, "full")
        if not has_room:
            _DROPPED.labels("refused").inc()
            self._log()
        return has_room

    def may_answer_refused(self) -> bool:
        """Return whether one more refused connection may stay open until it has read its answer."""
        return len(self._refused) < _MOST_REFUSED

    def add(self, transport: Any, *, is_refused: bool = False) -> None:
        """Count a new connection without a request; ``is_refused``: it only gets a refusal."""
        address = _address_of(transport.getPeer())
        self._addresses[transport] = address
        self._open[address] = self._open.get(address, 0) + 1
        _OPEN.set(len(self))
        if is_refused:
            self._refused.add(transport)
        else:
            self.note_idle(transport)

    def note_idle(self, transport: Any) -> None:
        """Note that no request runs on a connection: it may be closed for another one."""
        address = self._addresses.get(transport)
        if address is not None:
            self._idle.setdefault(address, {})[transport] = None

    def note_busy(self, transport: Any) -> None:
        """Note that a request or a WebSocket runs on a connection."""
        address = self._addresses.get(transport, "")
        idle = self._idle.get(address)
        if idle is not None:
            idle.pop(transport, None)
            if not idle:
                del self._idle[address]

    def remove(self, transport: Any) -> None:
        """Forget a connection that is closed."""
        self.note_busy(transport)
        self._refused.discard(transport)
        address = self._addresses.pop(transport, None)
        if address is not None:
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]
        _OPEN.set(len(self))

    def _close_oldest(self, address: str, reason: str) -> bool:
        """Close the connection of an address that is idle for longest; return whether one is."""
        oldest = next(iter(self._idle.get(address, ())), None)
        if oldest is None:
            return False
        _DROPPED.labels(reason).inc()
        self._log()
        # Not ``abortConnection``: it closes the socket later, after a hundred more are accepted.
        oldest.connectionLost(Failure(ConnectionAborted()))  # type: ignore[no-untyped-call]  # Twisted's.
        return True

    def _log(self) -> None:
        """Log that there are too many connections, at most once in ``_LOG_EVERY_S``."""
        now = time.monotonic()
        if now - self._logged_at > _LOG_EVERY_S:
            self._logged_at = now
            logger.warning(
                "too many connections of clients (%d of %d, at most %d of an address): idle ones "
                "are closed, then new ones are refused",
                len(self),
                self._most,
                self._most_of_one,
            )


def dropped_without_head() -> None:
    """Count a connection that is closed because no complete request head came in time."""
    _DROPPED.labels("no_head").inc()


def _address_of(peer: Any) -> str:
    """Return the address of a peer; its network for IPv6; "" for a Unix socket."""
    try:
        address = ipaddress.ip_address(str(peer.host).partition("%")[0])
    except (AttributeError, ValueError):
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        if not address.is_loopback:
            network = ipaddress.ip_network((address, _IPV6_SITE), strict=False)
            return str(network.network_address)
    return str(address)


def _is_trusted(address: str) -> bool:
    if not address:
        return True
    parsed = ipaddress.ip_address(address)
    return any(parsed in network for network in settings.TRUSTED_PROXIES)


class OpenRequest:
    """Counts a request for its project, from the moment the project is known until the end.

    For the event loop's thread only.
    """

    __slots__ = ("_project_id",)

    def __init__(self) -> None:
        self._project_id: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._project_id is not None:
            _decrement(_requests, self._project_id)
            self._project_id = None

    @property
    def is_counted(self) -> bool:
        """Whether the request is counted for a project."""
        return self._project_id is not None

    def count_for(self, project_id: int | None) -> None:
        """Count for this project, once. Raise RateLimitError if it has too many open requests."""
        if project_id is None or self._project_id is not None:
            return
        most = settings.CONNECTIONS_PER_PROJECT or max_client_connections() // 2
        if _requests[project_id] >= most:
            raise RateLimitError(
                f"This project has {most} requests open in this server process, which is the most "
                "that one may have. Please try again when some of them have ended."
            )
        _requests[project_id] += 1
        self._project_id = project_id


def open_websocket(project_id: int) -> None:
    """Count a new WebSocket of this project. Raise RateLimitError if it may have no more."""
    most = settings.WEBSOCKETS_PER_PROJECT
    if _websockets[project_id] >= most:
        raise RateLimitError(
            f"This project has {most} WebSockets open in this server process, which is the most "
            "that one may have."
        )
    _websockets[project_id] += 1


def close_websocket(project_id: int) -> None:
    """Count a closed WebSocket of this project no longer."""
    _decrement(_websockets, project_id)


def _decrement(counter: collections.Counter[int], project_id: int) -> None:
    counter[project_id] -= 1
    if not counter[project_id]:
        del counter[project_id]
