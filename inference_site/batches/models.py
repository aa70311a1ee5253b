"""Batch and BatchLine: a file of requests, and each of its lines until the results are written.

A batch:  validating → in_progress → finalizing → completed or expired
          validating → failed
          validating or in_progress → cancelling → cancelled
A line:   pending → running → ended; back to pending if its run was lost or refused for now

A line becomes ``running`` in the transaction that commits its generation, and ``ended`` in the one
that commits the end of that generation, so whatever dies, no line is run for nothing or answered
twice. Each change is an UPDATE that is guarded by the old state. The lines are deleted once the
files of the results are stored.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from typing import Any

from django.db import connection, models, transaction
from django.db.models import Count, Exists, F, OuterRef, Q, Sum
from django.db.models.functions import Now
from django.utils import timezone

from inference_site.accounts.models import retention_cutoffs
from inference_site.core.errors.api_errors import NotFoundError, RateLimitError
from inference_site.core.storage.fields import ContentField
from inference_site.core.storage.postgresql import execute_prepared
from inference_site.core.storage.waits import is_over
from inference_site.outbox.models import publish
from inference_site.runs.models import Generation, Status
from inference_site.runs.streams.batches import Ending

OPENAI, ANTHROPIC = "openai", "anthropic"
"""The dialects of batches."""
MAX_FEEDS = 3
"""How often a line is put into the queue: again after a fault of the site, such as a lost worker.
Each time it has the attempts of any background generation."""
_FAULT_STATUS = 503
"""From this status on, the site was at fault, and not the request or its model."""
_RATE_LIMITED = 429
"""The model's server accepts no more requests now."""
_REST = dt.timedelta(seconds=5)
"""Before a line whose run was lost, or that was refused for now, is put into the queue again."""
_LONGEST_REST = dt.timedelta(minutes=10)
"""What the rest grows to, doubled with each refusal; a server may ask for more."""
_MOST_FEEDS_HOLDING_UP = 3
"""A line that was in the queue more often, and is refused again, may never be accepted."""
_LOCKED_REST = dt.timedelta(seconds=1)
"""Before a line whose conversation is in use is tried again."""
_DELETED_AT_ONCE = 1_000
_BEGIN = """
UPDATE batches_batchline SET state = 'running', generation_id = %(generation)s, feeds = feeds + 1
WHERE id = %(line)s AND state = 'pending' AND EXISTS (
    SELECT FROM batches_batch WHERE id = %(batch)s AND status = 'in_progress' FOR SHARE
)
"""
"""The batch stays in progress until the transaction ends: whoever cancels it sees this line."""
_DELIVER = """
UPDATE batches_batchline SET state = 'ended', status_code = %(status)s, answer = %(answer)s,
       error_code = %(error)s, cost = cost + %(cost)s, ended_at = clock_timestamp()
WHERE generation_id = %(generation)s AND state = 'running'
"""
_LOCK_BATCHES = f"SELECT pg_advisory_xact_lock({0x62617463}, %s)"


class BatchStatus(models.TextChoices):
    """Status of a batch (API reference, "Batch")."""

    VALIDATING = "validating"  # Its lines are being read; nothing runs yet.
    FAILED = "failed"  # A line is invalid, so nothing has run.
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"  # No line runs any more; the results are being written.
    COMPLETED = "completed"
    EXPIRED = "expired"  # Its window was over; the lines that had ended are in the results.
    CANCELLING = "cancelling"  # The lines that run go on to their end; no other begins.
    CANCELLED = "cancelled"


ENDED = frozenset(
    {BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED}
)


def _no_batch(public_id: str) -> NotFoundError:
    return NotFoundError(f"No such batch: {public_id[:100]}", param="batch_id")


