"""How many files and sockets a process that serves may have open."""

from __future__ import annotations

import contextlib
import resource
from functools import cache

_WITHOUT_LIMIT = 65_536
"""What is asked for where the hard limit is infinite: macOS refuses an infinite soft one."""
_MOST_RESERVED = 256
"""Descriptors that are not for connections of clients; a quarter of all where there are few."""


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files to the hard one; return the soft limit.

    Many systems start processes with a soft limit of 1,024, which is for programs that use
    ``select``. No part of this site does: each connection of a client takes a descriptor.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WITHOUT_LIMIT if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _WITHOUT_LIMIT if soft == resource.RLIM_INFINITY else soft


@cache
def connection_room() -> int:
    """Return how many connections of clients a web process may have open.

    The rest of its descriptors is for PostgreSQL, Redis and files, and for connections that are
    refused: it must always be able to accept one.
    """
    limit = raise_open_file_limit()
    return limit - min(_MOST_RESERVED, limit // 4)
