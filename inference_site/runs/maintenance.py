"""Maintenance: what beat does every second so that generations end and leave nothing behind.

running     on a worker that has died: failed, or requeued in the background
waiting     longer than the queue timeout: failed
            for a model that takes too long to load: failed
            for a model whose server has been away too long: failed
            in the background for a model that was removed from the site: failed
no readers  for longer than its disconnect grace: cancelled
cancelled   a while ago and still running: cancelled again
waiting     without a wake-up: a new one is sent
dead        workers without a lease: dropped from the index
leftover    requests in Redis whose generation has ended or never was: dropped

``repair_inconsistent`` runs apart from the rest, because it reads tables that the others do not
need. It ends stored results that contradict their generation.

A live worker ends its own orphans, with the same update.

An error in one part, or with one generation, does not keep the others from being done.
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
from inference_site.catalogue.fleet.fleet import ModelStatus, load_deadlines, status_of
from inference_site.catalogue.fleet.leases import is_alive, live_view, prune
from inference_site.catalogue.model_store.entries import REFRESH_PERIOD_S
from inference_site.core.domain.errors import (
    LoadFailed,
    ModelLoading,
    ModelRemoved,
    ModelServerUnreachable,
    QueueTimeout,
    WorkerLost,
)
from inference_site.core.errors.api_errors import UnavailableError
from inference_site.core.observability.outages import OutageLog, fault_of_error
from inference_site.core.storage.postgresql import (
    DATABASE_UNAVAILABLE,
    cached_sql,
    release_connection_after,
    transaction_with_timeouts,
)
from inference_site.core.storage.redis import SET_WHEN_FULL, Deadlines, all_clients, site_client
from inference_site.runs.cancellation import (
    cancel,
    cancel_waiting,
    end_without_worker,
    reader_deadlines,
)
from inference_site.runs.kinds import kind_of, mendings
from inference_site.runs.models import (
    MAX_ATTEMPTS,
    OF_WAITING_CLIENTS,
    TERMINAL,
    Generation,
    ServiceClass,
    Status,
)
from inference_site.runs.streams.event_log import is_cancel_requested
from inference_site.runs.streams.redis_memory import mark_alive, open_since, release_expired
from inference_site.runs.streams.request_documents import drop_document
from inference_site.runs.wake_ups import (
    ENOUGH_WAKE_UPS,
    count_wake_ups,
    send_wake_up,
)

logger = logging.getLogger(__name__)

_CONFIRM_S = 2.5
"""A worker is dead when its lease is missing twice, this far apart: longer than the time between
renewals, because a restart of Redis loses all leases and must kill no worker."""
_suspects = Deadlines("suspects")
_ORPHAN_S = 5.0
"""Minimum age of a claim before its worker may say that it does not run it."""
_DONE_KEY, _DONE_KEPT_S = "maintenance-done", 60
_LEFTOVER_S = 60
"""How long after ``EVENT_LOG_PATIENCE_S`` a request may be in Redis before its row is read."""
_MAX_EXPIRED = 200
"""How many expire in one pass: if thousands do at once, dead workers must not wait for that."""
_CANCEL_S = 2.0
"""How long a worker may take to stop a cancelled run."""
_RECEIVED_S = 2.0
"""How long a wake-up may take before a waiting generation gets a new one."""


def maintain() -> None:
    """Do one pass. Raise all errors as a group at its end."""
    parts = (
        end_runs_of_dead_workers,
        expire_waiting,
        expire_while_loading,
        expire_server_away,
        cancel_without_readers,
        repeat_cancels,
        expire_removed_models,
        resend_wake_ups,
        prune,
        drop_leftover_requests,
    )
    try:
        _each((part.__name__, part) for part in parts)
    finally:  # Errors are logged; a pass with errors counts as done.
        site_client().eval(SET_WHEN_FULL, 1, _DONE_KEY, time.time(), _DONE_KEPT_S)


def last_maintained() -> float | None:
    """Return the Unix time of the end of the last pass; None if that is a minute ago."""
    at: Any = site_client().get(_DONE_KEY)
    return None if at is None else float(at)


def try_and_log(what: str, act: Callable[[], None], outage: OutageLog | None = None) -> bool:
    """Call a function that is called again later; log its errors and return whether it had none.

    A server that is down, or a model without a worker, is only a warning: at each call, or as
    ``outage`` has it.
    """
    is_done = True
    try:
        act()
    except* (*DATABASE_UNAVAILABLE, RedisError, UnavailableError) as down:
        is_done = False
        faults = dict.fromkeys(map(fault_of_error, _leaves(down)))
        (outage or OutageLog(logger, what)).failed("; ".join(faults))
    except* Exception:
        is_done = False
        logger.exception("%s: not all was done", what)
    if is_done and outage is not None:
        outage.succeeded()
    return is_done


def _leaves(group: BaseExceptionGroup[Exception]) -> list[Exception]:
    leaves: list[Exception] = []
    for exc in group.exceptions:
        leaves += _leaves(exc) if isinstance(exc, BaseExceptionGroup) else [exc]
    return leaves


def _each(acts: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Call each of these, also after errors. Raise the errors as a group."""
    errors = []
    for name, act in acts:
        try:
            act()
        except Exception as exc:  # noqa: BLE001  # It is raised with the rest.
            exc.add_note(name)
            errors.append(exc)
    if errors:
        raise ExceptionGroup("maintenance", errors)


