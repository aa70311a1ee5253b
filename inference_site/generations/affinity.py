"""Affinity: a generation that continues another prefers the worker that ran that one.

Its prefix is in that worker's memory, and need not be read again. The preference is worth a wait of
``AFFINITY_WAIT_MS`` and no longer: until then only that worker is woken and may claim it, then all.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from django.conf import settings
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Now

from inference_site.fleet.leases import live_view
from inference_site.generations.models import Generation

_SLACK_MS = 30
"""How much later than the wait all are woken: the clocks of two hosts are not in step, and a worker
that is woken too early finds nothing to claim."""


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
