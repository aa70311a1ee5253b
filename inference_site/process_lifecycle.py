"""The life of a process of this site: its stop signals, its supervisor, and its end.

``serve`` gives each process that it starts a pipe, whose descriptor is in ``NOTIFY_FD``. The
process writes a line into it for each of these states:

ready      it does its work; the process that it replaces may stop
failed     it cannot do all of its work
restart    it was asked to restart: it goes on until its supervisor has another, and stops it
stopping   it takes no new work, and ends when what it does has ended: another may start now

``REPLACES_PID`` names the process that a new one replaces. Both may run for a while.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Literal

logger = logging.getLogger(__name__)

NOTIFY_FD, REPLACES_PID = "NOTIFY_FD", "REPLACES_PID"
State = Literal["ready", "failed", "restart", "stopping"]

_pid = os.getpid()
"""Processes that are forked from this one have the same environment, but no supervisor."""
_is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
_has_hung_up = False


def notify(state: State) -> bool:
    """Write the state for the supervisor; return whether a supervisor that goes on reads it.

    A supervisor that stops its processes for good closes the pipe before.
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
    """Write that this process stops; return whether another is going to take its place."""
    return notify("stopping") or _has_hung_up


def is_replacement() -> bool:
    """Whether this process was started to replace one that may still run."""
    return bool(os.environ.get(REPLACES_PID)) and os.getpid() == _pid


def predecessor_runs() -> bool:
    """Whether the process that this one replaces has not ended yet."""
    if not is_replacement():
        return False
    try:
        os.kill(int(os.environ[REPLACES_PID]), 0)
    except ProcessLookupError:
        return False
    return True


def default_stop_signals(**_: Any) -> None:
    """Have the kernel end this process at a stop signal: it does nothing yet that could be lost."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if _ignores_hangup() else signal.SIG_DFL)


def handle_stop_signals(drain: Callable[[], None], cut: Callable[[], None] = lambda: None) -> None:
    """Call ``drain`` at the first SIGTERM, SIGINT or SIGHUP, and ``cut`` at a SIGINT after that.

    SIGHUP asks for a restart. Under ``serve`` the process goes on until another is ready, and gets
    SIGTERM then. Elsewhere it ends as at SIGTERM, and what supervises it (Compose, systemd) starts
    another. Both functions are called by the signal handler, between any two steps of the main
    thread.
    """
    is_draining = False

    def on_signal(number: int, _frame: Any) -> None:
        nonlocal is_draining
        global _has_hung_up  # noqa: PLW0603  # Of the process, as its signals are.
        if is_draining:
            if number == signal.SIGINT:
                cut()
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
    """Whether this process was started by ``nohup``, or forked by one that restarts as a whole."""
    return _is_nohup or os.getpid() != _pid


def end_within(seconds: float, status: int) -> None:
    """End this process with ``status`` after this time, unless it has ended before.

    Python waits for the threads of its pools before it exits, however long that takes, and one of
    them may wait for a server that is frozen.
    """
    timer = threading.Timer(seconds, _end, (status,))
    timer.daemon = True
    timer.start()


def _end(status: int) -> None:
    logger.error("this process did not end by itself; a thread hangs")
    logging.shutdown()
    os._exit(status)


# The module's text:
# """How soon a process that has died is started again."""


_FIRST_S, _LONGEST_S = 0.5, 30.0
_STABLE_S = 30.0
"""After a process has run for this time it is restarted at once, and the delays begin anew."""


class RestartDelay:
    """The delays of one program: each twice the one before, while its processes die soon."""

    def __init__(self) -> None:
        self._next_s = _FIRST_S

    def after(self, ran_s: float) -> float:
        """Return the delay before the next start, in seconds, after a process that ran so long."""
        delay_s = 0.0 if ran_s > _STABLE_S else self._next_s
        self._next_s = min(max(delay_s * 2, _FIRST_S), _LONGEST_S)
        return delay_s