def end_runs_of_dead_workers() -> None:
    """End what runs on workers that have been without a lease for ``_CONFIRM_S``."""
    workers = {worker for (worker,) in _workers_of_runs()}
    missing = {worker for worker in workers if not is_alive(worker)}
    for worker in missing:
        _suspects.push(worker, _CONFIRM_S, "NX")
    confirmed = set(_suspects.passed())
    _suspects.forget((workers | confirmed) - missing)
    dead = missing & confirmed
    for worker in dead:
        logger.warning("worker %s is dead", worker)
    if dead:
        running = Generation.objects.filter(status=Status.RUNNING, worker__in=dead)
        _end_lost_runs(running, worker_died=True)


@cached_sql
def _workers_of_runs() -> QuerySet[Any, Any]:
    running = Generation.objects.filter(status=Status.RUNNING)
    return running.values_list("worker").distinct()


def end_orphans(worker: str, running: Callable[[], Collection[tuple[str, int]]]) -> None:
    """End what this live worker claimed a while ago and does not run.

    ``running`` returns the ids and attempts that it runs. It is called after the rows are read, so
    no run of them can have started in between. The age of a claim is measured by the database's
    clock, which also wrote its time.
    """
    limit = Now() - timedelta(seconds=_ORPHAN_S)
    with release_connection_after():
        claimed = list(
            Generation.objects.filter(status=Status.RUNNING, worker=worker, claimed_at__lt=limit)
        )
        known = running()
        orphans = [row for row in claimed if (row.public_id, row.attempt) not in known]
        _end_lost_runs(orphans, worker_died=False)


def _end_lost_runs(generations: Iterable[Generation], *, worker_died: bool) -> None:
    """End those that still run on the worker they were read with.

    Background generations are requeued, up to ``MAX_ATTEMPTS``; the others fail. If the worker died
    during the attempt before the last one, the run may be the cause, so its last attempt is
    isolated. Earlier attempts are not: most runs of a dead worker did not kill it, and isolated
    runs wait for each other.
    """

    def has_stored_answer(generation: Generation) -> bool:
        try:
            return kind_of(generation.kind).recover is not None
        except KeyError:  # Of a later release; ending it raises the error that is logged.
            return False

    # Those with a stored answer last, because its tables may be locked.
    ordered = sorted(generations, key=has_stored_answer)
    _each((row.public_id, partial(_end_lost_run, row, worker_died)) for row in ordered)


def _end_lost_run(generation: Generation, worker_died: bool) -> None:
    held = (generation.public_id, generation.worker, generation.attempt)
    counted = generation.attempt - generation.spared
    is_cancelled = bool(generation.cancel_requested_at)
    if generation.background and (is_cancelled or is_cancel_requested(generation.public_id)):
        cancel_held = partial(Generation.objects.cancel_running, *held)
        end_without_worker(generation, Status.CANCELLED, cancel_held, None)
    elif generation.background and counted < MAX_ATTEMPTS:
        isolated = worker_died and counted == MAX_ATTEMPTS - 1
        with transaction_with_timeouts():
            is_waiting = Generation.objects.requeue(*held, isolated=isolated)
        if is_waiting and is_cancel_requested(generation.public_id):
            cancel_waiting([generation.public_id])  # No worker may read the flag for a long time.
        elif is_waiting:
            send_wake_up(generation.model)
    else:
        fail = partial(Generation.objects.fail_running, *held, "worker_lost")
        end_without_worker(generation, Status.FAILED, fail, WorkerLost())


