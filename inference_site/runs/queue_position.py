"""Positions in the queue, the order of the claims, estimated waits, and the limits of the queue.

A process counts what waits and runs for a model at most twice a second, and only while the model
has no free slot. Between two counts it adds the generations that it has accepted itself.

``QUEUE_LIMIT`` generations may wait for a model, and half as many of the service class background.
Of both, a project may take no more than it leaves free: one project alone gets half, two get a
third each. So no project fills a queue, and no number of projects fills it with background work.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from django.conf import settings
from django.db import connection
from django.db.models import Count

from inference_site.catalogue.fleet.leases import LiveWorker, ModelReport, live_view
from inference_site.core.domain.errors import EngineUnavailable, ProjectQueueFull, QueueFull
from inference_site.runs.models import Generation, ServiceClass, Status

_COUNT_EVERY_S = 0.5
_OLDEST_S = 5.0
"""The oldest counts that are used while another thread counts."""
_REFUSED_FOR_S = 0.25
"""How long a refusal applies to the requests after it."""
_MARGIN = 500
"""More than all processes together accept between two counts. Within this distance of the limit,
the queue is counted for each request, under a lock."""
_LOCK = f"SELECT pg_advisory_xact_lock({0x1F5A0003}, hashtext(%s))"
_ALL_PROJECTS = 0
_COUNT = """
SELECT count(*), count(*) FILTER (WHERE project_id = %(project)s),
    count(*) FILTER (WHERE service_class >= %(background)s),
    count(*) FILTER (WHERE service_class >= %(background)s AND project_id = %(project)s)
