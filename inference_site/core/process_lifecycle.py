"""The life cycle of a process: tuning at the start, stop signals, supervisor, end and restart.

``serve`` gives each process that it starts a pipe, whose descriptor is in ``NOTIFY_FD``. The
process writes one line into it for each of these states:

ready      the process serves; the process that it replaces may stop
failed     the process cannot do all of its work
restart    it was asked to restart; it serves until its supervisor has started another and stops it
stopping   it takes no new work and ends when its work has ended; another process may start

``REPLACES_PID`` is the id of the process that a new one replaces. Both may run for a while.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

logger = logging.getLogger(__name__)

NOTIFY_FD, REPLACES_PID = "NOTIFY_FD", "REPLACES_PID"
State = Literal["ready", "failed", "restart", "stopping"]

_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 30.0
_STABLE_S = 30.0
_pid = os.getpid()
"""A process that is forked from this one has the same environment, but no supervisor."""
_is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
_has_hung_up = False
_GC_THRESHOLDS = gc.get_threshold()
_GC_DURING_IMPORTS, _GC_WHILE_SERVING = 500_000, 10_000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _LARGE_BLOCK_BYTES = 1024 * 1024, 512 * 1024
_SWITCH_INTERVAL_S = 0.0005
_UNLIMITED_FILES = 65_536
"""The limit to set where the hard limit is infinite: macOS refuses an infinite soft limit."""
_RESERVED_FILES = 256
"""File descriptors that are not for clients; a quarter of them where the limit is low."""


def notify(state: State) -> bool:
    """Write the state for the supervisor; return whether a supervisor reads it.

    A supervisor that stops its processes for good closes the pipe first.
    """
    descriptor = os.environ.get(NOTIFY_FD, "")
    if not descriptor.isdecimal() or os.getpid() != _pid:
        return False
    try:
        os.write(int(descriptor), f"{state}\n".encode())
    except OSError:
        return False
    return True


def notify_stopping() -> bool:
    """Write that this process stops; return whether another process will replace it."""
    return notify("stopping") or _has_hung_up


def is_replacement() -> bool:
    """Whether this process was started to replace one that may still run."""
    return bool(os.environ.get(REPLACES_PID)) and os.getpid() == _pid


def predecessor_runs() -> bool:
    """Whether the process that this one replaces still runs."""
    if not is_replacement():
        return False
    try:
        os.kill(int(os.environ[REPLACES_PID]), 0)
    except ProcessLookupError:
        return False
    return True


def default_stop_signals(**_: Any) -> None:
    """Have the kernel end this process at a stop signal: it has no work yet that could be lost.

    Takes the arguments of a Celery signal.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if _ignores_hangup() else signal.SIG_DFL)


def handle_stop_signals(
    drain: Callable[[], None], interrupt: Callable[[], None] = lambda: None
) -> None:
    """Call ``drain`` at the first SIGTERM, SIGINT or SIGHUP, and ``interrupt`` at a later SIGINT.

    SIGHUP asks for a restart. Under ``serve`` the process serves until another is ready, and then
    gets SIGTERM. Elsewhere it ends as with SIGTERM, and its supervisor (Compose, systemd) starts
    another. The signal handler calls both functions, between any two steps of the main thread: they
    must not wait for a lock that the main thread may hold, such as that of an Event it waits for.
    """
    is_draining = False

    def on_signal(number: int, _frame: Any) -> None:
        nonlocal is_draining
        global _has_hung_up  # noqa: PLW0603  # Signals belong to the process.
        if is_draining:
            if number == signal.SIGINT:
                interrupt()
            return
        if number == signal.SIGHUP and notify("restart"):
            return
        is_draining = True
        _has_hung_up = number == signal.SIGHUP
        drain()

    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, on_signal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if _ignores_hangup() else on_signal)


def _ignores_hangup() -> bool:
    """Whether ``nohup`` started this process, or a process that restarts as a whole forked it."""
    return _is_nohup or os.getpid() != _pid


def exit_within(seconds: float, status: int) -> None:
    """End this process with ``status`` after this time, unless it has ended before.

    Python waits without a limit for the threads of its pools before it exits, and one of them may
    wait for a frozen server.
    """

    def exit_now() -> None:
        logger.error("this process did not end by itself; a thread hangs")
        logging.shutdown()
        os._exit(status)

    timer = threading.Timer(seconds, exit_now)
    timer.daemon = True
    timer.start()


class RestartDelay:
    """The delays between restarts of one program; each is twice the last while it ends early."""

    def __init__(self) -> None:
        # Kept here, because the supervisor is pickled into a process that knows no settings.
        self._next_s, self._max_s = _FIRST_DELAY_S, _MAX_DELAY_S

    def after(self, ran_s: float) -> float:
        """Return the delay in seconds before the restart of a process that ran for ``ran_s``.

        It is 0 after a run of more than 30 s, and the delays then start from the shortest.
        """
        delay_s = 0.0 if ran_s > _STABLE_S else self._next_s
        self._next_s = min(max(delay_s * 2, _FIRST_DELAY_S), self._max_s)
        return delay_s


def signal_name(number: int) -> str:
    """Return the name of a signal; a real-time signal has a number only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def give_large_blocks_back() -> None:
    """Have the C library return a large block to the system as soon as it is freed.

    glibc maps a block of 128 KiB separately and returns it when it is freed. But each larger block
    that is freed raises this threshold, up to 32 MiB. After that, bodies and answers of some
    megabytes are allocated among small objects, in the arenas of several threads, and their memory
    is neither returned nor often used again: a worker with 42 MiB in use kept 670 MiB more. A
    threshold that is set explicitly stays. It is above the 256 KiB that asyncio allocates for each
    read of a socket: mapping and returning those takes six times as long as reading 300 bytes.

    Call it before threads start. Does nothing with another C library.
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
