"""What beat does every second so that no generation is forgotten.

abandoned   running on a worker that is dead: failed
expired     waiting for longer than the queue timeout: failed
unloaded    waiting for a model that takes too long to load: failed
unattended  left by all its readers, for longer than its grace: cancelled
unheard     waiting with no bell: rung for again
gone        workers without a lease: dropped from the index

A worker that lives gives up its own orphans, with the same move.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

from django.conf import settings
from django.db.models import Count, Min
from django.utils import timezone

from worker.attendance import forget, unattended
from worker.endings import cancel_waiting, end_in_place
from worker.errors import ModelLoading, QueueTimeout, WorkerLost
from worker.event_log import request_cancel
from worker.leases import is_alive, live_view, prune
from worker.load_waits import forget_waits, overdue
from worker.models import (
    MAX_ATTEMPTS,
    TERMINAL,
    Generation,
    ServiceClass,
    Status,
    lent_connection,
)
from worker.queue import ENOUGH_BELLS, bells, drop_bells_of, ring
from worker.redis_clients import site_client

logger = logging.getLogger(__name__)

_CONFIRM_S = 2.5
"""A worker is given up when its lease is found missing twice, this far apart: longer than the time
between renewals, so that a restart of Redis, which loses all leases, kills no worker."""
_ORPHAN_S = 5.0
"""How old a claim must be before its worker can be said not to run it."""
_TENDED, _TENDED_S = "upkeep", 60
_HEARD_S = 2.0
"""How long a bell may take before a waiting generation counts as unheard."""


def tend() -> None:
    """Do all of it once."""
    give_up_abandoned()
    expire_waiting()
    expire_unloaded()
    stop_unattended()
    ring_unheard()
    drop_gone()
    site_client().set(_TENDED, time.time(), ex=_TENDED_S)


def last_tended() -> float | None:
    """Return when all of it was last done, in Unix time; None when that is a minute ago."""
    at: Any = site_client().get(_TENDED)
    return None if at is None else float(at)


def give_up_abandoned() -> None:
    """Fail what runs on workers that have been without a lease for ``_CONFIRM_S``."""
    running = Generation.objects.filter(status=Status.RUNNING)
    for worker in running.values_list("worker", flat=True).distinct():
        if not _is_dead(worker):
            continue
        logger.warning("worker %s is dead", worker)
        _give_up(running.filter(worker=worker))


def give_up_orphans(worker: str, running: frozenset[str]) -> None:
    """Fail what this live worker claimed a while ago and is not running."""
    limit = timezone.now() - timedelta(seconds=_ORPHAN_S)
    claimed = Generation.objects.filter(
        status=Status.RUNNING, worker=worker, claimed_at__lt=limit
    ).exclude(public_id__in=running)
    with lent_connection():
        _give_up(claimed)


def _give_up(generations: Iterable[Generation]) -> None:
    """Give up those that still run on the worker they are seen with.

    Those in the background are begun anew; the others are failed, and their streams ended.
    """
    for generation in generations:
        held = (generation.public_id, generation.worker)
        if generation.background and generation.attempt < MAX_ATTEMPTS:
            if Generation.objects.requeue(*held):
                ring(generation.model)
            continue
        fail = partial(Generation.objects.fail_abandoned, *held, "worker_lost")
        end_in_place(generation, Status.FAILED, fail, WorkerLost())


def expire_waiting() -> None:
    """Fail what somebody has waited for longer than ``QUEUE_TIMEOUT_S``."""
    limit = timezone.now() - timedelta(seconds=settings.QUEUE_TIMEOUT_S)
    waiting = Generation.objects.filter(
        status=Status.QUEUED, service_class=ServiceClass.FOREGROUND, created_at__lt=limit
    )
    for generation in waiting:
        expire = partial(Generation.objects.expire_queued, generation.public_id, "queue_timeout")
        end_in_place(generation, Status.FAILED, expire, QueueTimeout())


def stop_unattended() -> None:
    """Stop what nobody has read for longer than its grace (see ``worker.attendance``)."""
    left = unattended()
    if not left:
        return
    going_on = Generation.objects.filter(public_id__in=left).exclude(status__in=TERMINAL)
    for public_id in going_on.values_list("public_id", flat=True):
        request_cancel(public_id)
    cancel_waiting(left)
    forget(left)


def expire_unloaded() -> None:
    """Fail what was accepted while its model was loading, and has waited ``LOAD_WAIT_S`` for it."""
    late = overdue()
    for generation in Generation.objects.filter(public_id__in=late, status=Status.QUEUED):
        if live_view.serving(generation.model):
            continue  # It waits for a slot now, as others do.
        expire = partial(Generation.objects.expire_queued, generation.public_id, "model_loading")
        end_in_place(generation, Status.FAILED, expire, ModelLoading())
    if late:
        forget_waits(late)


def ring_unheard() -> None:
    """Ring once for each generation that waits with no bell."""
    waiting = Generation.objects.filter(status=Status.QUEUED).values("model")
    heard_by = timezone.now() - timedelta(seconds=_HEARD_S)
    for row in waiting.annotate(count=Count("id"), oldest=Min("created_at")):
        if row["oldest"] < heard_by:
            for _ in range(min(row["count"], ENOUGH_BELLS) - bells(row["model"])):
                ring(row["model"])


def drop_gone() -> None:
    """Drop the workers without a lease from the index, and the bells that were rung for them."""
    for worker in prune():
        drop_bells_of(worker)


def _is_dead(worker: str) -> bool:
    """Whether the lease is missing now and was missing ``_CONFIRM_S`` ago."""
    client, key = site_client(), f"suspect:{worker}"
    if is_alive(worker):
        client.delete(key)
        return False
    now_s, now_us = _redis_time(client)
    now = now_s + now_us / 1e6
    client.set(key, now, nx=True, ex=60)
    since: Any = client.get(key)
    return since is not None and now - float(since) >= _CONFIRM_S


def _redis_time(client: Any) -> tuple[int, int]:
    time: tuple[int, int] = client.time()
    return time