FROM generations_generation WHERE model = %(model)s AND status = 'queued'
"""


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """How many generations start before this one starts, plus one; 0 if a slot is free.

    ``wait_s`` is estimated from the run times of the model; None if these are unknown.
    """

    position: int = 0
    wait_s: float | None = 0.0

    @property
    def seconds(self) -> int | None:
        """The wait as clients see it, rounded up."""
        return None if self.wait_s is None else math.ceil(self.wait_s)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of an answer that describe the position."""
        values = {"x-queue-position": self.position, "x-queue-estimated-wait": self.seconds}
        return {name: str(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class _Part:
    """A queue, or its background part: its limit, and how many wait in all and of one project."""

    is_background: bool
    limit: int
    waiting: int
    of_project: int

    @property
    def is_near_limit(self) -> bool:
        return self.waiting + self.of_project + _MARGIN >= self.limit

    @property
    def refusal(self) -> type[EngineUnavailable] | None:
        """The error of one more generation of the project; None if it may wait."""
        if self.waiting >= self.limit:
            return QueueFull
        return ProjectQueueFull if self.waiting + self.of_project >= self.limit else None


def _parts(service_class: int, waiting: tuple[int, ...]) -> list[_Part]:
    """Return the parts of a queue that a generation of this class counts in.

    ``waiting`` counts all, those of its project, and of both those in the background.
    """
    everything, of_project, background, background_of_project = waiting
    parts = [_Part(False, settings.QUEUE_LIMIT, everything, of_project)]
    if service_class >= ServiceClass.BACKGROUND:
        half = (settings.QUEUE_LIMIT + 1) // 2
        parts.append(_Part(True, half, background, background_of_project))
    return parts


@dataclass(slots=True)
class QueueCounts:
    """Waiting generations of a model by project and service class, running ones by project."""

    waiting: Counter[tuple[int, int]] = field(default_factory=Counter)
    running: Counter[int] = field(default_factory=Counter)
    counted_at: float = 0.0

    @classmethod
    def read(cls, model: str) -> QueueCounts:
        """Count in the database."""
        found = Generation.objects.filter(model=model, finished_at=None)
        rows = found.values_list("project_id", "service_class", "status").annotate(Count("pk"))
        counts = cls(counted_at=time.monotonic())
        for project_id, service_class, status, count in rows.order_by():
            if status == Status.QUEUED:
                counts.waiting[project_id, service_class] += count
            else:
                counts.running[project_id] += count
        return counts

    def parts(self, project_id: int, service_class: int) -> list[_Part]:
        """Return the parts of the queue that one more generation would count in."""
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
        """Return the position of a generation of this project, in the order of claims.

        ``before`` is how many of its project and class wait before it, by default all. Before each
        of them, projects of the same class with fewer running generations are served; better
        classes are served before all of them.
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


class CachedQueueCounts:
    """The counts of all models and the latest refusals, as this process knows them. Thread-safe."""

    def __init__(self) -> None:
        self._counts: dict[str, QueueCounts] = {}
        self._refusals: dict[tuple[str, int, bool], tuple[float, type[EngineUnavailable]]] = {}
        self._refuses_until = 0.0
        self._counting: set[str] = set()
        self._lock = threading.Lock()

    def of(self, model: str) -> QueueCounts:
        """Return the counts of a model, which are at most half a second old.

        One thread counts again, without the lock: a query may take until its time-out. Meanwhile
        the others get the last counts, or count themselves if these are too old.
        """
        with self._lock:
            counts = self._counts.get(model)
            if counts is not None:
                age_s = time.monotonic() - counts.counted_at
                if age_s <= (_OLDEST_S if model in self._counting else _COUNT_EVERY_S):
                    return counts
            self._counting.add(model)
        try:
            counts = QueueCounts.read(model)
            with self._lock:
                self._counts[model] = counts
            return counts
        finally:
            with self._lock:
                self._counting.discard(model)

    def add(self, model: str, project_id: int, service_class: int) -> None:
        """Count one more waiting generation."""
        with self._lock:
            if (counts := self._counts.get(model)) is not None:
                counts.waiting[project_id, service_class] += 1

    def note_refusal(
        self, model: str, project_id: int, error: type[EngineUnavailable], *, is_background: bool
    ) -> None:
        """Record a refusal: of the project with ProjectQueueFull, else of all projects.

        ``is_background``: only background generations are refused.
        """
        project_id = project_id if error is ProjectQueueFull else _ALL_PROJECTS
        now = time.monotonic()
        with self._lock:
            kept = {key: value for key, value in self._refusals.items() if value[0] > now}
            kept[model, project_id, is_background] = now + _REFUSED_FOR_S, error
            self._refusals, self._refuses_until = kept, now + _REFUSED_FOR_S

    def refusal(
        self, model: str, project_id: int | None, *, is_background: bool
    ) -> EngineUnavailable | None:
        """Return the error of a request that would have been refused a moment ago."""
        refusals, now = self._refusals, time.monotonic()
        if self._refuses_until <= now:  # For almost all requests.
            return None
        for owner in (_ALL_PROJECTS, project_id):
            for part in (False, True) if is_background else (False,):
                until, error = refusals.get((model, owner or _ALL_PROJECTS, part), (0.0, QueueFull))
                if until > now:
                    return error()
        return None


queue_counts = CachedQueueCounts()


def has_free_slot(model: str) -> bool:
    """Whether a worker announced a free slot within the last three seconds."""
    return any(served.free for served in live_view.having(model))


def position_of(
    model: str, project_id: int, service_class: int, before: int | None = None
) -> QueuePosition:
    """Return the position of a generation of a model without a free slot, as far as is known."""
    counts = queue_counts.of(model)
    serving = live_view.serving(model)
    slots = slots_of(model)
    if not counts.waiting.total() and counts.running.total() < slots:
        return QueuePosition()
    position = counts.position(project_id, service_class, before)
    return QueuePosition(position, _wait_s(position, _reports(serving, model)))


def position_at(model: str, position: int) -> QueuePosition:
    """Return a position in the queue of a model with its estimated wait. Raise redis' errors."""
    reports = _reports(live_view.serving(model), model)
    starts_after = max(0, position - sum(report.free for report in reports))
    return QueuePosition(position, _wait_s(starts_after, reports))


def _wait_s(starts: int, reports: Iterable[ModelReport]) -> float | None:
    """Estimate the seconds until this number of generations have started; None if unknown."""
    starts_per_s = sum(report.slots / report.run_s for report in reports if report.run_s)
    return starts / starts_per_s if starts_per_s else None


def slots_of(model: str) -> int:
    """Return the slots of the workers that serve a model. Raise redis' errors."""
    return sum(report.slots for report in _reports(live_view.serving(model), model))


def _reports(workers: Iterable[LiveWorker], model: str) -> list[ModelReport]:
    return [report for worker in workers if (report := worker.model(model)) is not None]


def position_of_waiting(public_id: str) -> QueuePosition | None:
    """Return the current position of a generation; None if it does not wait."""
    row = Generation.objects.filter(public_id=public_id, status=Status.QUEUED).first()
    if row is None:
        return None
    alike = {"model": row.model, "project": row.project_id, "service_class": row.service_class}
    older = Generation.objects.filter(status=Status.QUEUED, created_at__lt=row.created_at, **alike)
    return position_of(row.model, row.project_id, row.service_class, older.count())


def waiting_by_model(models: Sequence[str]) -> dict[str, int]:
    """Return how many generations wait for each of these models; models without any are absent."""
    if not models:
        return {}
    waiting = Generation.objects.filter(status=Status.QUEUED, model__in=models).order_by()
    return dict(waiting.values_list("model").annotate(Count("pk")))


class Waiting(NamedTuple):
    """A generation that waits."""

    pk: int
    project_id: int
    service_class: int


def claim_order(
    waiting: Iterable[Waiting], running: Sequence[int], slots: int, most: int
) -> list[int]:
    """Return the first ``most`` of the generations of one model, as they will be claimed.

    ``waiting`` has the oldest first, ``running`` the projects of the running generations, the one
    that was claimed first first. While all ``slots`` are busy, a run ends before each claim.

    The rules are those of the claim in ``models``. Which run ends next is not known: the order is
    exact if runs end in the order in which they were claimed, and no generation prefers a worker,
    runs isolated or arrives meanwhile.
    """
    lines: dict[int, dict[int, deque[tuple[int, int]]]] = {}
    for age, one in enumerate(waiting):
        line = lines.setdefault(one.service_class, {}).setdefault(one.project_id, deque())
        line.append((age, one.pk))
    runs, ending = Counter(running), deque(running)
    last_claim = {project: number for number, project in enumerate(running, start=1)}
    order: list[int] = []
    for service_class in sorted(lines):
        projects = lines[service_class]
        while projects and len(order) < most:
            if ending and len(ending) >= slots:
                runs[ending.popleft()] -= 1
            best = min((runs[p], last_claim.get(p, 0), *line[0], p) for p, line in projects.items())
            project = best[-1]
            order.append(projects[project].popleft()[1])
            if not projects[project]:
                del projects[project]
            runs[project] += 1
            ending.append(project)
            last_claim[project] = len(running) + len(order)
    return order


def is_near_limit(row: Generation) -> bool:
    """Whether only a count under a lock can tell if this row may wait."""
    parts = queue_counts.of(row.model).parts(row.project_id, row.service_class)
    return any(part.is_near_limit for part in parts)


def check_queue_limit(row: Generation) -> None:
    """Lock the queue of the row's model until the transaction ends, and check its limits.

    Raise QueueFull when the queue is full, ProjectQueueFull when the share of the project is.
    """
    asked: dict[str, str | int] = {"project": row.project_id, "model": row.model}
    asked["background"] = ServiceClass.BACKGROUND.value
    with connection.cursor() as cursor:
        cursor.execute(_LOCK, [row.model])
        cursor.execute(_COUNT, asked)
        counts = cursor.fetchone()
    for part in _parts(row.service_class, counts):
        if (error := part.refusal) is not None:
            is_background = part.is_background
            queue_counts.note_refusal(row.model, row.project_id, error, is_background=is_background)
            raise error
