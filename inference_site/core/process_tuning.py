"""Tuning of the Python process: garbage collection, memory, thread switches and open files."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from functools import cache
from typing import Any

_GC_THRESHOLDS = gc.get_threshold()
_GC_DURING_IMPORTS, _GC_WHILE_SERVING = 500_000, 10_000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _LARGE_BLOCK_BYTES = 1024 * 1024, 128 * 1024
_SWITCH_INTERVAL_S = 0.0005
_UNLIMITED_FILES = 65_536
"""The limit to set where the hard limit is infinite: macOS refuses an infinite soft limit."""
_RESERVED_FILES = 256
"""File descriptors that are not for clients; a quarter of them where the limit is low."""


def give_large_blocks_back() -> None:
    """Have the C library return a large block to the system as soon as it is freed.

    glibc maps a block of 128 KiB separately and returns it when it is freed. But each larger block
    that is freed raises this threshold, up to 32 MiB. After that, bodies and answers of some
    megabytes are allocated among small objects, in the arenas of several threads, and their memory
    is neither returned nor often used again: a worker with 42 MiB in use kept 670 MiB more. A
    threshold that is set explicitly stays. Call it before threads start. Does nothing with another
    C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


def collect_rarely() -> None:
    """Collect garbage only after 500,000 new objects; call it before the imports.

    Imports create objects that stay. With Python's default thresholds their collections take a
    sixth of the start of a process, and free a few hundred objects.
    """
    gc.set_threshold(_GC_DURING_IMPORTS, *_GC_THRESHOLDS[1:])


def freeze_imported_objects(**_: Any) -> None:
    """Exempt all existing objects from garbage collection; call it after the imports.

    Libraries create some 160,000 objects. A full collection visits all of them, which stops every
    thread, and so every stream, for a tenth of a second. Collections then start after 10,000 new
    objects, not after Python's 700: requests leave almost no garbage, and a large body has 60,000
    objects that are all in use. Takes the arguments of a Celery signal.
    """
    gc.freeze()
    gc.set_threshold(_GC_WHILE_SERVING, *_GC_THRESHOLDS[1:])


def switch_threads_often() -> None:
    """Have a thread wait 0.5 ms for the global interpreter lock, where Python's default is 5 ms.

    The threads that move streams release the lock with each read and write of a socket. A thread
    that computes, such as a view, then kept it for 5 ms. With many streams and new requests at the
    same moment that was a large part of the time to first token.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit; return the soft limit.

    Many systems start processes with a soft limit of 1,024, for programs that use ``select``. This
    site does not use it, and each connection of a client takes a descriptor.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _UNLIMITED_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED_FILES if soft == resource.RLIM_INFINITY else soft


@cache
def max_client_connections() -> int:
    """Return how many connections of clients a web process may have open.

    Its other descriptors are for PostgreSQL, Redis and files, and for accepting connections that
    are then refused.
    """
    limit = raise_open_file_limit()
    return limit - min(_RESERVED_FILES, limit // 4)
