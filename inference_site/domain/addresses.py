"""Which addresses are public: what strangers name is connected to at these only."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_GLOBAL_UNICAST = IPv6Network("2000::/3")  # All that IANA has given out so far.
_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address.
_SPECIAL = (
    IPv4Network("192.0.0.0/24"),  # Protocol assignments; some Pythons know only a part of it.
    IPv4Network("192.88.99.0/24"),  # Relays of 6to4, which are no more.
    IPv4Network("168.63.129.16/32"),  # Where Azure's machines reach the host they run on.
    IPv6Network("3fff::/20"),  # Documentation, since 2024.
)
"""Addresses that Python's tables, by their age, may count as global."""


def is_public(address: str) -> bool:
    """Return whether this IP address is anybody's on the internet, also one inside another."""
    ip = ip_address(address)
    if isinstance(ip, IPv4Address):
        return _is_public_v4(ip)
    embedded = _embedded(ip)
    if embedded is not None:
        return _is_public_v4(embedded)
    return ip in _GLOBAL_UNICAST and ip.is_global and not _is_special(ip)


def _is_public_v4(ip: IPv4Address) -> bool:
    special = ip.is_multicast or ip.is_reserved or _is_special(ip)
    return ip.is_global and not special


def _is_special(ip: IPv4Address | IPv6Address) -> bool:
    return any(ip in network for network in _SPECIAL)


def _embedded(ip: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address that packets to this one end at.

    Teredo is missing: none of its addresses count as global.
    """
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour
