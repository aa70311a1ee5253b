"""Generation: the queue of record and the usage log, one row for every accepted request."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import BrinIndex
from django.db import connection, models, transaction
from django.db.models import F
from django.db.models.functions import Least, Now
from django.utils import timezone
from psycopg.sql import Literal

from inference_site.core.domain.deltas import Usage
from inference_site.core.domain.model_spec import Price
from inference_site.core.storage.postgresql import (
    execute_prepared,
    execute_with_timeouts,
    release_connection_after,
)


class Status(models.TextChoices):
    """A generation moves forward only: queued → running → one of the terminal states."""

    QUEUED = "queued"  # Accepted and committed; waits for a worker.
    RUNNING = "running"  # Claimed by one worker, which holds a lease.
    COMPLETED = "completed"  # The engine finished its answer, or reached the token limit.
    FAILED = "failed"  # An error ended it; its code is in error_code.
    CANCELLED = "cancelled"  # The client or an operator cancelled it.


TERMINAL = frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED})
INDEXING = {"kind": "vector_store.embedding", "background": True}
"""The columns of generations that index files of vector stores; the limits do not count them."""
IS_INDEXING = f"(kind = '{INDEXING['kind']}' AND background)"


MAX_ATTEMPTS = 3
"""How many attempts a background generation has. If the worker died during the attempt before the
last one, the last one is isolated (see ``requeue``)."""


MAX_SPARED = 10
"""How many attempts of one generation may be spared. A generation whose attempts end from outside
again and again may be the cause after all: the host may have no memory for it."""


class ServiceClass(models.IntegerChoices):
    """Priority in the queue; lower numbers are claimed first."""

    URGENT = -10, "urgent"  # An operator moved it up.
    PRIORITY = -5, "priority"  # The client asked for it, and its key has it.
    FOREGROUND = 0, "foreground"  # A client waits on the connection.
    BACKGROUND = 10, "background"  # No client waits.


OF_WAITING_CLIENTS = (ServiceClass.PRIORITY, ServiceClass.FOREGROUND)
"""The classes whose generations fail when they have waited too long."""


_MAY_BEGIN = """
    waiting.status = 'queued' AND waiting.model = %(model)s::text
    AND waiting.service_class = line.service_class AND waiting.project_id = line.project_id
    AND (waiting.preferred_until IS NULL OR waiting.preferred_worker = %(worker)s::text
         OR waiting.preferred_until <= clock_timestamp())
    AND (waiting.alone_since IS NULL OR %(is_idle)s::bool
         OR %(may_drain)s::bool AND waiting.alone_since <= clock_timestamp() - interval '20 s')
"""
CLAIM = f"""
WITH RECURSIVE line (service_class, project_id, since) AS (
    (SELECT service_class, project_id, created_at FROM generations_generation
     WHERE status = 'queued' AND model = %(model)s::text AND service_class < %(below)s::int
     ORDER BY service_class, project_id, created_at LIMIT 1)
    UNION ALL
    SELECT next.* FROM line, LATERAL (
        SELECT service_class, project_id, created_at FROM generations_generation
        WHERE status = 'queued' AND model = %(model)s::text AND service_class < %(below)s::int
              AND (service_class, project_id) > (line.service_class, line.project_id)
        ORDER BY service_class, project_id, created_at LIMIT 1
    ) next
), share AS MATERIALIZED (
    SELECT project_id, count(*) AS runs FROM generations_generation
    WHERE status = 'running' AND model = %(model)s::text
          AND (SELECT min(project_id) < max(project_id) FROM line)
    GROUP BY project_id
), turns AS MATERIALIZED (
    SELECT line.service_class, line.project_id
    FROM line LEFT JOIN share ON share.project_id = line.project_id
    ORDER BY line.service_class, coalesce(share.runs, 0),
             coalesce(array_position(%(served)s::bigint[], line.project_id::bigint), 0), line.since
)
UPDATE generations_generation SET status = 'running', claimed_at = clock_timestamp(),
       worker = %(worker)s::text, attempt = attempt + 1
