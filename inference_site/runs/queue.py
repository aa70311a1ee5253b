"""The queue: PostgreSQL keeps the waiting generations, Celery wakes the workers (see ``wake_ups``).

A generation that continues another, or has the prompt cache key of another, prefers the worker that
ran that one, because its prefix is in that worker's memory (affinity). For ``AFFINITY_WAIT_MS``,
only that worker is woken and may claim it; after that, all workers of the model. A prompt cache key
is a hint: without Redis, which keeps the latest generation with each key, nothing is preferred.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import logging
import secrets
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import redis.exceptions
from django.conf import settings
from django.db import transaction
from django.db.models.expressions import CombinedExpression
from django.db.models.functions import Now

from inference_site.catalogue.fleet.fleet import load_deadlines
from inference_site.catalogue.fleet.leases import live_view
from inference_site.core.errors.api_errors import UnavailableError
from inference_site.core.observability.logs import add_log_fields
from inference_site.core.observability.tracing import current_traceparent, start_span
from inference_site.core.storage.postgresql import DATABASE_UNAVAILABLE
from inference_site.core.storage.redis import broker_client, client_for, site_client
from inference_site.runs.cancellation import cancel
from inference_site.runs.models import Generation, ServiceClass, Status
from inference_site.runs.queue_position import (
    QueuePosition,
    check_queue_limit,
    has_free_slot,
    is_near_limit,
    position_of,
    queue_counts,
)
from inference_site.runs.streams.event_log import request_cancel
from inference_site.runs.streams.request_documents import (
    NOTHING,
    Document,
    Opening,
    drop_document,
    save_document,
)
from inference_site.runs.wake_ups import (
    ENOUGH_WAKE_UPS,
    count_wake_ups,
    delayed_wake_ups,
    queue_name,
    send_wake_up,
)

logger = logging.getLogger(__name__)

_SLACK_MS = 30
"""Added to the wait before all workers are woken. The clocks of hosts differ, and a worker that is
woken too early finds nothing to claim."""
_KEY_KEPT_S = 600
"""As long as OpenAI keeps a prefix that is not used again."""


def new_id(prefix: str) -> str:
    """Return a new public id: the prefix and 32 random characters, without a time."""
    return f"{prefix}{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True)
class Preference:
    """The worker that a generation prefers, if any, and for how long after its acceptance."""

    worker: str = ""
    wait_ms: int = 0

    @property
    def until(self) -> CombinedExpression | None:
        """The value for the row: a time of the database's clock, which the claim uses, too."""
        return Now() + dt.timedelta(milliseconds=self.wait_ms) if self.worker else None

    @property
    def open_after_s(self) -> float:
        """Seconds after the row was written until every worker may claim it."""
        return (self.wait_ms + _SLACK_MS) / 1000


def preference(model: str, continues: str) -> Preference:
    """Return the preference of a generation that continues another, by that one's id.

    There is none if the worker of that one no longer serves the model, or is the only one.
    """
    wait_ms = settings.AFFINITY_WAIT_MS
    if not continues or not wait_ms:
        return Preference()
    serving = {worker.id for worker in live_view.serving(model)}
    if len(serving) < 2:
        return Preference()
    before = Generation.objects.filter(public_id=continues)
    for workers in before.values_list("worker", "preferred_worker"):
        # One that still waits will run on the worker that it prefers, if any.
        for worker in workers:
            if worker in serving:
                return Preference(worker, wait_ms)
    return Preference()


def latest_with_key(project_id: int, model: str, cache_key: str) -> str:
    """Return the id of the latest generation with this key; "" if none is known or needed."""
    if not cache_key or not _has_choice(model):
        return ""
    try:
        found = site_client().get(_key_name(project_id, model, cache_key))
    except redis.exceptions.RedisError as exc:
        logger.warning("prompt cache keys: %s", exc)
        return ""
    return found.decode() if isinstance(found, bytes) else ""


def note_key(project_id: int, model: str, cache_key: str, generation_id: str) -> None:
    """Record a generation as the latest with this key."""
    if not cache_key or not _has_choice(model):
        return
    try:
        site_client().set(_key_name(project_id, model, cache_key), generation_id, ex=_KEY_KEPT_S)
    except redis.exceptions.RedisError as exc:
        logger.warning("prompt cache keys: %s", exc)


def _has_choice(model: str) -> bool:
    return len(live_view.serving(model)) > 1


def _key_name(project_id: int, model: str, cache_key: str) -> str:
    # Hashed, because the key may be long and may name a person.
    digest = hashlib.sha256(f"{model}\0{cache_key}".encode()).hexdigest()
    return f"prompt_cache_key:{project_id}:{digest[:32]}"


class WithRow(Protocol):
    """Something that is committed together with the row of a generation."""

    def write(self) -> None:
        """Write it. An error refuses the generation."""


