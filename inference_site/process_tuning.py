"""The memory of a process that serves: what its start makes stays, large blocks go back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from functools import cache
from typing import Any

_USUAL = gc.get_threshold()
_RARE, _SERVING = 500_000, 10_000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGE_BYTES = 1024 * 1024, 128 * 1024


def give_large_blocks_back() -> None:
    """Have the C library return a large block to the system as soon as it is freed.

    glibc maps a block of 128 KiB by itself, and returns it at once. But each larger one that is
    freed raises this threshold, to 32 MiB at most. From then on the bodies and answers of some
    megabytes lie between small objects, in one arena for each of several threads. What they leave
    is not returned and often not used again: a worker with 42 MiB in use kept 670 MiB more. A
    threshold that is set stays. To be called before there are threads. Does nothing with another C
    library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def collect_rarely() -> None:
    """Look for garbage after 500,000 new objects; to be called before anything is imported.

    Imports make objects that stay. With Python's usual thresholds their collections are a sixth of
    the start of a process, and find a few hundred objects.
    """
    gc.set_threshold(_RARE, *_USUAL[1:])


def freeze_imported_objects(**_: Any) -> None:
    """Exempt all that there is now from garbage collection; to be called once all is imported.

    Libraries are some 160,000 objects. A full collection looks at each of them, and while it does,
    for a tenth of a second, no thread of the process runs: each stream stands still. From then on
    there is a look at the latest after 10,000 new objects, where Python's usual is 700: requests
    leave next to no garbage, and a large body is 60,000 objects, which the looks would find alive.
    Takes the arguments of a Celery signal.
    """
    gc.freeze()
    gc.set_threshold(_SERVING, *_USUAL[1:])


# The module's text:
# """How many files and sockets a process that serves may have open."""


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


# The module's text:
# """How often the threads of a process that serves take turns."""


_INTERVAL_S = 0.0005


def switch_threads_often() -> None:
    """Let a thread wait half a millisecond for Python's lock, where five are usual.

    The threads that move streams give the lock away with each read and write of a socket. One that
    computes, such as a view, then kept it for five milliseconds: with many streams and new requests
    at the same moment, a good part of the time to a first token was that wait.
    """
    sys.setswitchinterval(_INTERVAL_S)
