"""What beat does every second so that no generation is forgotten.

abandoned   running on a worker that is dead: failed
expired     waiting for longer than the queue timeout: failed
unloaded    waiting for a model that takes too long to load: failed
unserved    waiting for the server of a model that has been away for too long: failed
homeless    waiting in the background for a model that the site does not have any more: failed
unattended  left by all its readers, for longer than its grace: cancelled
unstopped   goes on although it was to stop a while ago: asked again to stop
unwoken     waiting with no wake-up: a new one is sent
gone        workers without a lease: dropped from the index, and their wake-ups
left        requests in Redis whose generation has ended, or never was: dropped

``mend_torn`` is apart from the rest, because it reads tables that the others do not wait for. It
ends what a kind stores and contradicts the generation.

A worker that lives gives up its own orphans, with the same move.

What goes wrong with one part, or with one generation, keeps no other from being done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

from django.conf import settings
from django.db.models import Count, Min, Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone
from redis.exceptions import RedisError

from inference_site.catalogue.catalogue import catalogue
from inference_site.domain.errors import (
    ModelLoading,
    ModelRemoved,
    ModelServerUnreachable,
    QueueTimeout,
    WorkerLost,
)
from inference_site.fleet.leases import is_alive, live_view, prune
from inference_site.fleet.load_deadlines import forget_waits, overdue
from inference_site.generations.cancel import cancel, cancel_waiting
from inference_site.generations.disconnect_grace import forget, unattended
from inference_site.generations.ending_without_worker import end_in_place
from inference_site.generations.kinds import kind_of, mendings
from inference_site.generations.models import (
    MAX_ATTEMPTS,
    TERMINAL,
    Generation,
    ServiceClass,
    Status,
)
from inference_site.generations.wake_ups import (
    ENOUGH_WAKE_UPS,
    count_wake_ups,
    drop_late_wake_ups,
    drop_wake_ups_of,
    send_wake_up,
)
from inference_site.storage.postgresql import (
    DATABASE_UNAVAILABLE,
    cached_sql,
    release_connection_after,
    transaction_with_timeouts,
)
from inference_site.storage.redis import SET_WHEN_FULL, Deadlines, all_clients, site_client
from inference_site.streams.event_log import is_cancel_requested
from inference_site.streams.held import long_open, release_expired, seen_alive
from inference_site.streams.request_documents import drop_document

logger = logging.getLogger(__name__)

_CONFIRM_S = 2.5
"""A worker is given up when its lease is found missing twice, this far apart: longer than the time
between renewals, so that a restart of Redis, which loses all leases, kills no worker."""
_suspects = Deadlines("suspects")
_ORPHAN_S = 5.0
"""How old a claim must be before its worker can be said not to run it."""
_DONE_KEY, _DONE_KEPT_S = "maintenance-done", 60
_LEFT_S = 60
"""How long after ``EVENT_LOG_PATIENCE_S`` a request may be in Redis until its row is looked at."""
_MOST_EXPIRED = 200
"""How many expire in one pass: when thousands do at once, dead workers must not wait for that."""
_STOPPED_S = 2.0
"""How long it may take until a worker stops what it is to stop."""
_RECEIVED_S = 2.0
"""How long a wake-up may take before a generation that waits gets a new one."""


def maintain() -> None:
    """Do all of it once. Raise what went wrong as a group, after the rest was done."""
    parts = (
        give_up_abandoned,
        expire_waiting,
        expire_unloaded,
        expire_unserved,
        stop_unattended,
        stop_again,
        expire_homeless,
        wake_again,
        drop_gone,
        drop_left,
    )
    try:
        _each((part.__name__, part) for part in parts)
    finally:  # What failed is told; it does not mean that nothing is done.
        site_client().eval(SET_WHEN_FULL, 1, _DONE_KEY, time.time(), _DONE_KEPT_S)


def last_maintained() -> float | None:
    """Return when all of it was last tried, in Unix time; None when that is a minute ago."""
    at: Any = site_client().get(_DONE_KEY)
    return None if at is None else float(at)


def attempt(what: str, act: Callable[[], None]) -> bool:
    """Do it and return True; when that fails say why in the log, and return False.

    A server that is down is no more than a warning: there will be another turn.
    """
    is_done = True
    try:
        act()
    except* (*DATABASE_UNAVAILABLE, RedisError) as down:
        is_done = False
        logger.warning("%s: %s", what, "; ".join(map(str, _leaves(down))))
    except* Exception:
        is_done = False
        logger.exception("%s: not all was done", what)
    return is_done


def _leaves(group: BaseExceptionGroup[Exception]) -> list[Exception]:
    leaves: list[Exception] = []
    for exc in group.exceptions:
        leaves += _leaves(exc) if isinstance(exc, BaseExceptionGroup) else [exc]
    return leaves


def _each(acts: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Do each of these, whatever becomes of the others. Raise what went wrong as a group."""
    faults = []
    for name, act in acts:
        try:
            act()
        except Exception as exc:  # noqa: BLE001  # It is raised with the rest.
            exc.add_note(name)
            faults.append(exc)
    if faults:
        raise ExceptionGroup("maintenance", faults)