IsWanted = Callable[[], bool]
"""Whether the client still waits. While a store was slow, its request may have been refused."""


def enqueue(
    row: Generation,
    document: Document[Any],
    follower: str | None,
    opening: Opening = NOTHING,
    continues: str = "",
    with_row: WithRow | None = None,
    *,
    before_row: WithRow | None = None,
    is_wanted: IsWanted = lambda: True,
) -> QueuePosition:
    """Accept a generation: store its document, commit its row, send a wake-up; return its position.

    ``row`` is not saved yet. ``follower`` is the channel of the reader of its stream, ``opening``
    the beginning of the stream. ``continues`` is the generation whose prefix it has; the worker of
    that one is preferred. ``before_row`` is written before the row, ``with_row`` after it, in one
    transaction.

    Raise QueueFull when the queue of the model is full, ProjectQueueFull when the share of the
    project is (see ``queue_position``), UnavailableError when it is no longer wanted, and the
    errors of ``save_document`` when there is no room for the document. When Redis or PostgreSQL is
    down, their errors are raised and nothing is accepted. A wake-up that cannot be sent is no
    error: the row is committed, and maintenance sends one later.
    """
    add_log_fields(generation_id=row.public_id, model=row.model)
    span = start_span(
        "enqueue",
        "producer",
        current_traceparent.get(),
        model=row.model,
        generation_id=row.public_id,
    )
    try:
        is_background = row.service_class >= ServiceClass.BACKGROUND
        refusal = queue_counts.refusal(row.model, row.project_id, is_background=is_background)
        if refusal is not None:  # Before its document is stored, which may be long.
            raise refusal
        preferred = preference(row.model, continues)
        row.preferred_worker, row.preferred_until = preferred.worker, preferred.until
        if span.traceparent:
            document = replace(document, traceparent=span.traceparent)
        stored = (row.public_id, document, follower, opening, row.project_id)
        if client_for(row.public_id) is broker_client():
            unread = save_document(*stored, counted=queue_name(row.model))
        else:
            unread = count_wake_ups(row.model)
            save_document(*stored)
        answers_client = not document.is_delivered
        position = _commit(
            row, before_row, with_row, is_wanted, unread, answers_client=answers_client
        )
        if not is_wanted():
            cancel([row.public_id])  # A worker may have claimed it already.
            raise UnavailableError
        queue_counts.add(row.model, row.project_id, row.service_class)
        if unread < ENOUGH_WAKE_UPS:
            send_wake_up(row.model, preferred.worker)
            if preferred.worker:  # It may be busy or dead, so all are woken later.
                delayed_wake_ups.send(row.model, preferred.open_after_s)
        return position
    finally:
        span.end()


def _commit(
    row: Generation,
    before_row: WithRow | None,
    with_row: WithRow | None,
    is_wanted: IsWanted,
    unread: int,
    *,
    answers_client: bool,
) -> QueuePosition:
    """Write the row and what is committed with it; drop the document when that fails.

    If the queue is near its limit it is counted under a lock, which is held until the commit.
    ``unread`` is the number of wake-ups of the model that no worker has received.
    ``answers_client``: a client gets the error, and must not get an answer besides.
    """
    try:
        waits = unread > 0 or not has_free_slot(row.model)
        must_count = waits and is_near_limit(row)
        position = QueuePosition()
        if waits:
            position = position_of(row.model, row.project_id, row.service_class)
        # Before the row is committed: when Redis fails, nothing is accepted.
        loads = not live_view.serving(row.model) and not live_view.away_since(row.model)
        if settings.LOAD_WAIT_S and not row.background and loads:
            load_deadlines.push(row.public_id, settings.LOAD_WAIT_S)
        if not is_wanted():
            raise UnavailableError
        has_more = before_row or with_row or must_count
        with transaction.atomic() if has_more else nullcontext():
            if before_row is not None:  # It may wait for another, so before the model's lock.
                before_row.write()
            if must_count:
                check_queue_limit(row)
            row.insert()
            if with_row is not None:
                with_row.write()
    except BaseException as exc:
        with suppress(redis.exceptions.RedisError):
            drop_document(row.public_id)
            if answers_client and isinstance(exc, DATABASE_UNAVAILABLE):
                # The row may be committed, and a worker may have it: only the reply was lost.
                request_cancel(row.public_id)
        raise
    return position


def move_up(generation: Generation) -> bool:
    """Move a waiting generation before all of its model that were not moved up.

    Return False if it no longer waits, or was moved up already.
    """
    waiting = Generation.objects.filter(pk=generation.pk, status=Status.QUEUED)
    lower = waiting.exclude(service_class=ServiceClass.URGENT)
    return bool(lower.update(service_class=ServiceClass.URGENT))
