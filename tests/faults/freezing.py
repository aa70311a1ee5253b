"""Processes that stand still for a while, as when their host does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from tests.served_stack import ServedStack


@contextmanager
def frozen(*pids: int) -> Iterator[None]:
    """Stop these processes, and have them go on in the end. One may have ended before."""
    try:
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            _signal(pid, signal.SIGCONT)


@contextmanager
def frozen_postgres(stack: ServedStack) -> Iterator[None]:
    """Stop PostgreSQL and all that it has started.

    The postmaster is stopped first: it then starts no process that would go on.
    """
    postmaster = stack.postgres_pid()
    with frozen(postmaster):
        children = psutil.Process(postmaster).children(recursive=True)
        with frozen(*(child.pid for child in children)):
            yield


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
