"""Affinity: a generation that continues another prefers the worker that ran that one.

Its prefix is in that worker's memory, and need not be read again. The preference is worth a wait of
``AFFINITY_WAIT_MS`` and no longer: until then only that worker may claim it, and a bell is rung for
that worker alone; then a bell is rung for all.
"""

from __future__ import annotations

import datetime as dt
import heapq
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from django.conf import settings
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Now

from inference_site.fleet.leases import live_view
from inference_site.generations.models import Generation

_SLACK_MS = 30
"""How much later than the wait a bell is rung for all: the clocks of two hosts are not in step, and
a bell that comes too early is a bell lost."""


@dataclass(frozen=True, slots=True)
class Preference:
    """Which worker a generation prefers, if any, and for how long from its acceptance on."""

    worker: str = ""
    wait_ms: int = 0

    @property
    def until(self) -> CombinedExpression | None:
        """What to write into the row: a time of the database's clock, by which it is claimed."""
        return Now() + dt.timedelta(milliseconds=self.wait_ms) if self.worker else None

    @property
    def open_after_s(self) -> float:
        """How many seconds after the row was written anybody may claim it."""
        return (self.wait_ms + _SLACK_MS) / 1000


def preference(model: str, continues: str) -> Preference:
    """Return what a generation of this model prefers that continues another, by that one's id.

    Nothing, when its worker does not serve the model any more or nobody else does.
    """
    wait_ms = settings.AFFINITY_WAIT_MS
    if not continues or not wait_ms:
        return Preference()
    serving = {worker.id for worker in live_view.serving(model)}
    if len(serving) < 2:
        return Preference()
    before = Generation.objects.filter(public_id=continues).values_list("worker", flat=True)
    worker = before.first()
    if worker not in serving:
        return Preference()
    return Preference(worker, wait_ms)


class Later:
    """Calls functions after a while, on one thread that all share."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def call(self, after_s: float, function: Callable[[], None]) -> None:
        """Call it after so many seconds; it must not raise."""
        with self._changed:
            self._number += 1
            heapq.heappush(self._due, (time.monotonic() + after_s, self._number, function))
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="later", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _main(self) -> None:
        while True:
            self._next()()

    def _next(self) -> Callable[[], None]:
        with self._changed:
            while True:
                if not self._due:
                    self._changed.wait()
                elif (left_s := self._due[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    return heapq.heappop(self._due)[2]


later = Later()