def expire_waiting() -> None:
    """Fail foreground generations that have waited longer than ``QUEUE_TIMEOUT_S``."""
    late = [pk for (pk,) in _late(settings.QUEUE_TIMEOUT_S, _MAX_EXPIRED)]
    rows = Generation.objects.filter(pk__in=late).order_by("created_at") if late else ()
    _each((row.public_id, partial(_expire, row, "queue_timeout", QueueTimeout())) for row in rows)


def _waiting_for(more_than_s: float) -> QuerySet[Generation]:
    limit = Now() - timedelta(seconds=more_than_s)
    return Generation.objects.filter(status=Status.QUEUED, created_at__lt=limit)


@cached_sql
def _late(after_s: float, most: int) -> QuerySet[Any, Any]:
    late = _waiting_for(after_s).filter(service_class__in=OF_WAITING_CLIENTS)
    return late.order_by("created_at").values_list("pk")[:most]


def _expire(generation: Generation, code: str, error: Exception) -> None:
    expire = partial(Generation.objects.expire_queued, generation.public_id, code)
    end_without_worker(generation, Status.FAILED, expire, error)


def expire_while_loading() -> None:
    """Fail those accepted while their model was loading that have waited ``LOAD_WAIT_S`` for it.

    If the load has failed since then and no other worker will load the model, they fail at once.
    So do those that waited for a slot when the model was loaded again, and that load failed.
    """
    late, failed_at = load_deadlines.passed(), _failed_loads()
    if not (late or failed_at):
        return
    known = load_deadlines.ids() if failed_at else late
    of_failed = Q(model__in=failed_at, service_class__in=OF_WAITING_CLIENTS, background=False)
    waiting = Generation.objects.filter(Q(public_id__in=known) | of_failed, status=Status.QUEUED)
    found = {generation.public_id: generation for generation in waiting}
    in_vain = [
        id_
        for id_, row in found.items()
        if failed_at.get(row.model, 0) > row.created_at.timestamp()
    ]

    def expire(public_id: str) -> None:
        row = found.get(public_id)
        # If the model is served now, the generation waits for a slot, as others do.
        if row is not None and not live_view.serving(row.model):
            if status_of(row.model) == ModelStatus.FAILED:
                _expire(row, "no_worker", LoadFailed())
            else:
                _expire(row, "model_loading", ModelLoading())
        load_deadlines.forget([public_id])

    expired = {*late, *in_vain[:_MAX_EXPIRED]}
    _each((public_id, partial(expire, public_id)) for public_id in expired)


def _failed_loads() -> dict[str, float]:
    """Return the models that no worker serves or will load by itself, and when a load failed."""
    live = live_view.workers()
    failed_at: dict[str, float] = {}
    for served in (served for worker in live for served in worker.models):
        is_offered = any(served.id in worker.offers for worker in live)
        if status_of(served.id) == ModelStatus.FAILED and not is_offered and not served.away_since:
            failed_at[served.id] = max(served.since, failed_at.get(served.id, 0))
    return failed_at


def expire_server_away() -> None:
    """Fail those that clients have waited for while the server was away, for ``SERVER_WAIT_S``.

    The time counts from when the server went away or the request came, whichever is later.
    """
    wait_s = settings.SERVER_WAIT_S
    for model in {served.id for worker in live_view.workers() for served in worker.models}:
        since = live_view.away_since(model)
        if not since or time.time() - since < wait_s:
            continue
        waiting = _waiting_for(wait_s).filter(model=model, background=False)
        late = waiting.filter(service_class__lte=ServiceClass.FOREGROUND).order_by("created_at")
        expire = partial(_expire, code="engine_unavailable", error=ModelServerUnreachable())
        _each((row.public_id, partial(expire, row)) for row in late[:_MAX_EXPIRED])