def give_up_abandoned() -> None:
    """Fail what runs on workers that have been without a lease for ``_CONFIRM_S``."""
    dead = _dead_among({worker for (worker,) in _running_on()})
    for worker in dead:
        logger.warning("worker %s is dead", worker)
    if dead:
        running = Generation.objects.filter(status=Status.RUNNING, worker__in=dead)
        _give_up(running, worker_died=True)


@cached_sql
def _running_on() -> QuerySet[Any, Any]:
    running = Generation.objects.filter(status=Status.RUNNING)
    return running.values_list("worker").distinct()


def give_up_orphans(worker: str, running: Callable[[], Collection[tuple[str, int]]]) -> None:
    """Fail what this live worker claimed a while ago and is not running.

    ``running`` returns the ids and attempts that it runs; it is asked after the rows, so that none
    of these can have begun in between. How old a claim is, the database's clock decides, which also
    wrote its time.
    """
    limit = Now() - timedelta(seconds=_ORPHAN_S)
    with release_connection_after():
        claimed = list(
            Generation.objects.filter(status=Status.RUNNING, worker=worker, claimed_at__lt=limit)
        )
        known = running()
        orphans = [row for row in claimed if (row.public_id, row.attempt) not in known]
        _give_up(orphans, worker_died=False)


def _give_up(generations: Iterable[Generation], *, worker_died: bool) -> None:
    """Give up those that still run on the worker they are seen with.

    Those in the background go back to the queue, up to ``MAX_ATTEMPTS``; the others fail, and their
    streams ended. If the worker of the last attempt but one has died, the run may be the cause,
    so its last attempt is isolated. The attempts before that are not: most runs of a dead worker
    did not end it, and would wait for each other.
    """
    # Those with a stored answer last: its tables may be locked.
    ordered = sorted(generations, key=_has_stored_answer)
    _each((each.public_id, partial(_give_up_one, each, worker_died)) for each in ordered)


def _has_stored_answer(generation: Generation) -> bool:
    try:
        return kind_of(generation.kind).recover is not None
    except KeyError:  # Of a later release; to end it raises the error that the log has.
        return False


def _give_up_one(generation: Generation, worker_died: bool) -> None:
    held = (generation.public_id, generation.worker, generation.attempt)
    if generation.background and _is_to_stop(generation):
        cancel_held = partial(Generation.objects.cancel_abandoned, *held)
        end_in_place(generation, Status.CANCELLED, cancel_held, None)
        return
    counted = generation.attempt - generation.spared
    if generation.background and counted < MAX_ATTEMPTS:
        isolated = worker_died and counted == MAX_ATTEMPTS - 1
        with transaction_with_timeouts():
            is_waiting = Generation.objects.requeue(*held, isolated=isolated)
        if is_waiting and is_cancel_requested(generation.public_id):
            cancel_waiting([generation.public_id])  # It may be long until a worker reads the flag.
        elif is_waiting:
            send_wake_up(generation.model)
        return
    fail = partial(Generation.objects.fail_abandoned, *held, "worker_lost")
    end_in_place(generation, Status.FAILED, fail, WorkerLost())


def _is_to_stop(generation: Generation) -> bool:
    return bool(generation.cancel_requested_at) or is_cancel_requested(generation.public_id)


def expire_waiting() -> None:
    """Fail what somebody has waited for longer than ``QUEUE_TIMEOUT_S``."""
    late = [pk for (pk,) in _late(settings.QUEUE_TIMEOUT_S, _MOST_EXPIRED)]
    rows = Generation.objects.filter(pk__in=late).order_by("created_at") if late else ()
    _each((row.public_id, partial(_expire, row, "queue_timeout", QueueTimeout())) for row in rows)


def _waiting_for(more_than_s: float) -> QuerySet[Generation]:
    limit = Now() - timedelta(seconds=more_than_s)
    return Generation.objects.filter(status=Status.QUEUED, created_at__lt=limit)


@cached_sql
def _late(after_s: float, most: int) -> QuerySet[Any, Any]:
    late = _waiting_for(after_s).filter(service_class=ServiceClass.FOREGROUND)
    return late.order_by("created_at").values_list("pk")[:most]


def _expire(generation: Generation, code: str, error: Exception) -> None:
    expire = partial(Generation.objects.expire_queued, generation.public_id, code)
    end_in_place(generation, Status.FAILED, expire, error)


def stop_unattended() -> None:
    """Stop what nobody has read for longer than its grace (see ``disconnect_grace``)."""
    left = unattended()
    if not left:
        return
    rows = Generation.objects.filter(public_id__in=left).exclude(status__in=TERMINAL)
    going_on = frozenset(rows.values_list("public_id", flat=True))
    _each((id_, partial(_stop_unattended, id_, id_ in going_on)) for id_ in left)


def _stop_unattended(public_id: str, is_going_on: bool) -> None:
    if is_going_on:
        cancel([public_id])
    forget([public_id])


def stop_again() -> None:
    """Ask again for what was to stop a while ago: Redis may have lost the flag for its worker."""
    late = [public_id for (public_id,) in _unstopped()]
    if late:
        cancel(late)


