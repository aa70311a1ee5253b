"""The queue: PostgreSQL keeps what waits, Celery wakes the workers (see ``wake_ups``)."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, Protocol

import redis.exceptions
from django.conf import settings
from django.db import transaction

from inference_site.errors.api_errors import UnavailableError
from inference_site.fleet.leases import live_view
from inference_site.fleet.load_deadlines import wait_for_load
from inference_site.generations.affinity import Preference, preference
from inference_site.generations.cancel import cancel
from inference_site.generations.models import Generation, ServiceClass
from inference_site.generations.places import (
    Place,
    crowds,
    has_free_slot,
    is_near_bound,
    place_of,
    require_room,
)
from inference_site.generations.wake_ups import (
    ENOUGH_WAKE_UPS,
    count_wake_ups,
    delayed_wake_ups,
    queue_name,
    send_wake_up,
)
from inference_site.observability.logs import add_log_fields
from inference_site.observability.tracing import current_traceparent, start_span
from inference_site.storage.postgresql import DATABASE_UNAVAILABLE
from inference_site.storage.redis import broker_client, client_for
from inference_site.streams.event_log import request_cancel
from inference_site.streams.request_documents import (
    NOTHING,
    Document,
    Opening,
    drop_document,
    save_document,
)


class WithRow(Protocol):
    """Something that is committed together with the row of a generation."""

    def write(self) -> None:
        """Write it. What this raises refuses the generation."""


IsWanted = Callable[[], bool]
"""Whether anybody waits for it still: while a store hung its request may have been refused."""


def always() -> bool:
    """Return that it is wanted."""
    return True


def new_id(prefix: str) -> str:
    """Return a fresh public id: the prefix and 32 random characters, nothing of the time."""
    return f"{prefix}{secrets.token_hex(16)}"


def enqueue(
    row: Generation,
    document: Document[Any],
    follower: str | None,
    opening: Opening = NOTHING,
    continues: str = "",
    with_row: WithRow | None = None,
    *,
    before_row: WithRow | None = None,
    is_wanted: IsWanted = always,
) -> Place:
    """Accept a generation: keep its document, commit its row, send a wake-up; return its place.

    ``row`` is not saved yet. ``follower`` is the channel of who follows its stream, ``opening``
    what that begins with. ``continues`` is the generation whose prefix it has; its worker is
    preferred. ``before_row`` is written before the row, ``with_row`` after it, in one transaction.

    Raise QueueFull when the model's queue is at its bound, ProjectQueueFull when the project has
    its share of it (see ``places``), and what ``save_document`` raises when there is no room for
    the document; UnavailableError when it ``is_wanted`` no more. When Redis or PostgreSQL is down
    their errors pass through and nothing is accepted, except that a wake-up that cannot be sent is
    no error: the row is committed, and maintenance sends one later.
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
        refusal = crowds.refusal(row.model, row.project_id, is_background=is_background)
        if refusal is not None:  # Before its document is kept, which may be long.
            raise refusal
        preferred = preference(row.model, continues)
        row.preferred_worker, row.preferred_until = preferred.worker, preferred.until
        if span.traceparent:
            document = replace(document, traceparent=span.traceparent)
        unread = _keep(row, document, follower, opening)
        place = _commit(row, before_row, with_row, is_wanted, unread)
        if not is_wanted():
            cancel([row.public_id])  # A worker may have claimed it already.
            raise UnavailableError
        crowds.add(row.model, row.project_id, row.service_class)
        if unread < ENOUGH_WAKE_UPS:
            _wake(row.model, preferred)
        return place
    finally:
        span.end()


def _keep(row: Generation, document: Document[Any], follower: str | None, opening: Opening) -> int:
    """Keep the document of a row; return how many wake-ups of its model nobody has read yet."""
    kept = (row.public_id, document, follower, opening, row.project_id)
    if client_for(row.public_id) is broker_client():
        return save_document(*kept, counted=queue_name(row.model))
    unread = count_wake_ups(row.model)
    save_document(*kept)
    return unread


def _commit(
    row: Generation,
    before_row: WithRow | None,
    with_row: WithRow | None,
    is_wanted: IsWanted,
    unread: int,
) -> Place:
    """Write the row and what goes with it; forget the document when that fails.

    If the queue is near its end it is counted, and nobody else writes to it until the commit.
    """
    try:
        waits = unread > 0 or not has_free_slot(row.model)
        is_near_end = waits and is_near_bound(row)
        place = place_of(row.model, row.project_id, row.service_class) if waits else Place()
        # Before the row is committed: when Redis fails, nothing is accepted.
        loads = not live_view.serving(row.model) and not live_view.away_since(row.model)
        if settings.LOAD_WAIT_S and not row.background and loads:
            wait_for_load(row.public_id, settings.LOAD_WAIT_S)
        if not is_wanted():
            raise UnavailableError
        has_more = before_row or with_row or is_near_end
        with transaction.atomic() if has_more else nullcontext():
            if before_row is not None:  # It may wait for another, so before the model's lock.
                before_row.write()
            if is_near_end:
                require_room(row)
            row.insert()
            if with_row is not None:
                with_row.write()
    except BaseException as exc:
        with suppress(redis.exceptions.RedisError):
            drop_document(row.public_id)
            if isinstance(exc, DATABASE_UNAVAILABLE):
                # The row may be committed, and a worker may have it: only the answer was lost.
                request_cancel(row.public_id)
        raise
    return place


def _wake(model: str, preferred: Preference) -> None:
    """Wake the worker that is preferred, and later all of them: it may be busy, or dead."""
    send_wake_up(model, preferred.worker)
    if preferred.worker:
        delayed_wake_ups.send(model, preferred.open_after_s)