def expire_removed_models() -> None:
    """Fail those that wait for a model that neither the catalogue nor a worker has any more.

    At once if the model was in the catalogue of this process, but not what has just been accepted:
    the model may be there again, and this process not know yet. Others only after
    ``QUEUE_TIMEOUT_S``: during an upgrade this process may have an older catalogue.
    """
    known = catalogue().models
    late = [model for (model,) in _models_of_late_background(settings.QUEUE_TIMEOUT_S)]
    unknown = [m for m in late if m not in known and not live_view.having(m)]
    removed = [m for m in catalogue().removed if not live_view.having(m)]
    rows: list[Generation] = []
    if removed:
        rows += _waiting_for(2 * REFRESH_PERIOD_S).filter(model__in=removed)[:_MAX_EXPIRED]
    if unknown:
        rows += _late_background(settings.QUEUE_TIMEOUT_S).filter(model__in=unknown)
    expire = partial(_expire, code="model_not_found", error=ModelRemoved())
    _each((row.public_id, partial(expire, row)) for row in rows)


def _late_background(after_s: float) -> QuerySet[Generation]:
    # expire_waiting ends the others.
    return _waiting_for(after_s).exclude(service_class__in=OF_WAITING_CLIENTS)


@cached_sql
def _models_of_late_background(after_s: float) -> QuerySet[Any, Any]:
    return _late_background(after_s).values_list("model").distinct()


def cancel_without_readers() -> None:
    """Cancel generations without readers whose disconnect grace is over (see ``cancellation``)."""
    ids = reader_deadlines.passed()
    if not ids:
        return
    rows = Generation.objects.filter(public_id__in=ids).exclude(status__in=TERMINAL)
    unended = frozenset(rows.values_list("public_id", flat=True))

    def cancel_one(public_id: str) -> None:
        if public_id in unended:
            cancel([public_id])
        reader_deadlines.forget([public_id])

    _each((id_, partial(cancel_one, id_)) for id_ in ids)


def repeat_cancels() -> None:
    """Cancel again what was cancelled a while ago and runs: Redis may have lost the flag."""
    late = [public_id for (public_id,) in _late_cancels()]
    if late:
        cancel(late)


@cached_sql
def _late_cancels() -> QuerySet[Any, Any]:
    limit = Now() - timedelta(seconds=_CANCEL_S)
    late = Generation.objects.filter(finished_at=None, cancel_requested_at__lt=limit)
    return late.values_list("public_id")


def resend_wake_ups() -> None:
    """Send a wake-up for each generation that waits without one."""
    for model, count in _late_by_model():
        for _ in range(min(count, ENOUGH_WAKE_UPS) - count_wake_ups(model)):
            send_wake_up(model)


@cached_sql
def _late_by_model() -> QuerySet[Any, Any]:
    waiting = Generation.objects.filter(status=Status.QUEUED).values("model").order_by()
    oldest = waiting.annotate(count=Count("id"), oldest=Min("created_at"))
    late = oldest.filter(oldest__lt=Now() - timedelta(seconds=_RECEIVED_S))
    return late.values_list("model", "count")


def drop_leftover_requests() -> None:
    """Drop the requests of generations that have ended or never were; count expired logs no more.

    An ending drops its request. One is left when Redis was away at that moment, or when a process
    died between saving the request and committing its row.
    """
    _each((f"event log server {n}", partial(_drop_of, c)) for n, c in enumerate(all_clients()))


def _drop_of(client: Any) -> None:
    release_expired(client)
    patience = timedelta(seconds=settings.EVENT_LOG_PATIENCE_S + _LEFTOVER_S)
    found = open_since(client, patience.total_seconds())
    if not found:
        return
    # A generation that has just ended may be about to close its log.
    recent = Q(finished_at=None) | Q(finished_at__gt=timezone.now() - patience)
    rows = Generation.objects.filter(recent, public_id__in=found)
    unended = frozenset(rows.values_list("public_id", flat=True))
    mark_alive(client, sorted(unended))
    for public_id in set(found) - unended:
        drop_document(public_id)


def repair_inconsistent() -> None:
    """Have each app end the stored results that contradict their generations.

    Beat calls this on a thread of its own, because a table of answers may be locked.
    """
    _each(("mend", app.mend) for app in mendings())