@cached_sql
def _unstopped() -> QuerySet[Any, Any]:
    limit = Now() - timedelta(seconds=_STOPPED_S)
    late = Generation.objects.filter(finished_at=None, cancel_requested_at__lt=limit)
    return late.values_list("public_id")


def expire_unloaded() -> None:
    """Fail what was accepted while its model was loading, and has waited ``LOAD_WAIT_S`` for it."""
    late = overdue()
    if not late:
        return
    waiting = Generation.objects.filter(public_id__in=late, status=Status.QUEUED)
    found = {generation.public_id: generation for generation in waiting}
    _each((id_, partial(_expire_unloaded, id_, found.get(id_))) for id_ in late)


def _expire_unloaded(public_id: str, waiting: Generation | None) -> None:
    # With its model served it waits for a slot now, as others do.
    if waiting is not None and not live_view.serving(waiting.model):
        _expire(waiting, "model_loading", ModelLoading())
    forget_waits([public_id])


def expire_unserved() -> None:
    """Fail what somebody has waited for while its server was away, for ``SERVER_WAIT_S``.

    The time counts from when the server went, or from when the request came, if that was later.
    """
    wait_s = settings.SERVER_WAIT_S
    for model in {served.id for worker in live_view.workers() for served in worker.models}:
        since = live_view.away_since(model)
        if not since or time.time() - since < wait_s:
            continue
        waiting = _waiting_for(wait_s).filter(model=model, background=False)
        late = waiting.filter(service_class__lte=ServiceClass.FOREGROUND).order_by("created_at")
        expire = partial(_expire, code="engine_unavailable", error=ModelServerUnreachable())
        _each((row.public_id, partial(expire, row)) for row in late[:_MOST_EXPIRED])


def expire_homeless() -> None:
    """Fail what would wait for ever, for a model that neither the catalogue nor a worker has.

    Only after ``QUEUE_TIMEOUT_S``: during an upgrade this process may have an older catalogue.
    """
    known = catalogue().models
    unknown = [
        model
        for (model,) in _long_wanted(settings.QUEUE_TIMEOUT_S)
        if model not in known and not live_view.having(model)
    ]
    if not unknown:
        return
    waiting = _long_in_background(settings.QUEUE_TIMEOUT_S).filter(model__in=unknown)
    _each(
        (row.public_id, partial(_expire, row, "model_not_found", ModelRemoved())) for row in waiting
    )


def _long_in_background(after_s: float) -> QuerySet[Generation]:
    # See expire_waiting for the others.
    return _waiting_for(after_s).exclude(service_class=ServiceClass.FOREGROUND)


@cached_sql
def _long_wanted(after_s: float) -> QuerySet[Any, Any]:
    return _long_in_background(after_s).values_list("model").distinct()


def mend_torn() -> None:
    """Have each app end what it stores and contradicts the generations.

    Beat does so on a thread of its own: a table of answers may be locked.
    """
    _each(("mend", app.mend) for app in mendings())


def wake_again() -> None:
    """Send a wake-up for each generation that waits without one."""
    for model, count in _unwoken():
        for _ in range(min(count, ENOUGH_WAKE_UPS) - count_wake_ups(model)):
            send_wake_up(model)


@cached_sql
def _unwoken() -> QuerySet[Any, Any]:
    waiting = Generation.objects.filter(status=Status.QUEUED).values("model").order_by()
    oldest = waiting.annotate(count=Count("id"), oldest=Min("created_at"))
    late = oldest.filter(oldest__lt=Now() - timedelta(seconds=_RECEIVED_S))
    return late.values_list("model", "count")


def drop_gone() -> None:
    """Drop the workers without a lease from the index, and the wake-ups that were sent to them."""
    for worker in prune():
        drop_wake_ups_of(worker)
    drop_late_wake_ups()


def drop_left() -> None:
    """Drop the requests of what has ended or never was, and count expired logs no longer.

    An ending drops its request; one is left when Redis was away at that moment, or when a process
    died between saving the request and committing its row.
    """
    _each((f"event log server {n}", partial(_drop_left, c)) for n, c in enumerate(all_clients()))


def _drop_left(client: Any) -> None:
    release_expired(client)
    patience = timedelta(seconds=settings.EVENT_LOG_PATIENCE_S + _LEFT_S)
    found = long_open(client, patience.total_seconds())
    if not found:
        return
    # What has ended just now may be about to close its log.
    recent = Q(finished_at=None) | Q(finished_at__gt=timezone.now() - patience)
    rows = Generation.objects.filter(recent, public_id__in=found)
    going_on = frozenset(rows.values_list("public_id", flat=True))
    seen_alive(client, sorted(going_on))
    for public_id in set(found) - going_on:
        drop_document(public_id)


def _dead_among(workers: set[str]) -> set[str]:
    """Return those whose lease is missing now and was missing ``_CONFIRM_S`` ago."""
    silent = {worker for worker in workers if not is_alive(worker)}
    for worker in silent:
        _suspects.push(worker, _CONFIRM_S, "NX")
    confirmed = set(_suspects.passed())
    _suspects.forget((workers | confirmed) - silent)
    return silent & confirmed
