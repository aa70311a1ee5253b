"""Feeding: beat puts the lines of batches into the queue, and moves the batches on.

For each model, no more lines are in the queue than keep its slots full. Projects take turns, then
the batches of a project, so a project with many batches does not delay another's. Lines are
background work: workers claim them last, and keep slots free for clients (``ClientSlots``).
"""

from __future__ import annotations

import datetime as dt
import logging
import math
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest

import orjson
from django.db.models import Count, Q
from django.db.models.functions import Now
from django.utils import timezone

from inference_site.accounts.budgets import BudgetExhausted
from inference_site.accounts.keys import Caller, caller_of_key
from inference_site.batches.models import ANTHROPIC, Batch, BatchLine, BatchStatus, LineState
from inference_site.batches.requests import body_of, endpoints, validate
from inference_site.batches.results import HELD_S, finalize
from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet.leases import live_view
from inference_site.core.errors.api_errors import (
    ApiError,
    FileStorageError,
    RateLimitError,
    UnavailableError,
)
from inference_site.core.errors.exceptions import api_error
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.gateway.submission.submit import submit
from inference_site.runs.cancellation import cancel, cancel_waiting
from inference_site.runs.maintenance import try_and_log
from inference_site.runs.models import Generation, Status
from inference_site.runs.queue import WithRow

logger = logging.getLogger(__name__)

_SLICE_S = 0.2
"""How long the validation of one batch runs before that of another goes on."""
_PROGRESS_S = 2.0
"""How often the counts of a batch are written."""
_IN_TURN = 8
"""How many batches are validated in turn, one of each project."""
_MOST_AHEAD = 512
"""How many lines of a model wait in the queue at most, so that no slot is empty between passes."""
_PASS_S = 1.0
"""How long the lines of one model are put into the queue before a new batch, or a key that was
revoked meanwhile, is seen."""
_REST_S = 2.0
"""How long a batch rests after its line was refused, by a limit, a budget, or a full queue, and
after it could not be worked on."""
_UNSERVED = frozenset({"no_worker", "model_loading", "engine_unavailable"})
"""Codes of the refusal of a line whose model no worker serves now."""
_UNSERVED_REST = dt.timedelta(seconds=10)
"""How long such a line rests, of a batch whose lines may have different models. So does one whose
model's server is away, which would wait in the queue in the place of another line."""
_LIMITED_REST = dt.timedelta(seconds=_REST_S)
"""How long a line rests that a limit has refused, if there are limits for its model, or that a
budget of its model has."""
_STORAGE_REST_S = 15.0
"""How long a batch rests when the storage of files fails: on a full disk, each try logs more."""


class LineTaken(Exception):
    """The line is in the queue already, or its batch runs no more lines."""


@dataclass(frozen=True, slots=True)
class BegunLine:
    """What is written with the row of a line's generation."""

    line: BatchLine
    generation_id: str
    also: WithRow | None

    def write(self) -> None:
        """Record that the line is in the queue. Raise LineTaken if it may not be."""
        if not BatchLine.objects.begin(self.line, self.generation_id):
            raise LineTaken
        if self.also is not None:
            self.also.write()


def _slots_of(name: str) -> int:
    """Return the slots that workers have for a model; for a route, those of all of its models."""
    route = catalogue().routes.get(name)
    names = [name] if route is None else [spec.id for spec in route.specs]
    reports = [worker.model(name) for name in names for worker in live_view.serving(name)]
    return sum(report.slots for report in reports if report is not None)


