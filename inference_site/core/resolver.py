"""The addresses of a host, from the system's resolver, within a time limit."""

from __future__ import annotations

import queue
import socket
import threading


def resolve_within(host: str, seconds: float) -> list[str]:
    """Return the addresses of a host; none for an unknown host. Raise TimeoutError.

    The system's resolver has no time limit, so it runs on a thread that is abandoned if it is slow.
    """
    found: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    threading.Thread(target=lambda: found.put(resolve_host(host)), daemon=True).start()
    try:
        return found.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None


def resolve_host(host: str) -> list[str]:
    """Return the addresses that the system knows of a host, in the order to try them."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
