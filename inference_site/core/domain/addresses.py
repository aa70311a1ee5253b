"""Which addresses the site may connect to when clients or users choose the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit, urlunsplit

_GLOBAL_UNICAST = IPv6Network("2000::/3")  # All that IANA has allocated so far.
_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address.
_SPECIAL = (
    IPv4Network("192.0.0.0/24"),  # Protocol assignments; some Pythons know only a part of it.
    IPv4Network("192.88.99.0/24"),  # Relays of 6to4, which is deprecated.
    IPv4Network("168.63.129.16/32"),  # The host of a virtual machine, in Azure.
    IPv6Network("3fff::/20"),  # Documentation, since 2024.
)
"""Addresses that older versions of Python count as global."""


def is_public(address: str) -> bool:
    """Return whether this IP address is public, or embeds a public IPv4 address."""
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
    """Return the IPv4 address to which packets for this address are sent, if there is one.

    Teredo is not decoded, because none of its addresses count as global.
    """
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour


def is_listed(host: str, allowed: Sequence[str]) -> bool:
    """Return whether the host is in the list; ``.example.org`` includes all names below it."""
    name = host.lower().rstrip(".")
    patterns = [pattern.lower().rstrip(".") for pattern in allowed]
    return any(
        name == pattern.removeprefix(".") or (pattern.startswith(".") and name.endswith(pattern))
        for pattern in patterns
    )


def page_key(url: str) -> str:
    """Return a text that is equal for two spellings of the URL of one page.

    The fragment does not count, nor the case of scheme and host, nor the ``/`` of an empty path.
    """
    try:
        scheme, host, path, query, _ = urlsplit(url)
    except ValueError:  # No valid URL.
        return url
    return urlunsplit((scheme.lower(), host.lower(), path or "/", query, ""))


@dataclass(frozen=True, slots=True)
class AllowedAddresses:
    """Public addresses, these networks, and every address of these hosts (see ``is_listed``)."""

    hosts: tuple[str, ...] = ()
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    def has(self, host: str, address: str) -> bool:
        """Return whether the host may be connected to at this address."""
        if is_listed(host, self.hosts) or is_public(address):
            return True
        ip = ip_address(address)
        target = (_embedded(ip) or ip) if isinstance(ip, IPv6Address) else ip
        return any(target in network for network in self.networks)

    def may_name(self, host: str) -> bool:
        """Return whether an entry may contain this host: an IP address must be allowed.

        Names are resolved and checked when the site connects, except those of this machine.
        """
        host = host.strip("[]")
        try:
            return self.has(host, host)
        except ValueError:  # It is a name.
            is_local = is_listed(host, ("localhost", ".localhost"))
            return not is_local or self.has(host, "127.0.0.1")