class _Model:
    """A model or route that batches use: how many of their lines may be in the queue, or run."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ahead = 0

    def places(self, in_queue: int) -> int:
        """Return how many more lines there is room for; ``in_queue`` are in the queue or run.

        One line if no worker serves the model: it has a worker load it.
        """
        slots = _slots_of(self._name)
        if not slots:
            return 1 - in_queue
        # As many wait as the model ends between two passes, and some: more when few are left.
        waiting = in_queue - slots
        if waiting < self._ahead // 4:
            self._ahead = min(max(self._ahead * 2, slots), _MOST_AHEAD)
        elif waiting > self._ahead * 3 // 4:
            self._ahead = max(self._ahead - 1, slots)
        return slots + self._ahead - in_queue


class Feeder:
    """What one process remembers of the batches between its passes."""

    def __init__(self) -> None:
        self._process = secrets.token_hex(16)
        self._validations: dict[int, Iterator[None]] = {}
        self._models: dict[str, _Model] = {}
        self._rests_until: dict[int, float] = {}
        self._served: Counter[int] = Counter()
        self._noted: dict[int, tuple[float, int]] = {}

    def prepare(self) -> None:
        """Validate new batches, and write the results of those whose lines have ended."""
        waiting: dict[int, list[Batch]] = defaultdict(list)
        for batch in Batch.objects.filter(status=BatchStatus.VALIDATING).order_by("pk"):
            waiting[batch.project_id].append(batch)
        validating = list(islice(_alternate(waiting.values()), _IN_TURN))
        for known in self._validations.keys() - {batch.pk for batch in validating}:
            del self._validations[known]
        ending = Batch.objects.filter(status__in=(BatchStatus.FINALIZING, BatchStatus.CANCELLING))
        for batch in validating:
            self._work_on(batch, self._validate)
        for batch in ending.order_by("pk"):
            self._work_on(batch, self._end)

    def _work_on(self, batch: Batch, act: Callable[[Batch], None]) -> None:
        """Do a part of the work on a batch, unless it rests; after a failure it rests."""
        if self._rests_until.get(batch.pk, 0.0) > time.monotonic():
            return

        def work() -> None:
            try:
                act(batch)
            except FileStorageError:
                self._rest(batch, _STORAGE_REST_S)
                raise

        if try_and_log(f"batch {batch}", work):
            self._rests_until.pop(batch.pk, None)
        else:
            self._rest(batch, _REST_S)

    def _rest(self, batch: Batch, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._rests_until[batch.pk] = max(until, self._rests_until.get(batch.pk, 0.0))

    def _validate(self, batch: Batch) -> None:
        if batch.worked_by != self._process:  # Another process may have begun again.
            self._validations.pop(batch.pk, None)
        if not Batch.objects.hold(batch, self._process, HELD_S):
            return
        if batch.expires_at <= timezone.now():
            Batch.objects.move(batch, BatchStatus.EXPIRED)
            return
        steps = self._validations.pop(batch.pk, None) or validate(batch)
        until = time.monotonic() + _SLICE_S
        while time.monotonic() < until:
            try:
                next(steps)
            except StopIteration:
                return
        self._validations[batch.pk] = steps

    def _end(self, batch: Batch) -> None:
        """Write the results of a batch, once no line of it is in the queue or runs."""
        BatchLine.objects.release_lost()
        ids = _ids_in_queue(batch)
        if not ids:
            if Batch.objects.hold(batch, self._process, HELD_S):
                finalize(batch, self._process)
        elif batch.ends_as == BatchStatus.EXPIRED:
            cancel(ids)
        else:
            waiting = Generation.objects.filter(public_id__in=ids, status=Status.QUEUED)
            cancel_waiting(list(waiting.values_list("public_id", flat=True)))

    def feed(self) -> None:
        """Put lines into the queue, and move on the batches that have no more of them."""
        BatchLine.objects.release_lost()
        for batch in Batch.objects.with_all_lines_ended():
            Batch.objects.move(batch, BatchStatus.FINALIZING)
        by_model: dict[str, list[Batch]] = defaultdict(list)
        running = list(Batch.objects.filter(status=BatchStatus.IN_PROGRESS).order_by("pk"))
        for known in self._noted.keys() - {batch.pk for batch in running}:
            del self._noted[known]
            self._rests_until.pop(known, None)
        for batch in running:
            self._note_progress(batch)
            if batch.expires_at > timezone.now():
                by_model[batch.model].append(batch)
            elif Batch.objects.move(batch, BatchStatus.FINALIZING, ends_as=BatchStatus.EXPIRED):
                cancel(_ids_in_queue(batch))
        in_queue = BatchLine.objects.filter(state=LineState.RUNNING)
        counts = dict(in_queue.values_list("batch__model").annotate(Count("pk")))
        for name, batches in by_model.items():
            model = self._models.setdefault(name, _Model(name))
            if (places := model.places(counts.get(name, 0))) > 0:
                self._fill(batches, places)

    def _note_progress(self, batch: Batch) -> None:
        """Write the counts of a batch, and check its key: all of its lines may be in the queue."""
        now, ended = time.monotonic(), batch.completed + batch.failed
        noted_at, before = self._noted.get(batch.pk, (0.0, ended))
        if now - noted_at >= _PROGRESS_S:
            # An average in which the last half minute counts most.
            latest = max(0, ended - before) / (now - noted_at)
            rate = batch.rate + (latest - batch.rate) / 10 if batch.rate else latest
            self._noted[batch.pk] = now, ended
            Batch.objects.note_progress(batch, rate if noted_at else batch.rate)
            _caller_of(batch)

    def _fill(self, batches: list[Batch], places: int) -> None:
        """Put at most ``places`` lines into the queue: projects in turn, then their batches.

        It ends after ``_PASS_S``; the next pass goes on.
        """
        now = time.monotonic()
        awake = [batch for batch in batches if self._rests_until.get(batch.pk, 0.0) <= now]
        held_up = BatchLine.objects.held_up(awake)
        ready = [batch for batch in awake if batch.pk not in held_up]
        of_project: dict[int, list[Iterator[Batch]]] = defaultdict(list)
        most = math.ceil(places / max(1, len({batch.project_id for batch in ready})))
        for batch in ready:
            of_project[batch.project_id].append(self._feed(batch, most))
        projects = sorted(of_project, key=lambda project_id: self._served[project_id])
        until = now + _PASS_S
        for batch in _alternate(_alternate(of_project[project_id]) for project_id in projects):
            self._served[batch.project_id] += 1
            places -= 1
            if places <= 0 or time.monotonic() >= until:
                break

    def _feed(self, batch: Batch, most: int) -> Iterator[Batch]:
        """Put at most ``most`` lines of a batch into the queue; yield the batch after each."""
        waiting = BatchLine.objects.filter(batch=batch, state=LineState.PENDING)
        is_new, is_due = Q(resume_at=None), Q(resume_at__lte=Now())
        if batch.dialect == ANTHROPIC:
            # Many lines of a model that no worker serves would be tried again before others.
            lines = list(waiting.filter(is_new).order_by("number")[:most])
            lines = lines or list(waiting.filter(is_due).order_by("resume_at", "number")[:most])
        else:
            lines = list(waiting.filter(is_new | is_due).order_by("number")[:most])
        if not lines:
            return
        caller = _caller_of(batch)
        if caller is None:
            return
        rests: dict[str, dt.timedelta] = {}
        for line in lines:
            model = ""  # Until the line is read.
            try:
                body = body_of(line, batch.project_id)
                submission = endpoints()[batch.endpoint].submission_of(caller, body)
                model = submission.document.request.model
                if model in rests or (batch.dialect == ANTHROPIC and live_view.away_since(model)):
                    BatchLine.objects.postpone(line, rests.get(model, _UNSERVED_REST))
                    continue
                begun = BegunLine(line, submission.generation_id, submission.with_row)
                submit(replace(submission, with_row=begun), batch.request_id(line.number))
            except LineTaken:
                continue
            except Exception as exc:  # The boundary of a line.
                error, cause = api_error(exc), exc.__cause__
                if isinstance(cause, BudgetExhausted) and cause.budget.each:
                    # Only of the line's end user or tag: those of other lines may have room.
                    BatchLine.objects.postpone(line, dt.timedelta(seconds=cause.retry_after_s))
                    continue
                rest = _rest_of_model(model, caller, error, cause)
                if batch.dialect == ANTHROPIC and rest is not None:
                    # Other lines may have other models.
                    rests[model] = rest
                    self._postpone(batch, line, rest)
                    continue
                if isinstance(error, RateLimitError | UnavailableError):
                    logger.info("batch %s waits before its next lines: %s", batch, error)
                    self._rest(batch, _REST_S)
                    return
                if error.code == "conversation_locked":
                    BatchLine.objects.postpone(line)
                    continue
                if error.status >= 500:
                    logger.error("batch %s, line %d", batch, line.number, exc_info=exc)
                answer = orjson.dumps(error.shown_at(batch.endpoint))
                BatchLine.objects.end(line, error.status, answer, error.code or error.type)
            else:
                if batch.dialect == ANTHROPIC:  # Its lines may have different models.
                    _count_slots_of(batch, model)
            yield batch

    def _postpone(self, batch: Batch, line: BatchLine, rest: dt.timedelta) -> None:
        """Let a line rest; also its batch, if a limit has refused the line again.

        Then no line of the batch is new, and without a rest many would be read and postponed in
        each pass.
        """
        BatchLine.objects.postpone(line, rest)
        if rest == _LIMITED_REST and line.resume_at is not None:
            self._rest(batch, _REST_S)


def _rest_of_model(
    model: str, caller: Caller, error: ApiError, cause: BaseException | None
) -> dt.timedelta | None:
    """Return how long the lines of a model rest after this refusal; None if it is not the model's.

    A limit that is reached may be that of the model, if the caller has one.
    """
    if error.code in _UNSERVED:
        return _UNSERVED_REST
    if isinstance(cause, BudgetExhausted):
        return _LIMITED_REST if cause.budget.model else None
    has_own_limits = any(one.model == model for one in caller.limits if one.model)
    return _LIMITED_REST if has_own_limits and error.code == RateLimitError.code else None


def _count_slots_of(batch: Batch, model: str) -> None:
    """Have the slots of a line's model bound the lines in the queue if that of the batch has none.

    The batch would be run one line at a time.
    """
    if not _slots_of(batch.model) and _slots_of(model):
        Batch.objects.filter(pk=batch.pk).update(model=model)
        batch.model = model


def _caller_of(batch: Batch) -> Caller | None:
    """Return the caller of a batch; cancel the batch if its key is not valid any more."""
    with release_connection_after():
        caller = caller_of_key(batch.api_key_id)
    if caller is None and batch.status == BatchStatus.IN_PROGRESS:
        logger.warning("batch %s: its key is not valid any more; it is cancelled", batch)
        Batch.objects.cancel(batch)
    return caller


def _ids_in_queue(batch: Batch) -> list[str]:
    lines = BatchLine.objects.filter(batch=batch, state=LineState.RUNNING)
    return [id_ for id_ in lines.values_list("generation_id", flat=True) if id_]


def _alternate(sources: Iterable[Iterable[Batch]]) -> Iterator[Batch]:
    """Yield from each of these in turn, until all have ended."""
    turns = chain.from_iterable(zip_longest(*sources))
    return (batch for batch in turns if batch is not None)