class BatchQuerySet(models.QuerySet["Batch"]):
    """Queries and status changes of batches."""

    def of(self, project_id: int, dialect: str) -> BatchQuerySet:
        """Return the batches of a project that were made by one API."""
        return self.filter(project_id=project_id, dialect=dialect)

    def get_of(self, project_id: int, dialect: str, public_id: str) -> Batch:
        """Return a batch. Raise NotFoundError for an unknown one and another project's."""
        found = self.of(project_id, dialect).filter(public_id=public_id).first()
        if found is None:
            raise _no_batch(public_id)
        return found

    def open(self) -> BatchQuerySet:
        """Return the batches that have not ended."""
        return self.exclude(status__in=ENDED)

    def accept(self, batch: Batch, most_open: int) -> None:
        """Insert a new batch, in the caller's transaction.

        Raise RateLimitError if the project has ``most_open`` batches that have not ended. Batches
        of one project are counted one at a time.
        """
        with connection.cursor() as cursor:
            cursor.execute(_LOCK_BATCHES, [batch.project_id % 2147483647])
        open_ = self.open().filter(project_id=batch.project_id).count()
        if open_ >= most_open:
            raise RateLimitError(
                f"The project has {open_} batches that have not ended; it may have {most_open}.",
                code="too_many_batches",
                retry_after_s=60,
            )
        batch.save(force_insert=True)

    def move(self, batch: Batch, status: BatchStatus, **changes: Any) -> bool:
        """Move a batch on from the status with which it was read.

        False if that has changed, or another process has worked on it since. Its end is an event
        for the endpoints of its project.
        """
        times = {**batch.times, status.value: int(time.time())}
        held = self.filter(pk=batch.pk, status=batch.status, worked_by=batch.worked_by)
        # The next step may be the work of another process.
        with transaction.atomic():
            if not held.update(status=status, times=times, worked_until=None, **changes):
                return False
            if status in ENDED:
                data = {"id": batch.public_id}
                publish(batch.project_id, f"batch.{status}", batch.public_id, data)
        batch.status, batch.times = status, times
        for name, value in changes.items():
            setattr(batch, name, value)
        return True

    def hold(self, batch: Batch, process: str, seconds: float) -> bool:
        """Reserve a batch for the work of one process.

        False if another one has it, or has moved it on.
        """
        hold = dt.timedelta(seconds=seconds)
        free = Q(worked_by=process) | is_over("worked_until", hold)
        held = self.filter(free, pk=batch.pk, status=batch.status)
        if not held.update(worked_by=process, worked_until=Now() + hold):
            return False
        batch.worked_by = process
        return True

    def with_all_lines_ended(self) -> BatchQuerySet:
        """Return the batches in progress none of whose lines waits or runs."""
        left = BatchLine.objects.filter(
            batch=OuterRef("pk"), state__in=(LineState.PENDING, LineState.RUNNING)
        )
        return self.filter(~Exists(left), status=BatchStatus.IN_PROGRESS)

    def note_progress(self, batch: Batch, rate: float) -> None:
        """Write the counts of the lines that have ended so far."""
        counts = BatchLine.objects.filter(batch=batch, state=LineState.ENDED).aggregate(
            completed=Count("pk", filter=Q(status_code__lt=400)),
            failed=Count("pk", filter=Q(status_code__gte=400)),
            cost=Sum("cost", default=Decimal(0)),
        )
        going_on = self.filter(pk=batch.pk, status=BatchStatus.IN_PROGRESS)
        going_on.update(rate=rate, **counts)

    def cancel(self, batch: Batch) -> None:
        """Cancel a batch; one that has ended, is being finalized or cancelled stays as it is.

        Raise NotFoundError for one that has ended and was deleted since it was read.
        """
        while batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            if self.move(batch, BatchStatus.CANCELLING, ends_as=BatchStatus.CANCELLED):
                return
            try:
                batch.refresh_from_db()
            except Batch.DoesNotExist as exc:
                raise _no_batch(batch.public_id) from exc


