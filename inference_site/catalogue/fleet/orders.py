"""Orders of operators to workers: rows of what each worker should do, and hints to read them.

A worker carries out its orders, marks them as seen, and announces the result in its lease
(``worker.runtime.runtime``). It reads its rows every 2 s, and at once after a hint in Redis; so a
lost hint delays an order, and does not lose it. A newer order replaces the one before it for the
same worker and model. Orders end with the process of their worker: the one that replaces it has
another id.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import redis.exceptions
from django.db import connection, transaction
from django.db.models import QuerySet
from django.db.models.functions import Now

from inference_site.catalogue.model_store.models import OrderState, WorkerOrder
from inference_site.core.storage.redis import site_client

ALL = ""
"""The worker of an order to all workers, also to those that start later."""
READ_ORDERS, STORE_LOG = "orders", "log:"
"""Hints: read the orders; store the log of the server of the model that follows."""
_SEEN_WITHIN_S = 1.0
_PENDING = timedelta(seconds=30)
"""After this time an order that its worker has not seen does not keep others from being given."""
_KEPT = timedelta(days=1)
"""For how long the orders of a worker without a lease are kept; it may only be frozen."""
_POLL_S = 0.02
_LOG_TTL_S = 30
_LOG_LINES = 100
_LOCK = f"SELECT pg_advisory_xact_lock({0x1F5A0006})"


def give(
    state: OrderState, workers: Collection[str], model: str = "", live: Collection[str] = ()
) -> None:
    """Give an order to each of these workers, and wait until they have seen it, at most 1 s.

    Delete old orders of workers that are not ``live``.
    """
    with transaction.atomic():
        old = WorkerOrder.objects.filter(ordered_at__lt=Now() - _KEPT)
        old.exclude(worker__in=[*live, ALL]).delete()
        _write(state, workers, model)
    _hint_and_wait(workers, model)


def give_load_once(worker: str, model: str) -> str:
    """Order a worker to load a model, unless a worker has such an order that it has not seen.

    Return the worker that has the order.
    """
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(_LOCK)
        if (pending := loading_worker(model)) is not None:
            return pending
        _write(OrderState.LOADED, [worker], model)
    _hint_and_wait([worker], model)
    return worker


def _write(state: OrderState, workers: Collection[str], model: str) -> None:
    WorkerOrder.objects.bulk_create(
        [WorkerOrder(worker=worker, model_id=model, state=state) for worker in workers],
        update_conflicts=True,
        unique_fields=["worker", "model_id"],
        update_fields=["state", "ordered_at", "seen_at"],
    )


def _hint_and_wait(workers: Collection[str], model: str) -> None:
    def hint() -> None:
        with suppress(redis.exceptions.RedisError):  # They read their orders a little later.
            for worker in workers:
                site_client().publish(channel(worker), READ_ORDERS)

    transaction.on_commit(hint)
    unseen = _pending(model).filter(worker__in=workers)
    until = time.monotonic() + _SEEN_WITHIN_S
    while not connection.in_atomic_block and time.monotonic() < until and unseen.exists():
        time.sleep(_POLL_S)


def _pending(model: str) -> QuerySet[WorkerOrder]:
    recent = WorkerOrder.objects.filter(seen_at=None, ordered_at__gt=Now() - _PENDING)
    return recent.filter(model_id=model).exclude(worker=ALL)


def loading_worker(model: str) -> str | None:
    """Return the worker that was ordered to load this model and has not seen the order yet."""
    loads = _pending(model).filter(state=OrderState.LOADED)
    return loads.values_list("worker", flat=True).first()


def is_pending(model: str) -> bool:
    """Whether a worker has an order for this model that it has not seen yet."""
    return _pending(model).exists()


def cancel_loads(model: str) -> None:
    """Delete the orders to load a model that no worker has seen yet."""
    WorkerOrder.objects.filter(model_id=model, state=OrderState.LOADED, seen_at=None).delete()


def orders_of(worker: str) -> list[WorkerOrder]:
    """Return the orders of a worker and those to all workers, the oldest first."""
    return list(WorkerOrder.objects.filter(worker__in=(worker, ALL)).order_by("ordered_at", "pk"))


def mark_seen(orders: Sequence[WorkerOrder]) -> None:
    """Record that the worker of these orders carries them out, unless they were replaced."""
    for order in orders:
        same = WorkerOrder.objects.filter(pk=order.pk, ordered_at=order.ordered_at)
        same.update(seen_at=Now())


def unloaded_everywhere() -> frozenset[str]:
    """Return the models that were unloaded from all workers and not loaded since."""
    orders = WorkerOrder.objects.filter(worker=ALL, state=OrderState.UNLOADED)
    return frozenset(orders.values_list("model_id", flat=True))


def note_loaded(model: str) -> None:
    """Record that a worker has loaded the model, so it is no longer unloaded everywhere."""
    WorkerOrder.objects.filter(worker=ALL, model_id=model).delete()


def channel(worker: str) -> str:
    """Return the channel in Redis on which a worker gets hints."""
    return f"worker:{worker}:hints"


def server_log(worker: str, model: str) -> list[str]:
    """Return the stored lines of a model's server, and ask its worker to store the latest ones.

    The lines may contain what clients sent, so only people who may change generations see them.
    """
    try:
        site_client().publish(channel(worker), f"{STORE_LOG}{model}")
        log: Any = site_client().get(_log_key(worker, model))
    except redis.exceptions.RedisError:
        return []
    return [] if log is None else log.decode(errors="replace").splitlines()


def store_server_log(worker: str, model: str, lines: Sequence[str]) -> None:
    """Store the last lines of a model's server for some seconds."""
    site_client().set(_log_key(worker, model), "\n".join(lines[-_LOG_LINES:]), ex=_LOG_TTL_S)


def _log_key(worker: str, model: str) -> str:
    return f"server-log:{worker}:{model}"
