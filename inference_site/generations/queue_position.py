"""Places in the queue: how many start before a new generation, when it starts, and whether it fits.

What waits and runs for a model is counted at most twice a second in a process, and only while the
model has no free slot. In between, a process adds what it has accepted itself.

``QUEUE_LIMIT`` generations may wait for a model, and half as many of the service class background.
Of both, a project may take no more than it leaves free: one project alone can have half of the
places, two a third each. So no project fills a queue, and no number of projects fills it with work
in the background: others find room for theirs.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from django.conf import settings
from django.db import connection
from django.db.models import Count

from inference_site.domain.errors import EngineUnavailable, ProjectQueueFull, QueueFull
from inference_site.fleet.leases import LiveWorker, ModelReport, live_view
from inference_site.generations.models import Generation, ServiceClass, Status

_COUNTED_S = 0.5
_FULL_S = 0.25
"""For how long a refusal holds for the requests that come after it."""
_MARGIN = 500
"""More than all processes accept between two counts: so near to its bound a queue is counted for
each request, under a lock."""
_LOCK = "SELECT pg_advisory_xact_lock(0x1F5A0003, hashtext(%s))"
_ALL_PROJECTS = 0
_COUNT = """
SELECT count(*), count(*) FILTER (WHERE project_id = %(project)s),
    count(*) FILTER (WHERE service_class >= %(background)s),
    count(*) FILTER (WHERE service_class >= %(background)s AND project_id = %(project)s)
FROM generations_generation WHERE model = %(model)s AND status = 'queued'
"""


@dataclass(frozen=True, slots=True)
class _Part:
    """A queue, or its part for the background: its places, what waits, and what of one project."""

    is_background: bool
    places: int
    waiting: int
    of_project: int

    @property
    def is_near_bound(self) -> bool:
        return self.waiting + self.of_project + _MARGIN >= self.places

    @property
    def refusal(self) -> type[EngineUnavailable] | None:
        """The error of one more generation of the project; None if it may wait."""
        if self.waiting >= self.places:
            return QueueFull
        return ProjectQueueFull if self.waiting + self.of_project >= self.places else None


def _parts(service_class: int, waiting: tuple[int, ...]) -> list[_Part]:
    """Return the parts of a queue that a generation of this class needs a place in.

    ``waiting`` counts all, those of its project, and of both those in the background.
    """
    everything, of_project, background, background_of_project = waiting
    places = settings.QUEUE_LIMIT
    parts = [_Part(False, places, everything, of_project)]
    if service_class >= ServiceClass.BACKGROUND:
        places = (places + 1) // 2
        parts.append(_Part(True, places, background, background_of_project))
    return parts


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

    def parts(self, project_id: int, service_class: int) -> list[_Part]:
        """Return the parts of the queue that one more needs a place in, as they are known."""
        counts = [0, 0, 0, 0]
        for (project, class_), count in self.waiting.items():
            of_project = count if project == project_id else 0
            counts[0] += count
            counts[1] += of_project
            if class_ >= ServiceClass.BACKGROUND:
                counts[2] += count
                counts[3] += of_project
        return _parts(service_class, tuple(counts))

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
        self._refusals: dict[tuple[str, int, bool], tuple[float, type[EngineUnavailable]]] = {}
        self._refuses_until = 0.0
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

    def note_refusal(
        self, model: str, project_id: int, error: type[EngineUnavailable], *, is_background: bool
    ) -> None:
        """Note that one was refused just now: for its project, or because a queue was full.

        ``is_background``: only what comes in the background is refused.
        """
        project_id = project_id if error is ProjectQueueFull else _ALL_PROJECTS
        now = time.monotonic()
        with self._lock:
            kept = {key: value for key, value in self._refusals.items() if value[0] > now}
            kept[model, project_id, is_background] = now + _FULL_S, error
            self._refusals, self._refuses_until = kept, now + _FULL_S

    def refusal(
        self, model: str, project_id: int | None, *, is_background: bool
    ) -> EngineUnavailable | None:
        """Return the error of a request that would have been refused a moment ago."""
        if not self.any_refused():
            return None
        refusals, now = self._refusals, time.monotonic()
        for owner in (_ALL_PROJECTS, project_id):
            for part in (False, True) if is_background else (False,):
                until, error = refusals.get((model, owner or _ALL_PROJECTS, part), (0.0, QueueFull))
                if until > now:
                    return error()
        return None

    def any_refused(self) -> bool:
        """Whether any request was refused a moment ago: at once, for every request."""
        return self._refuses_until > time.monotonic()


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


def waiting_for(models: Sequence[str]) -> dict[str, int]:
    """Return how many generations wait for each of these models; nothing for those without any."""
    if not models:
        return {}
    waiting = Generation.objects.filter(status=Status.QUEUED, model__in=models).order_by()
    return dict(waiting.values_list("model").annotate(Count("pk")))


def rate_of(serving: Iterable[LiveWorker], model: str) -> float:
    """Return how many runs of a model these workers end in a second; 0 when that is unknown."""
    return sum(r.slots / r.run_s for r in _reports(serving, model) if r.run_s)


def _reports(workers: Iterable[LiveWorker], model: str) -> list[ModelReport]:
    return [report for worker in workers if (report := worker.model(model)) is not None]


def is_near_bound(row: Generation) -> bool:
    """Whether it takes a count to say that this one may wait, too."""
    parts = crowds.of(row.model).parts(row.project_id, row.service_class)
    return any(part.is_near_bound for part in parts)


def require_room(row: Generation) -> None:
    """Hold the queue of a model for this transaction, in which this row is to be written.

    Raise QueueFull when as many wait as may, ProjectQueueFull when as many of its project do.
    """
    asked: dict[str, str | int] = {"project": row.project_id, "model": row.model}
    asked["background"] = ServiceClass.BACKGROUND.value
    with connection.cursor() as cursor:
        cursor.execute(_LOCK, [row.model])
        cursor.execute(_COUNT, asked)
        counts = cursor.fetchone()
    for part in _parts(row.service_class, counts):
        if (error := part.refusal) is not None:
            crowds.note_refusal(row.model, row.project_id, error, is_background=part.is_background)
            raise error
