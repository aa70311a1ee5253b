"""The open connections of clients: how many there may be, and which are closed for new ones.

A connection takes a file descriptor, and a process that has none left can accept nobody, read no
file and reach no database. So some descriptors stay free, and a client that opens connections
without sending requests takes no room from others: the oldest connection on which no request runs
is closed when a new one needs its place, first one of the address that has most of them.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from typing import Any

from django.conf import settings
from prometheus_client import Counter, Gauge
from twisted.internet.error import ConnectionAborted
from twisted.python.failure import Failure

from inference_site.process_tuning import max_client_connections

logger = logging.getLogger(__name__)

_MOST_REFUSED = 16
"""Refused connections that may be open until their clients have read why; more are just closed."""
_IPV6_SITE = 64
"""A subscriber has a network of this many bits, and all addresses in it."""
_LOG_EVERY_S = 10.0

_OPEN = Gauge("inference_http_connections", "Connections of clients that are open.")
_DROPPED = Counter(
    "inference_http_connections_dropped",
    "Connections that were closed or refused: no request head in time, or no room for more.",
    ["reason"],
)


class ClientConnections:
    """Counts connections by address, and chooses those that are closed. Only for the event loop.

    A connection is known by its transport. ``most`` is for all together, ``most_of_one`` for each
    address that is not one of ``TRUSTED_PROXIES``: all clients of a proxy have its address.
    """

    def __init__(self, most: int | None = None, most_of_one: int | None = None) -> None:
        self.most = max_client_connections() if most is None else most
        self.most_of_one = most_of_one or settings.CONNECTIONS_PER_ADDRESS or self.most // 2
        self._addresses: dict[Any, str] = {}
        self._open: dict[str, int] = {}
        self._idle: dict[str, dict[Any, None]] = {}  # By address, the oldest first.
        self._refused: set[Any] = set()
        self._logged_at = 0.0

    def __len__(self) -> int:
        return len(self._addresses)

    def make_room(self, peer: Any) -> bool:
        """Return whether a new connection of this peer has room; close an idle one if need be."""
        address = _address_of(peer)
        if self._of(address) >= self.most_of_one and not _is_trusted(address):
            has_room = self._close_oldest(address, "address")
        else:
            has_room = len(self) < self.most or self._close_oldest(self._most_idle(), "full")
        if not has_room:
            _DROPPED.labels("refused").inc()
            self._log()
        return has_room

    def may_tell_refused(self) -> bool:
        """Return whether one more connection may stay open until its client has read a refusal."""
        return len(self._refused) < _MOST_REFUSED

    def add(self, transport: Any, *, is_refused: bool = False) -> None:
        """Count a new connection, on which no request runs yet, or which is only told so."""
        address = _address_of(transport.getPeer())
        self._addresses[transport] = address
        self._open[address] = self._of(address) + 1
        _OPEN.set(len(self))
        if is_refused:
            self._refused.add(transport)
        else:
            self.is_idle(transport)

    def is_idle(self, transport: Any) -> None:
        """Note that no request runs on a connection: it may be closed for another one."""
        address = self._addresses.get(transport)
        if address is not None:
            self._idle.setdefault(address, {})[transport] = None

    def is_busy(self, transport: Any) -> None:
        """Note that a request, or a WebSocket, runs on a connection."""
        address = self._addresses.get(transport, "")
        idle = self._idle.get(address)
        if idle is not None:
            idle.pop(transport, None)
            if not idle:
                del self._idle[address]

    def remove(self, transport: Any) -> None:
        """Forget a connection that is closed."""
        self.is_busy(transport)
        self._refused.discard(transport)
        address = self._addresses.pop(transport, None)
        if address is not None:
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]
        _OPEN.set(len(self))

    def _of(self, address: str) -> int:
        return self._open.get(address, 0)

    def _most_idle(self) -> str:
        """Return the address that has most idle connections; an empty text if none has any."""
        return max(self._idle, key=lambda address: len(self._idle[address]), default="")

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
        """Say that there are too many connections, but not for each of them."""
        now = time.monotonic()
        if now - self._logged_at > _LOG_EVERY_S:
            self._logged_at = now
            logger.warning(
                "too many connections of clients (%d of %d, at most %d of an address): idle ones "
                "are closed, then new ones are refused",
                len(self),
                self.most,
                self.most_of_one,
            )


def dropped_without_head() -> None:
    """Count a connection that is closed because it has sent no complete head in time."""
    _DROPPED.labels("no_head").inc()


def _address_of(peer: Any) -> str:
    """Return the address of a peer; of IPv6 its network; an empty text for a Unix socket."""
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
