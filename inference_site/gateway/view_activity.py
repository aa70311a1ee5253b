"""Whether views that take long compute, or hang: seen by the processor time of their threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_LOOK_S = 0.2
_IDLE = 0.1
"""A thread that uses less than this part of a processor waits for something."""
_clock_of = getattr(time, "pthread_getcpuclockid", None)  # macOS has none: all views hang there.


@dataclass(slots=True)
class _View:
    """A view on its thread: how much processor time that has used, and since when it is idle."""

    thread: int
    looked_at: float
    used_s: float
    idle_since: float


class ViewActivity:
    """The views that run. ``noted`` is for their threads."""

    def __init__(self) -> None:
        self._views: dict[int, _View] = {}
        self._looked_at = 0.0

    @contextmanager
    def noted(self) -> Iterator[float]:
        """Note that a view runs on this thread; yield the time of its start."""
        thread, started = threading.get_ident(), time.monotonic()
        self._views[thread] = _View(thread, started, _used_s(thread), started)
        try:
            yield started
        finally:
            del self._views[thread]

    def hangs(self, now: float, idle_s: float) -> bool:
        """Return whether a view has run for so long and used no processor all the while."""
        return self.hanging(now, idle_s) > 0

    def hanging(self, now: float, idle_s: float) -> int:
        """Return how many views have run for this long without using the processor."""
        views = list(self._views.values())
        if now - self._looked_at > _LOOK_S:
            self._looked_at = now
            for view in views:
                _look(view, now)
        return sum(now - view.idle_since >= idle_s for view in views)


def _look(view: _View, now: float) -> None:
    used_s = _used_s(view.thread)
    if used_s - view.used_s > _IDLE * (now - view.looked_at):
        view.idle_since = now
    view.looked_at, view.used_s = now, used_s


def _used_s(thread: int) -> float:
    return 0.0 if _clock_of is None else time.clock_gettime(_clock_of(thread))