WHERE id = (
    SELECT best.id FROM turns line,
    LATERAL (SELECT waiting.id FROM generations_generation waiting WHERE {_MAY_BEGIN}
             ORDER BY waiting.created_at LIMIT 1 FOR UPDATE SKIP LOCKED) best
    LIMIT 1
)
RETURNING public_id, kind, attempt, background, request_id,
          extract(epoch FROM claimed_at - created_at)::float, project_id, alone_since IS NOT NULL,
          EXISTS (SELECT FROM (
              SELECT id FROM generations_generation
              WHERE status = 'queued' AND model = %(model)s::text
              ORDER BY service_class, project_id, created_at LIMIT 2
          ) front WHERE front.id <> generations_generation.id),
          spared, service_class, claimed_at
"""  # noqa: S608  # Constants.
"""The statement of ``GenerationQuerySet.claim``. It reads one row of each project that waits.

``line`` steps through the index ``generation_line``, from the oldest row of one service class and
project to the oldest row of the next. ``share`` counts the running generations of each project,
once, and only if more than one project waits. ``turns`` has the projects in the order in which they
are served. Then rows are tried in that order until one may start and is not locked, so a worker
skips the rows that others are claiming.
"""


@cache
def _finish(columns: tuple[str, ...]) -> str:
    """Return the statement of ``GenerationQuerySet.finish`` that writes these columns."""
    moves = ", ".join(f"{column} = %({column})s" for column in columns)
    return (
        f"UPDATE generations_generation SET {moves} "  # noqa: S608  # Names of columns.
        "WHERE public_id = %(id)s AND status = 'running' AND worker = %(by)s AND attempt = %(nth)s"
    )


_SET_LATER = (
    *("status", "worker", "preferred_until", "alone_since", "cancel_requested_at"),
    *("attempt", "spared", "claimed_at"),
    *("first_token_at", "finished_at", "finish_reason", "error_code", "is_accounted"),
    *("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"),
    *("prefill_ms", "decode_ms", "cost"),
)
"""Columns that have their defaults in a new row."""


@cache
def _insert() -> tuple[str, list[str]]:
    """Return the statement of ``Generation.insert``, and the columns of its parameters."""
    columns = {str(f.column): f for f in Generation._meta.concrete_fields if not f.primary_key}
    given = [name for name in columns if name not in _SET_LATER]
    values = {name: f"%({name})s" for name in given}
    for name in _SET_LATER:
        default = columns[name].get_db_prep_save(columns[name].get_default(), connection)
        values[name] = Literal(default).as_string()
    statement = (
        f"INSERT INTO generations_generation ({', '.join(values)}) "  # noqa: S608  # As above.
        f"VALUES ({', '.join(values.values())}) RETURNING id"
    )
    return statement, given


def usage_columns(usage: Usage, price: Price) -> dict[str, Any]:
    """Return the columns of a generation that have its usage and its cost."""
    return {
        "input_tokens": usage.input_tokens,
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "prefill_ms": usage.prefill_ms,
        "decode_ms": usage.decode_ms,
        "cost": price.cost(usage.input_tokens, usage.cached_tokens, usage.output_tokens),
    }


@dataclass(frozen=True, slots=True)
class Claim:
    """One attempt of one generation, claimed by a worker ``waited_s`` after its acceptance."""

    public_id: str
    kind: str
    attempt: int
    worker: str
    background: bool = False
    request_id: str = ""
    model: str = ""
    waited_s: float = field(default=0.0, compare=False)
    project_id: int = field(default=0, compare=False)
    is_isolated: bool = False
    """Whether it runs alone, because its workers have died and it may be the cause."""
    others_waited: bool = field(default=True, compare=False)
    """Whether other generations of its model waited when it was claimed."""
    spared: int = field(default=0, compare=False)
    """How many of its earlier attempts do not count (see ``Generation.spared``)."""
    service_class: int = field(default=ServiceClass.FOREGROUND, compare=False)
    claimed_at: dt.datetime = field(default_factory=timezone.now, compare=False)
    """By the clock of the database."""
    _began: float = field(default_factory=time.monotonic, compare=False, init=False)

    def now(self) -> dt.datetime:
        """Return the time by the clock of the database, as it has gone on since the claim.

        The worker's own clock may differ from it, and may be set while the generation runs.
        """
        return self.claimed_at + dt.timedelta(seconds=time.monotonic() - self._began)

    @property
    def may_restart(self) -> bool:
        """Whether another attempt may follow, because it is a background generation."""
        return self.background and self.has_attempts_left

    @property
    def has_attempts_left(self) -> bool:
        """Whether its attempts, without the spared ones, are fewer than ``MAX_ATTEMPTS``."""
        return self.attempt - self.spared < MAX_ATTEMPTS

    @property
    def is_last_but_one(self) -> bool:
        """Whether only one more attempt may follow."""
        return self.attempt - self.spared == MAX_ATTEMPTS - 1


class GenerationQuerySet(models.QuerySet["Generation"]):
    """The status changes of a generation; each is a guarded UPDATE, so only one process wins."""

    def claim(
        self,
        model: str,
        worker: str,
        served: Sequence[int] = (),
        *,
        is_idle: bool = True,
        may_drain: bool = True,
        may_background: bool = True,
    ) -> Claim | None:
        """Claim the best waiting generation of this model; None if none may start.

        The order is: service class, then the project with the fewest running generations, then the
        project that is not in ``served``, or first in it, then age. ``served`` are the projects of
        the worker's last claims, the latest at the end. A generation that prefers another worker is
        left to that one until ``preferred_until``. An isolated one is left to an idle worker for
        20 s; then a busy worker may claim it that ``may_drain`` its other runs for it. Without
        ``may_background``, only those are claimed that clients wait for. Two workers never claim
        the same row, and neither waits for the other.
        """
        given = {"model": model, "worker": worker, "is_idle": is_idle, "may_drain": may_drain}
        given["below"] = ServiceClass.BACKGROUND + may_background
        projects = f"{{{','.join(map(str, served))}}}"
        with release_connection_after():
            row = execute_prepared(CLAIM, {**given, "served": projects}).fetchone()
        if row is None:
            return None
        public_id, kind, attempt, background, request_id, waited_s, *rest = row
        known = (public_id, kind, attempt, worker, background, request_id, model)
        return Claim(*known, max(0.0, waited_s), *rest)

    def finish(self, claim: Claim, status: Status, **result: Any) -> bool:
        """Move a claimed generation to a terminal status; False if the claim no longer holds.

        Does not wait long for a locked row (see ``transaction_with_timeouts``).
        """
        moved = {"status": status.value, "finished_at": claim.now(), **result}
        held = {"id": claim.public_id, "by": claim.worker, "nth": claim.attempt}
        with release_connection_after():
            return execute_with_timeouts(_finish(tuple(moved)), {**moved, **held}).rowcount == 1

    def requeue(
        self,
        public_id: str,
        worker: str,
        attempt: int,
        *,
        isolated: bool = False,
        spared: bool = False,
    ) -> bool:
        """Put it back into the queue; False if this attempt no longer runs.

        ``isolated``: all later attempts run alone. ``spared``: this attempt was ended from outside
        and does not count, unless ``MAX_SPARED`` attempts are spared already.
        """
        held = self.running_attempt(public_id, worker, attempt)
        # By the clock of the database, with which ``claim`` compares it.
        changes: dict[str, Any] = {"alone_since": Now()} if isolated else {}
        if spared:
            changes["spared"] = Least(F("spared") + 1, MAX_SPARED)
        with release_connection_after():
            return bool(held.update(status=Status.QUEUED, worker="", claimed_at=None, **changes))

    def running_attempt(self, public_id: str, worker: str, attempt: int) -> GenerationQuerySet:
        """Return the row if this attempt runs; an earlier one may not know that it was lost."""
        return self.filter(
            public_id=public_id, status=Status.RUNNING, worker=worker, attempt=attempt
        )

    def has_ended(self, claim: Claim, status: Status) -> bool:
        """Whether ``finish`` of this attempt succeeded, though its reply was lost."""
        ours = self.filter(public_id=claim.public_id, worker=claim.worker, attempt=claim.attempt)
        with release_connection_after():
            return ours.filter(status=status).exists()

    def cancel_queued(self, public_ids: Collection[str]) -> list[str]:
        """Cancel those that no worker has claimed; return their ids."""
        with transaction.atomic():
            waiting = self.filter(public_id__in=public_ids, status=Status.QUEUED)
            ids = list(waiting.select_for_update().values_list("public_id", flat=True))
            self.filter(public_id__in=ids).update(
                status=Status.CANCELLED, finished_at=timezone.now()
            )
        return ids

    def note_cancel(self, public_ids: Collection[str]) -> None:
        """Record the cancel of the background generations among these that have not ended."""
        going_on = self.filter(public_id__in=public_ids, background=True, finished_at=None)
        going_on.filter(cancel_requested_at=None).update(cancel_requested_at=Now())

    def fail_running(self, public_id: str, worker: str, attempt: int, error_code: str) -> bool:
        """Fail an attempt in place of its worker; False if it no longer runs."""
        held = self.running_attempt(public_id, worker, attempt)
        return bool(
            held.update(status=Status.FAILED, finished_at=timezone.now(), error_code=error_code)
        )

    def cancel_running(self, public_id: str, worker: str, attempt: int) -> bool:
        """Cancel an attempt in place of its worker; False if it no longer runs."""
        held = self.running_attempt(public_id, worker, attempt)
        return bool(held.update(status=Status.CANCELLED, finished_at=timezone.now()))

    def expire_queued(self, public_id: str, error_code: str) -> bool:
        """Fail a generation that waited too long; False if it no longer waits."""
        waiting = self.filter(public_id=public_id, status=Status.QUEUED)
        return bool(
            waiting.update(status=Status.FAILED, finished_at=timezone.now(), error_code=error_code)
        )


class Generation(models.Model):
    """One run of a model for one request. Has no content, only counts and times.

    ``public_id`` is the id that clients see (``chatcmpl-…``). Token counts: cached ⊂ input,
    reasoning ⊂ output. The row is updated at every status change and never deleted by the API.
    """

    public_id = models.CharField("ID", max_length=64, unique=True)
    kind = models.CharField(max_length=32)
    # No database constraint: a check of two parents for every request would cost more than it
    # protects, since projects and keys are never deleted (they are deactivated and revoked).
    project = models.ForeignKey(
        "accounts.Project", on_delete=models.DO_NOTHING, db_constraint=False, db_index=False
    )
    api_key = models.ForeignKey(
        "accounts.ApiKey", on_delete=models.DO_NOTHING, db_constraint=False, db_index=False
    )
    model = models.CharField(max_length=200)
    request_id = models.CharField(max_length=128)
    # Of OpenTelemetry; empty without tracing.
    trace_id = models.CharField(max_length=32, blank=True, default="", db_default="")
    service_class = models.SmallIntegerField(
        choices=ServiceClass.choices, default=ServiceClass.FOREGROUND
    )
    streamed = models.BooleanField(default=False)
    # It continues without its client, and after the death of its worker.
    background = models.BooleanField(default=False)
    end_user = models.CharField(max_length=512, blank=True, default="")
    # ``key=value`` of those metadata of the request by which the site counts usage.
    tags = ArrayField(models.TextField(), default=list, db_default=[], blank=True)
    ignored_params = ArrayField(models.CharField(max_length=64), default=list, blank=True)

    status = models.CharField(max_length=16, choices=Status.choices, default=Status.QUEUED)
    worker = models.CharField(max_length=128, blank=True)
    # The worker that has its prefix in memory, and until when no other worker may claim it.
    preferred_worker = models.CharField(max_length=128, blank=True, default="")
    preferred_until = models.DateTimeField(null=True, blank=True)
    # Since when it is isolated: its workers have died, and it runs alone.
    alone_since = models.DateTimeField(null=True, blank=True)
    # When it was cancelled while it ran in the background: Redis may lose its cancel flag.
    cancel_requested_at = models.DateTimeField(null=True, blank=True)
    attempt = models.PositiveSmallIntegerField(default=0)
    # How many of its attempts were ended from outside and do not count.
    spared = models.PositiveSmallIntegerField(default=0, db_default=0)
    created_at = models.DateTimeField(default=timezone.now)
    # From the arrival of its HTTP request to ``created_at``; null if it had none.
    admission_ms = models.FloatField(null=True, blank=True)
    claimed_at = models.DateTimeField(null=True, blank=True)
    first_token_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)

    input_tokens = models.PositiveIntegerField(default=0)
    cached_tokens = models.PositiveIntegerField(default=0)
    output_tokens = models.PositiveIntegerField(default=0)
    reasoning_tokens = models.PositiveIntegerField(default=0)
    prefill_ms = models.FloatField(default=0)
    decode_ms = models.FloatField(default=0)
    # In the currency of the catalogue's prices, at the prices at its end.
    cost = models.DecimalField(max_digits=18, decimal_places=9, default=0)
    # The amounts that its budgets reserve until it is accounted.
    reserved_tokens = models.PositiveBigIntegerField(default=0)
    reserved_cost = models.DecimalField(max_digits=18, decimal_places=9, default=0)
    # Whether the roll-ups and budgets include it; only ended generations are accounted.
    is_accounted = models.BooleanField(default=False)
    finish_reason = models.CharField(max_length=32, blank=True)
    error_code = models.CharField(max_length=64, blank=True)

    objects = GenerationQuerySet.as_manager()

    class Meta:
        indexes = [
            models.Index(
                fields=["model", "service_class", "project", "created_at"],
                condition=models.Q(status=Status.QUEUED),
                name="generation_line",
            ),
            models.Index(
                fields=["model", "project"],
                condition=models.Q(status=Status.RUNNING),
                name="generation_running",
            ),
            models.Index(
                fields=["project", "api_key"],
                # As ``status IN ('queued', 'running')``, but PostgreSQL never uses it for a claim.
                condition=models.Q(finished_at=None),
                name="generation_unfinished",
            ),
            models.Index(
                fields=["cancel_requested_at"],
                condition=models.Q(finished_at=None, cancel_requested_at__isnull=False),
                name="generation_to_stop",
            ),
            models.Index(
                fields=["id"],
                condition=models.Q(is_accounted=False, status__in=sorted(TERMINAL)),
                name="generation_unaccounted",
            ),
            models.Index(fields=["project", "-id"], name="generation_by_project"),
            models.Index(fields=["api_key", "-id"], name="generation_by_key"),
            models.Index(fields=["model", "-id"], name="generation_by_model"),
            models.Index(fields=["status", "-id"], name="generation_by_status"),
            models.Index(fields=["request_id"], name="generation_by_request"),
            models.Index(
                fields=["end_user", "-id"],
                condition=~models.Q(end_user=""),
                name="generation_by_end_user",
            ),
            # Rows are stored in the order of time, so a few pages of it locate a time.
            BrinIndex(fields=["created_at"], autosummarize=True, name="generation_by_time"),
        ]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(status__in=Status.values), name="generation_status_known"
            ),
            models.CheckConstraint(
                condition=models.Q(status__in=sorted(TERMINAL), finished_at__isnull=False)
                | (~models.Q(status__in=sorted(TERMINAL)) & models.Q(finished_at__isnull=True)),
                name="generation_finished_iff_terminal",
            ),
            models.CheckConstraint(
                condition=models.Q(cached_tokens__lte=models.F("input_tokens"))
                & models.Q(reasoning_tokens__lte=models.F("output_tokens")),
                name="generation_token_parts",
            ),
        ]

    def __str__(self) -> str:
        return self.public_id

    def insert(self) -> None:
        """Insert a queued row, like ``save(force_insert=True)`` but with a prepared statement."""
        if self.preferred_until is not None:  # An expression of the database's clock.
            self.save(force_insert=True)
            return
        statement, columns = _insert()
        values = {column: getattr(self, column) for column in columns}
        row = execute_prepared(statement, values).fetchone()
        assert row is not None
        (self.pk,) = row
        self._state.adding = False

    @property
    def queue_ms(self) -> float | None:
        """Milliseconds from acceptance to the start of the run."""
        return _milliseconds(self.created_at, self.claimed_at)

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token: milliseconds from acceptance to the first delta."""
        return _milliseconds(self.created_at, self.first_token_at)

    @property
    def duration_ms(self) -> float | None:
        """Milliseconds from acceptance to the end."""
        return _milliseconds(self.created_at, self.finished_at)

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens per second after the first; None for fewer than two tokens."""
        decode_ms = _milliseconds(self.first_token_at, self.finished_at)
        if not decode_ms or self.output_tokens < 2:
            return None
        return (self.output_tokens - 1) / (decode_ms / 1000)


def _milliseconds(start: dt.datetime | None, end: dt.datetime | None) -> float | None:
    return None if start is None or end is None else (end - start).total_seconds() * 1000