class Batch(models.Model):
    """A batch. ``dialect`` is the API that made it; Anthropic's have no input file.

    ``times`` has the Unix time at which each status was reached. ``ends_as`` is the status that
    follows when the results are written. ``errors`` are those of invalid lines, as the API shows
    them. ``failures`` counts the failed lines by error code, once the batch has ended. Of the lines
    that run, the counts, ``rate`` (lines per second) and ``cost`` are those of a
    moment ago; at the end they are exact. ``worked_by`` is the process that validates the batch or
    writes its results, until ``worked_until``.
    """

    public_id = models.CharField("ID", max_length=64, unique=True)
    project = models.ForeignKey("accounts.Project", on_delete=models.PROTECT, db_index=False)
    api_key = models.ForeignKey("accounts.ApiKey", on_delete=models.PROTECT, db_index=False)
    dialect = models.CharField(max_length=16, default=OPENAI)
    endpoint = models.CharField(max_length=64)
    model = models.CharField(max_length=200, blank=True, default="")
    input_file_id = models.CharField("input file", max_length=64, blank=True, default="")
    output_file_id = models.CharField("output file", max_length=64, blank=True, default="")
    error_file_id = models.CharField("error file", max_length=64, blank=True, default="")
    output_lifetime_s = models.PositiveIntegerField(null=True, blank=True)
    metadata = ContentField(default=dict, blank=True)
    window_s = models.PositiveIntegerField()
    status = models.CharField(
        max_length=16, choices=BatchStatus.choices, default=BatchStatus.VALIDATING
    )
    ends_as = models.CharField(
        max_length=16, choices=BatchStatus.choices, default=BatchStatus.COMPLETED, editable=False
    )
    times = models.JSONField(default=dict, blank=True)
    errors = ContentField(default=list, blank=True)
    total = models.PositiveIntegerField(default=0)
    completed = models.PositiveIntegerField(default=0)
    failed = models.PositiveIntegerField(default=0)
    skipped = models.PositiveIntegerField(default=0)
    failures = models.JSONField(default=dict, blank=True)
    usage = models.JSONField(null=True, blank=True)
    cost = models.DecimalField(max_digits=18, decimal_places=9, default=0)
    rate = models.FloatField(default=0)
    worked_by = models.CharField(max_length=32, blank=True, default="", editable=False)
    worked_until = models.DateTimeField(null=True, editable=False)
    # What all of its lines would cost if each answer were as long as it may be.
    most_cost = models.DecimalField(max_digits=18, decimal_places=9, default=0)
    created_at = models.DateTimeField(default=timezone.now)
    expires_at = models.DateTimeField()

    objects = BatchQuerySet.as_manager()

    class Meta:
        verbose_name_plural = "batches"
        indexes = [
            models.Index(fields=["project", "-id"], name="batch_by_project"),
            models.Index(
                fields=["project"], condition=~Q(status__in=sorted(ENDED)), name="batch_open"
            ),
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(status__in=BatchStatus.values), name="batch_status_known"
            )
        ]

    def __str__(self) -> str:
        return self.public_id

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def time_of(self, status: BatchStatus) -> int | None:
        """Return the Unix time at which the batch reached a status; None if it has not."""
        reached: int | None = self.times.get(status.value)
        return reached

    def request_id(self, number: int) -> str:
        """Return the id of the request of a line, which logs and results have."""
        return f"batch_req_{self.public_id.rpartition('_')[2]}_{number}"


class LineState(models.TextChoices):
    """Where a line is."""

    PENDING = "pending"  # Not in the queue.
    RUNNING = "running"  # Its generation is in the queue, or runs.
    ENDED = "ended"  # Its answer or error is stored.


