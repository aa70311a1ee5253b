"""Where a login comes from."""

from __future__ import annotations

import ipaddress
from typing import Any

from django.conf import settings
from django.http import HttpRequest

_IPV6_SITE = 64
"""A subscriber has a network of this many bits, and all addresses in it."""


def client_address(request: HttpRequest) -> str | None:
    """Return the address that a request comes from; of an IPv6 address, its network.

    The header ``X-Forwarded-For`` counts as far as each proxy that added to it is in
    ``TRUSTED_PROXIES``; what comes from further away anybody may have written.
    """
    client = _parsed(request.META.get("REMOTE_ADDR", ""))
    hops = request.headers.get("X-Forwarded-For", "").split(",")
    while hops and client is not None and _is_trusted(client):
        earlier = _parsed(hops.pop())
        if earlier is None:
            break
        client = earlier
    if isinstance(client, ipaddress.IPv6Address):
        client = ipaddress.ip_network((client, _IPV6_SITE), strict=False).network_address
    return None if client is None else str(client)


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text.strip())
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_trusted(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return any(address in network for network in settings.TRUSTED_PROXIES)


def one_line(username: str | None, address: str | None, *_: Any) -> str:
    """Return what the log says of a login: on one line, whatever the name is."""
    return f"user {username!a} from {address}"
