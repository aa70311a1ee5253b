"""Generation: the queue of record and the usage log, one row for every accepted request."""

from __future__ import annotations

import datetime as dt
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

from inference_site.storage.postgresql import (
    execute_prepared,
    execute_with_timeouts,
    release_connection_after,
)


class Status(models.TextChoices):
    """A generation moves forward only: queued → running → one of the terminal states."""

    QUEUED = "queued"  # Accepted and committed; waits for a worker.
    RUNNING = "running"  # Claimed by one worker, which holds a lease.
    COMPLETED = "completed"  # The engine reached its end, by itself or by the token limit.
    FAILED = "failed"  # An error ended it; error_code says which.
    CANCELLED = "cancelled"  # The client or an operator stopped it.


TERMINAL = frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED})


MAX_ATTEMPTS = 3
"""How often a generation in the background is begun before it is given up. If the worker of the
attempt before has died, the last one is isolated (see ``requeue``)."""


MOST_SPARED = 10
"""How many attempts of one generation are spared: what is ended from outside again and again may be
the cause after all, as one is that the host has no memory for."""


class ServiceClass(models.IntegerChoices):
    """Who goes first in the queue; the lower number does."""

    URGENT = -10, "urgent"  # An operator has moved it up.
    FOREGROUND = 0, "foreground"  # Somebody waits on the connection.
    BACKGROUND = 10, "background"  # Nobody waits.


