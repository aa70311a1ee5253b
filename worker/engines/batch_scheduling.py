"""Threads that wait for tokens do not take the core of the thread that computes them.

With each token llama.cpp's server wakes every thread that waits for one. Linux lets a thread that
wakes up interrupt the one that runs, and so the only thread that computes lost a fifth of its time
on two cores, with eight streams.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_EXISTS = hasattr(os, "SCHED_BATCH")  # On Linux.


@contextmanager
def batch_scheduled() -> Iterator[None]:
    """Run the block on a thread that waits for a free core, or its turn, when it wakes up.

    Of no effect where the system has no such policy, or does not allow it. Source: sched(7).
    """
    if not _EXISTS or os.sched_getscheduler(0) != os.SCHED_OTHER:  # An operator chose another.
        yield
        return
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
