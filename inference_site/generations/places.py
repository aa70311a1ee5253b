"""Places in the queue: how many start before a new generation, when it starts, and whether it fits.

What waits and runs for a model is counted at most twice a second in a process, and only while the
model has no free slot. In between, a process adds what it has accepted itself.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from django.conf import settings
from django.db import connection
from django.db.models import Count

from inference_site.domain.errors import QueueFull
from inference_site.fleet.leases import LiveWorker, ModelReport, live_view
from inference_site.generations.models import Generation, Status

_COUNTED_S = 0.5
_FULL_S = 0.25
"""For how long a queue that was full is taken to be so."""
_MARGIN = 500
"""More than all processes accept between two counts: so near to its bound a queue is counted for
each request, under a lock."""
_LOCK = "SELECT pg_advisory_xact_lock(0x1F5A0003, hashtext(%s))"


@dataclass(frozen=True, slots=True)
class Place:
    """How many starts it takes until a generation has begun; 0: a slot is free.

    ``wait_s`` is by how long the last runs of the model took; None when that is unknown.
    """

    position: int = 0
    wait_s: float | None = 0.0

    @property
    def seconds(self) -> int | None:
        """The wait as clients see it, rounded up."""
        return None if self.wait_s is None else math.ceil(self.wait_s)

    @property
    def headers(self) -> dict[str, str]:
        """What an answer says of it."""
        said = {"x-queue-position": self.position, "x-queue-estimated-wait": self.seconds}
        return {name: str(value) for name, value in said.items() if value is not None}


@dataclass(slots=True)
class Crowd:
    """What waits for a model, by project and service class, and what runs, by project."""

    waiting: Counter[tuple[int, int]] = field(default_factory=Counter)
    running: Counter[int] = field(default_factory=Counter)
    counted_at: float = 0.0

    def position(self, project_id: int, service_class: int, before: int | None = None) -> int:
        """Return the position of a generation of this project, by the order of claims.

        ``before`` are those of its project and class that wait before it, by default all. Each of
        them lets other projects of that class go first that have fewer running; a better class goes
        first in any case.
        """
        key = project_id, service_class
        before = self.waiting[key] if before is None else before
        turns = before + 1 + self.running[project_id]
        ahead = before
        for (other, class_), count in self.waiting.items():
            if class_ < service_class:
                ahead += count
            elif class_ == service_class and other != project_id:
                ahead += min(count, max(0, turns - self.running[other]))
        return ahead + 1


class Crowds:
    """The crowds of all models, as this process knows them. For any thread."""

    def __init__(self) -> None:
        self._crowds: dict[str, Crowd] = {}
        self._full: dict[str, float] = {}
        self._lock = threading.Lock()

    def of(self, model: str) -> Crowd:
        """Return what waits and runs for a model."""
        with self._lock:
            crowd = self._crowds.get(model)
            if crowd is None or time.monotonic() - crowd.counted_at > _COUNTED_S:
                crowd = self._crowds[model] = _counted(model)
            return crowd

    def add(self, model: str, project_id: int, service_class: int) -> None:
        """Note that one more waits."""
        with self._lock:
            if (crowd := self._crowds.get(model)) is not None:
                crowd.waiting[project_id, service_class] += 1

    def note_full(self, model: str) -> None:
        """Note that the queue of a model was full just now."""
        self._full[model] = time.monotonic() + _FULL_S

    def is_full(self, model: str) -> bool:
        """Whether the queue of a model was full a moment ago."""
        return self.any_full() and self._full.get(model, 0.0) > time.monotonic()

    def any_full(self) -> bool:
        """Whether that of any model was: at once, for every request."""
        return bool(self._full) and max(self._full.copy().values()) > time.monotonic()


crowds = Crowds()


def _counted(model: str) -> Crowd:
    found = Generation.objects.filter(model=model, finished_at=None)
    counts = found.values_list("project_id", "service_class", "status").annotate(Count("pk"))
    crowd = Crowd(counted_at=time.monotonic())
    for project_id, service_class, status, count in counts.order_by():
        if status == Status.QUEUED:
            crowd.waiting[project_id, service_class] += count
        else:
            crowd.running[project_id] += count
    return crowd


def has_free_slot(model: str) -> bool:
    """Whether a worker said at most three seconds ago that it has a free slot."""
    return any(served.free for served in live_view.having(model))


def place_of(model: str, project_id: int, service_class: int, before: int | None = None) -> Place:
    """Return the place of a generation of a model that has no free slot, as far as is known."""
    crowd = crowds.of(model)
    serving = live_view.serving(model)
    slots = sum(served.slots for served in _reports(serving, model))
    if not crowd.waiting.total() and crowd.running.total() < slots:
        return Place()
    position = crowd.position(project_id, service_class, before)
    starts_a_second = rate_of(serving, model)
    return Place(position, position / starts_a_second if starts_a_second else None)


def place_of_waiting(public_id: str) -> Place | None:
    """Return the place that a generation has now; None when it does not wait."""
    row = Generation.objects.filter(public_id=public_id, status=Status.QUEUED).first()
    if row is None:
        return None
    alike = {"model": row.model, "project": row.project_id, "service_class": row.service_class}
    older = Generation.objects.filter(status=Status.QUEUED, created_at__lt=row.created_at, **alike)
    return place_of(row.model, row.project_id, row.service_class, older.count())


def rate_of(serving: Iterable[LiveWorker], model: str) -> float:
    """Return how many runs of a model these workers end in a second; 0 when that is unknown."""
    return sum(r.slots / r.run_s for r in _reports(serving, model) if r.run_s)


def _reports(workers: Iterable[LiveWorker], model: str) -> list[ModelReport]:
    return [report for worker in workers if (report := worker.model(model)) is not None]


def is_near_bound(model: str) -> bool:
    """Whether it takes a count to say that one more may wait."""
    return crowds.of(model).waiting.total() + _MARGIN >= settings.QUEUE_LIMIT


def require_room(model: str) -> None:
    """Hold the queue of a model for this transaction, in which one more is to be written.

    Raise QueueFull when as many wait as may.
    """
    with connection.cursor() as cursor:
        cursor.execute(_LOCK, [model])
    waiting = Generation.objects.filter(model=model, status=Status.QUEUED)
    if waiting.count() >= settings.QUEUE_LIMIT:
        crowds.note_full(model)
        raise QueueFull