class LineQuerySet(models.QuerySet["BatchLine"]):
    """The state changes of lines."""

    def begin(self, line: BatchLine, generation_id: str) -> bool:
        """Record that a line is put into the queue, in the transaction of its generation's row.

        False if it was meanwhile, or its batch does not run lines any more.
        """
        given = {"line": line.pk, "batch": line.batch_id, "generation": generation_id}
        return execute_prepared(_BEGIN, given).rowcount == 1

    def end(self, line: BatchLine, status_code: int, answer: bytes, error_code: str) -> bool:
        """Store the answer of a line that could not be put into the queue."""
        waiting = self.filter(pk=line.pk, state=LineState.PENDING)
        return bool(
            waiting.update(
                state=LineState.ENDED,
                status_code=status_code,
                answer=answer.decode(),
                error_code=error_code,
                ended_at=Now(),
            )
        )

    def held_up(self, batches: Collection[Batch]) -> set[int]:
        """Return the keys of those batches of which no line should be put into the queue.

        Their servers refuse lines for now. A line that is refused again and again does not hold up
        the others.
        """
        refused = self.filter(batch__in=batches, state=LineState.PENDING, status_code=_RATE_LIMITED)
        held = refused.filter(resume_at__gt=Now(), feeds__lte=_MOST_FEEDS_HOLDING_UP)
        return set(held.values_list("batch", flat=True).distinct())

    def postpone(self, line: BatchLine, rest: dt.timedelta = _LOCKED_REST) -> None:
        """Leave a line out of the queue that cannot run yet, though others can: for a moment if its
        conversation is in use.
        """
        waiting = self.filter(pk=line.pk, state=LineState.PENDING)
        waiting.update(resume_at=Now() + min(rest, _LONGEST_REST))

    def failures(self) -> dict[str, int]:
        """Count the lines that have failed, by error code."""
        failed = self.filter(state=LineState.ENDED, status_code__gte=400).order_by()
        return dict(failed.values_list("error_code").annotate(Count("pk")))

    def release_lost(self) -> None:
        """Release the lines of generations that have ended without an answer for them.

        Such a generation was ended in place of its worker, or its request was lost.
        """
        ids = list(self.filter(state=LineState.RUNNING).values_list("generation_id", flat=True))
        ended = Generation.objects.filter(public_id__in=ids).exclude(finished_at=None)
        for public_id, status, cost in ended.values_list("public_id", "status", "cost"):
            code = "cancelled" if status == Status.CANCELLED else "worker_lost"
            lost = Ending((), 503, b"", error_code=code)
            deliver(public_id, Status(status), lost, cost)


class BatchLine(models.Model):
    """One line. ``request`` is the body of its request, ``answer`` that of its answer, as JSON.

    The request is sealed for the project, because it may hold credentials of an MCP server.
    ``feeds`` counts how often it was put into the queue; it is not before ``resume_at``. A pending
    line has the ``status_code`` 429 if its server has refused it for now.
    """

    batch = models.ForeignKey(Batch, on_delete=models.CASCADE, related_name="lines", db_index=False)
    number = models.PositiveIntegerField()
    custom_id = models.CharField(max_length=512)
    request = models.TextField()
    state = models.CharField(max_length=8, choices=LineState.choices, default=LineState.PENDING)
    generation_id = models.CharField("generation", max_length=64, null=True)  # noqa: DJ001
    feeds = models.PositiveSmallIntegerField(default=0)
    resume_at = models.DateTimeField(null=True)
    status_code = models.PositiveSmallIntegerField(null=True)
    answer = models.TextField(blank=True, default="")
    error_code = models.CharField(max_length=64, blank=True, default="")
    cost = models.DecimalField(max_digits=18, decimal_places=9, default=0)
    ended_at = models.DateTimeField(null=True)

    objects = LineQuerySet.as_manager()

    class Meta:
        default_permissions = ()  # The page of the batch shows them.
        indexes = [
            models.Index(
                fields=["batch", "state", "status_code"], include=["cost"], name="batch_line_counts"
            ),
            models.Index(
                fields=["batch", "number"],
                condition=Q(state=LineState.PENDING),
                name="batch_line_pending",
            ),
            models.Index(
                fields=["batch"], condition=Q(state=LineState.RUNNING), name="batch_line_running"
            ),
        ]
        constraints = [
            models.UniqueConstraint(fields=["batch", "number"], name="batch_line_number"),
            models.UniqueConstraint(fields=["generation_id"], name="batch_line_generation"),
        ]

    def __str__(self) -> str:
        return f"{self.batch_id}:{self.number}"


