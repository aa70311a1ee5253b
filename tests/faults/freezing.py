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
    """Stop these processes, and have them go on in the end."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def postgres_pids(stack: ServedStack) -> list[int]:
    """The postmaster and all that it has started."""
    postmaster = stack.postgres_pid()
    children = psutil.Process(postmaster).children(recursive=True)
    return [postmaster, *(child.pid for child in children)]