ONE_RUN_A_KEY = "generation_one_run_a_key"
"""The constraint by which a request with an idempotency key has one run, unless that failed."""

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
     WHERE status = 'queued' AND model = %(model)s::text
     ORDER BY service_class, project_id, created_at LIMIT 1)
    UNION ALL
    SELECT next.* FROM line, LATERAL (
        SELECT service_class, project_id, created_at FROM generations_generation
        WHERE status = 'queued' AND model = %(model)s::text
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
          spared
"""  # noqa: S608  # Constants.
"""The statement of ``GenerationQuerySet.claim``: it reads a row of each project, however many wait.

``line`` steps through the index ``generation_line`` from the oldest row of one service class and
project to that of the next. ``share`` counts what runs, once, and only where more than one project
waits. ``turns`` has the projects in the order in which they are served. Then rows are tried in that
order until one may begin and is not locked: a claimer passes over what others are taking.
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
"""Columns that a new row has the defaults of."""


@cache
def _insert() -> tuple[str, list[str]]:
    """Return the statement of ``Generation.insert``, and the columns whose values it is given."""
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


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's hold on one attempt of one generation, ``waited_s`` after its acceptance."""

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
    """Its workers have died before: it may be the cause, so it begins with nothing beside it."""
    others_waited: bool = field(default=True, compare=False)
    """Whether more of its model waited when it was claimed."""
    spared: int = field(default=0, compare=False)
    """How many attempts before this one do not count (see ``Generation.spared``)."""

    @property
    def may_restart(self) -> bool:
        """Whether it may be begun anew."""
        return self.background and self.has_attempts_left

    @property
    def has_attempts_left(self) -> bool:
        """Whether it has been begun fewer times than it may be."""
        return self.attempt - self.spared < MAX_ATTEMPTS

    @property
    def is_last_but_one(self) -> bool:
        """Whether it may be begun anew once more only."""
        return self.attempt - self.spared == MAX_ATTEMPTS - 1


class GenerationQuerySet(models.QuerySet["Generation"]):
    """The moves of a generation; each is a guarded UPDATE, so that only one mover wins."""

    def claim(
        self,
        model: str,
        worker: str,
        served: Sequence[int] = (),
        *,
        is_idle: bool = True,
        may_drain: bool = True,
    ) -> Claim | None:
        """Take the best waiting generation of this model, or None when none waits.

        Best: service class, then the project with the fewest running, then the one that is not
        among the projects ``served`` last, or first of them, then age. One that prefers another
        worker is left to that until its time. An isolated one is left to a worker that is idle,
        for 20 s; then a busy worker takes it that ``may_drain`` its other runs for it. Two workers
        never take the same row, and none waits for the other.
        """
        given = {"model": model, "worker": worker, "is_idle": is_idle, "may_drain": may_drain}
        projects = f"{{{','.join(map(str, served))}}}"
        with release_connection_after():
            row = execute_prepared(CLAIM, {**given, "served": projects}).fetchone()
        if row is None:
            return None
        public_id, kind, attempt, background, request_id, waited_s, *rest = row
        known = (public_id, kind, attempt, worker, background, request_id, model)
        return Claim(*known, max(0.0, waited_s), *rest)

    def finish(self, claim: Claim, status: Status, **result: Any) -> bool:
        """Move a claimed generation to a terminal state; False if somebody else already did.

        It does not wait long for the row (see ``transaction_with_timeouts``).
        """
        moved = {"status": status.value, "finished_at": timezone.now(), **result}
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
        """Have it begun anew; False if this attempt does not run any more.

        ``isolated``: with nothing beside it, now and whenever it is begun again. ``spared``: this
        attempt was ended from outside and does not count, unless ``MOST_SPARED`` were already.
        """
        held = self._held(public_id, worker, attempt)
        changes: dict[str, Any] = {"alone_since": timezone.now()} if isolated else {}
        if spared:
            changes["spared"] = Least(F("spared") + 1, MOST_SPARED)
        with release_connection_after():
            return bool(held.update(status=Status.QUEUED, worker="", claimed_at=None, **changes))

    def _held(self, public_id: str, worker: str, attempt: int) -> GenerationQuerySet:
        """Return the row while this attempt runs: an earlier one may not know that it was lost."""
        return self.filter(
            public_id=public_id, status=Status.RUNNING, worker=worker, attempt=attempt
        )

    def has_ended(self, claim: Claim, status: Status) -> bool:
        """Whether this attempt has this end already: its ``finish`` won, the reply was lost."""
        ours = self.filter(public_id=claim.public_id, worker=claim.worker, attempt=claim.attempt)
        with release_connection_after():
            return ours.filter(status=status).exists()

    def cancel_queued(self, public_ids: Collection[str]) -> list[str]:
        """Cancel those that nobody has claimed; return their ids."""
        with transaction.atomic():
            waiting = self.filter(public_id__in=public_ids, status=Status.QUEUED)
            ids = list(waiting.select_for_update().values_list("public_id", flat=True))
            self.filter(public_id__in=ids).update(
                status=Status.CANCELLED, finished_at=timezone.now()
            )
        return ids

    def note_cancel(self, public_ids: Collection[str]) -> None:
        """Keep that those of these that are in the background and have not ended are to stop."""
        going_on = self.filter(public_id__in=public_ids, background=True, finished_at=None)
        going_on.filter(cancel_requested_at=None).update(cancel_requested_at=Now())

    def fail_abandoned(self, public_id: str, worker: str, attempt: int, error_code: str) -> bool:
        """Fail an attempt whose worker is gone; False if it does not run any more."""
        held = self._held(public_id, worker, attempt)
        return bool(
            held.update(status=Status.FAILED, finished_at=timezone.now(), error_code=error_code)
        )

    def cancel_abandoned(self, public_id: str, worker: str, attempt: int) -> bool:
        """Cancel an attempt whose worker is gone; False if it does not run any more."""
        held = self._held(public_id, worker, attempt)
        return bool(held.update(status=Status.CANCELLED, finished_at=timezone.now()))

    def expire_queued(self, public_id: str, error_code: str) -> bool:
        """Fail a generation that waited too long; False if a worker has claimed it meanwhile."""
        waiting = self.filter(public_id=public_id, status=Status.QUEUED)
        return bool(
            waiting.update(status=Status.FAILED, finished_at=timezone.now(), error_code=error_code)
        )


class Generation(models.Model):
    """One run of a model for one request. Holds no content, only what is counted and timed.

    ``public_id`` is the id clients see (``chatcmpl-…``). Token counts: cached ⊂ input,
    reasoning ⊂ output. It is written at every step of its life and never deleted by the API.
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
    service_class = models.SmallIntegerField(
        choices=ServiceClass.choices, default=ServiceClass.FOREGROUND
    )
    streamed = models.BooleanField(default=False)
    # It outlives its client and its worker.
    background = models.BooleanField(default=False)
    end_user = models.CharField(max_length=512, blank=True, default="")
    # Which request of its API key it runs for (see ``api.idempotency``); empty for most.
    idempotency_key = models.CharField(max_length=64, blank=True, default="", db_default="")
    ignored_params = ArrayField(models.CharField(max_length=64), default=list, blank=True)

    status = models.CharField(max_length=16, choices=Status.choices, default=Status.QUEUED)
    worker = models.CharField(max_length=128, blank=True)
    # Who has its prefix in memory, and until when it waits for nobody else.
    preferred_worker = models.CharField(max_length=128, blank=True, default="")
    preferred_until = models.DateTimeField(null=True, blank=True)
    # It is isolated since then: its workers have died, and nothing runs beside it.
    alone_since = models.DateTimeField(null=True, blank=True)
    # Somebody wants one in the background stopped, which ran then: Redis may lose its cancel flag.
    cancel_requested_at = models.DateTimeField(null=True, blank=True)
    attempt = models.PositiveSmallIntegerField(default=0)
    # How many of its attempts were ended from outside, and do not count.
    spared = models.PositiveSmallIntegerField(default=0, db_default=0)
    created_at = models.DateTimeField(default=timezone.now)
    claimed_at = models.DateTimeField(null=True, blank=True)
    first_token_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)

    input_tokens = models.PositiveIntegerField(default=0)
    cached_tokens = models.PositiveIntegerField(default=0)
    output_tokens = models.PositiveIntegerField(default=0)
    reasoning_tokens = models.PositiveIntegerField(default=0)
    prefill_ms = models.FloatField(default=0)
    decode_ms = models.FloatField(default=0)
    # In the currency of the catalogue's prices, at the prices of when it ended.
    cost = models.DecimalField(max_digits=18, decimal_places=9, default=0)
    # What its budgets hold back for it until it is accounted.
    reserved_tokens = models.PositiveBigIntegerField(default=0)
    reserved_cost = models.DecimalField(max_digits=18, decimal_places=9, default=0)
    # Whether the roll-ups and budgets have it; only what has ended is accounted.
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
                # As ``status IN ('queued', 'running')``, but PostgreSQL never takes it for a claim.
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
            # Rows lie in the order of time, so that a few pages of it tell where a time begins.
            BrinIndex(fields=["created_at"], autosummarize=True, name="generation_by_time"),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["api_key", "idempotency_key"],
                condition=~models.Q(idempotency_key="")
                & models.Q(status__in=[Status.QUEUED, Status.RUNNING, Status.COMPLETED]),
                name=ONE_RUN_A_KEY,
            ),
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
        """Write a row of which nothing has begun, like ``save(force_insert=True)`` but with a
        prepared statement."""
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
    def tokens_per_s(self) -> float | None:
        """Output tokens per second after the first; None for fewer than two tokens."""
        decode_ms = _milliseconds(self.first_token_at, self.finished_at)
        if not decode_ms or self.output_tokens < 2:
            return None
        return (self.output_tokens - 1) / (decode_ms / 1000)


def _milliseconds(start: dt.datetime | None, end: dt.datetime | None) -> float | None:
    return None if start is None or end is None else (end - start).total_seconds() * 1000