def deliver(generation_id: str, status: Status, ending: Ending, cost: Decimal) -> None:
    """Store the answer of a line, in the transaction that ends its generation.

    After a fault of the site, the line is put into the queue again, up to ``MAX_FEEDS`` times in
    all; after a refusal of the model's server for now, until its batch expires. A line whose batch
    is being cancelled or has expired has no answer if it was cancelled.
    """
    rows = BatchLine.objects.filter(generation_id=generation_id, state=LineState.RUNNING)
    again, rest, refusal = rows.none(), _REST, None
    if status == Status.CANCELLED:
        again = rows.exclude(batch__status=BatchStatus.IN_PROGRESS)
    elif ending.status == _RATE_LIMITED:
        again, refusal = rows, _RATE_LIMITED
        feeds = rows.values_list("feeds", flat=True).first() or 1
        asked = dt.timedelta(seconds=ending.retry_after_s or 0)
        rest = max(asked, min(_LONGEST_REST, _REST * 2 ** min(feeds - 1, 10)))
    elif ending.status >= _FAULT_STATUS:
        again = rows.filter(Q(feeds__lt=MAX_FEEDS) | Q(status_code=_RATE_LIMITED))
    released = {
        "state": LineState.PENDING,
        "generation_id": None,
        "resume_at": Now() + rest,
        "status_code": refusal,
    }
    if not again.update(**released, cost=F("cost") + cost):
        given = {
            "generation": generation_id,
            "status": ending.status,
            "answer": ending.body.decode(),
            "error": ending.error_code,
            "cost": cost,
        }
        execute_prepared(_DELIVER, given)


def delete_rows(rows: models.QuerySet[Any], until: float) -> int:
    """Delete rows until the monotonic clock passes ``until``, some of them in any case.

    Return how many.
    """
    deleted = 0
    while True:
        some = list(rows.order_by("pk").values_list("pk", flat=True)[:_DELETED_AT_ONCE])
        deleted += int(rows.model._default_manager.filter(pk__in=some).delete()[0])
        if len(some) < _DELETED_AT_ONCE or time.monotonic() >= until:
            return deleted


def prune(until: float) -> int:
    """Delete the lines of ended batches, and batches past their retention; return how many.

    Stop when the monotonic clock passes ``until``. What was found by then is deleted: if that alone
    takes all of the time, nothing would ever be deleted.
    """
    deleted = 0
    # By batch: in the order of all lines, those of the batches that go on would be read each time.
    lines = BatchLine.objects.filter(batch=OuterRef("pk"))
    for batch in Batch.objects.filter(Exists(lines), status__in=ENDED).order_by("pk"):
        deleted += delete_rows(BatchLine.objects.filter(batch=batch), until)
        if time.monotonic() >= until:
            break
    for project, since in retention_cutoffs("batches_days", until):
        # From the end of the window: its files, made before that, are not kept longer.
        rows = Batch.objects.filter(project=project, status__in=ENDED, expires_at__lt=since)
        deleted += delete_rows(rows.filter(lines=None), until)
    return deleted


def forget(
    end_user: str, project_id: int | None, generation_ids: Sequence[str]
) -> Mapping[str, int]:
    """Delete the requests and answers of an end user's lines that are not in the results yet."""
    ended = BatchLine.objects.filter(state=LineState.ENDED, generation_id__in=generation_ids)
    lines = ended.exclude(request="")
    return {"batch lines": lines.update(request="", answer="", error_code="forgotten")}
