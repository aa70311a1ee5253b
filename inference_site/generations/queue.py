"""The queue: PostgreSQL keeps what waits, Celery wakes the workers (see ``wake_ups``)."""

from __future__ import annotations

import contextlib
import datetime as dt
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal

import redis.exceptions
from django.conf import settings
from django.db import transaction
from django.utils import timezone

from inference_site.domain.errors import QueueFull
from inference_site.fleet.leases import live_view
from inference_site.generations.affinity import Preference, preference
from inference_site.generations.load_deadlines import wait_for_load
from inference_site.generations.models import Generation, ServiceClass, Status
from inference_site.generations.wake_ups import (
    ENOUGH_WAKE_UPS,
    count_wake_ups,
    delayed_wake_ups,
    send_wake_up,
)
from inference_site.observability.log_context import note
from inference_site.observability.tracing import begin, current
from inference_site.streams.request_documents import Document, drop_document, save_document


@dataclass(frozen=True, slots=True)
class Enqueue:
    """What to write into the new Generation row."""

    kind: str
    generation_id: str
    model: str
    project_id: int
    api_key_id: int
    request_id: str
    streamed: bool
    service_class: ServiceClass = ServiceClass.FOREGROUND
    end_user: str = ""
    background: bool = False
    ignored_params: list[str] = field(default_factory=list)
    reserved_tokens: int = 0
    reserved_cost: Decimal = Decimal(0)
    created_at: dt.datetime = field(default_factory=timezone.now)
    continues: str = ""
    """The generation whose prefix it has; its worker is preferred."""


def new_id(prefix: str) -> str:
    """Return a fresh public id: the prefix and 32 random characters, nothing of the time."""
    return f"{prefix}{secrets.token_hex(16)}"


def enqueue(
    order: Enqueue,
    document: Document,
    follower: str | None,
    frames: Sequence[bytes] = (),
    record: Callable[[], None] | None = None,
) -> None:
    """Accept a generation: keep its document, commit its row, send a wake-up.

    ``follower`` is the channel of who follows its stream, ``frames`` what that begins with;
    ``record`` writes what else is to be committed with the row.

    Raise QueueFull when the model's queue is at its bound. When Redis or PostgreSQL is down their
    errors pass through and nothing is accepted, except that a wake-up that cannot be sent is no
    error: the row is committed, and maintenance sends one later.
    """
    note(generation_id=order.generation_id, model=order.model)
    span = begin(
        "enqueue", "producer", current.get(), model=order.model, generation_id=order.generation_id
    )
    try:
        _enqueue(order, replace(document, traceparent=span.traceparent), follower, frames, record)
    finally:
        span.end()


def _enqueue(
    order: Enqueue,
    document: Document,
    follower: str | None,
    frames: Sequence[bytes],
    record: Callable[[], None] | None,
) -> None:
    unread = _check_bound(order.model)
    preferred = preference(order.model, order.continues)
    save_document(order.generation_id, document, follower, frames)
    try:
        # Before the row is committed: when Redis fails, nothing is accepted.
        if settings.LOAD_WAIT_S and not order.background and not live_view.serving(order.model):
            wait_for_load(order.generation_id, settings.LOAD_WAIT_S)
        _commit(order, preferred, record)
    except BaseException:
        with contextlib.suppress(redis.exceptions.RedisError):
            drop_document(order.generation_id)
        raise
    if unread < ENOUGH_WAKE_UPS:
        send_wake_up(order.model, preferred.worker)
        if preferred.worker:  # It may be busy, or dead: the others hear of it later.
            delayed_wake_ups.send(order.model, preferred.open_after_s)


def _commit(order: Enqueue, preferred: Preference, record: Callable[[], None] | None) -> None:
    if record is None:
        _create_row(order, preferred)
        return
    with transaction.atomic():
        _create_row(order, preferred)
        record()


def _create_row(order: Enqueue, preferred: Preference) -> None:
    Generation.objects.create(
        public_id=order.generation_id,
        kind=order.kind,
        project_id=order.project_id,
        api_key_id=order.api_key_id,
        model=order.model,
        request_id=order.request_id,
        service_class=order.service_class,
        streamed=order.streamed,
        background=order.background,
        end_user=order.end_user,
        ignored_params=order.ignored_params,
        preferred_worker=preferred.worker,
        preferred_until=preferred.until,
        reserved_tokens=order.reserved_tokens,
        reserved_cost=order.reserved_cost,
        created_at=order.created_at,
    )


def _check_bound(model: str) -> int:
    """Return how many wake-ups are unread. Raise QueueFull when too many generations wait.

    The rows are counted only when the wake-ups say that many may wait.
    """
    unread, limit = count_wake_ups(model), settings.QUEUE_LIMIT
    if unread < min(ENOUGH_WAKE_UPS, limit):
        return unread
    if Generation.objects.filter(model=model, status=Status.QUEUED).count() >= limit:
        raise QueueFull
    return unread
