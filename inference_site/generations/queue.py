"""The queue: PostgreSQL remembers who waits, Celery rings the bell.

A bell names a model, never a generation. Whoever hears it claims the best waiting row, so a bell
that is lost, doubled or late does no harm; ``generations.maintenance`` rings again for rows without
one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, Protocol

import kombu.exceptions
import redis.exceptions
from celery import current_app
from django.conf import settings
from django.db import transaction

from inference_site.domain.errors import QueueFull
from inference_site.fleet.leases import is_alive, live_view
from inference_site.generations.affinity import Preference, later, preference
from inference_site.generations.load_deadlines import wait_for_load
from inference_site.generations.models import Generation, Status
from inference_site.generations.wake_ups import own_queue, own_queue_keys, queue_name
from inference_site.observability.log_context import note
from inference_site.observability.tracing import begin, current
from inference_site.storage.deadlines import Deadlines
from inference_site.storage.redis_clients import broker_client
from inference_site.streams.request_documents import Document, drop_document, save_document

logger = logging.getLogger(__name__)

ENOUGH_BELLS = 128
"""With so many unheard no more are rung: whoever hears one claims until nothing waits."""

GENERATE_TASK = "worker.generate"

_gone = Deadlines("gone-workers")
_BELIEVED_S = 30.0
"""How long bells may be rung for a worker that is gone: longer than its lease is remembered and a
row takes to be written."""


class WithRow(Protocol):
    """Something that is committed together with the row of a generation."""

    def write(self) -> None:
        """Write it. What this raises refuses the generation."""


def new_id(prefix: str) -> str:
    """Return a fresh public id: the prefix and 32 random characters, nothing of the time."""
    return f"{prefix}{secrets.token_hex(16)}"


def enqueue(
    row: Generation,
    document: Document[Any],
    follower: str | None,
    frames: Sequence[bytes] = (),
    continues: str = "",
    with_row: WithRow | None = None,
) -> None:
    """Accept a generation: keep its document, commit its row, ring the bell.

    ``row`` is not saved yet. ``follower`` is the channel of who follows its stream, ``frames`` what
    that begins with. ``continues`` is the generation whose prefix it has; its worker is preferred.

    Raise QueueFull when the model's queue is at its bound. When Redis or PostgreSQL is down their
    errors pass through and nothing is accepted, except that a bell that cannot be rung is not an
    error: the row is committed, and upkeep rings later.
    """
    note(generation_id=row.public_id, model=row.model)
    span = begin("enqueue", "producer", current.get(), model=row.model, generation_id=row.public_id)
    try:
        unheard = _check_bound(row.model)
        preferred = preference(row.model, continues)
        row.preferred_worker, row.preferred_until = preferred.worker, preferred.until
        document = replace(document, traceparent=span.traceparent)
        save_document(row.public_id, document, follower, frames)
        _commit(row, with_row)
        if unheard < ENOUGH_BELLS:
            _ring_preferred(row.model, preferred)
    finally:
        span.end()


def _commit(row: Generation, with_row: WithRow | None) -> None:
    """Write the row and what goes with it; forget the document when that fails."""
    try:
        # Before the row is committed: when Redis fails, nothing is accepted.
        if settings.LOAD_WAIT_S and not row.background and not live_view.serving(row.model):
            wait_for_load(row.public_id, settings.LOAD_WAIT_S)
        with nullcontext() if with_row is None else transaction.atomic():
            row.save(force_insert=True)
            if with_row is not None:
                with_row.write()
    except BaseException:
        with suppress(redis.exceptions.RedisError):
            drop_document(row.public_id)
        raise


def _ring_preferred(model: str, preferred: Preference) -> None:
    """Ring for the worker that is preferred, and later for all: it may be busy, or dead."""
    ring(model, preferred.worker)
    if preferred.worker:
        later.call(preferred.open_after_s, lambda: ring(model))


def ring(model: str, worker: str = "") -> None:
    """Tell the workers of this model, or only this one, that a generation waits.

    A broker that is down is no error.
    """
    queue = own_queue(worker) if worker else queue_name(model)
    try:
        current_app.send_task(
            GENERATE_TASK, args=(model,), queue=queue, ignore_result=True, retry=False
        )
    except kombu.exceptions.OperationalError as exc:
        logger.warning("queue: could not ring for %s: %s", model, exc)


def drop_bells_of(worker: str) -> None:
    """Drop the bells for a worker that is gone, and have ``drop_late_bells`` do so again.

    For a moment others believe that it lives, and ring for it.
    """
    broker_client().delete(*own_queue_keys(worker))
    _gone.push(worker, _BELIEVED_S)


def drop_late_bells() -> None:
    """Drop the bells that were rung for workers when they were gone."""
    for worker in _gone.passed():
        if not is_alive(worker):  # It was only late, and listens to its queue.
            broker_client().delete(*own_queue_keys(worker))
        _gone.forget([worker])


def bells(model: str) -> int:
    """Return how many bells of this model nobody has heard yet."""
    length: Any = broker_client().llen(queue_name(model))
    return int(length)


def _check_bound(model: str) -> int:
    """Return how many bells are unheard. Raise QueueFull when too many generations wait.

    The rows are counted only when the bells say that many may wait.
    """
    unheard, limit = bells(model), settings.QUEUE_LIMIT
    if unheard < min(ENOUGH_BELLS, limit):
        return unheard
    if Generation.objects.filter(model=model, status=Status.QUEUED).count() >= limit:
        raise QueueFull
    return unheard
