"""The orders to this worker: a thread reads their rows, and has each carried out once."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import threading
from collections.abc import Callable
from typing import Any

import django.db
import redis.exceptions

from inference_site.catalogue.fleet import orders
from inference_site.catalogue.model_store.models import WorkerOrder
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.core.storage.redis import site_client

logger = logging.getLogger(__name__)

_PERIOD_S = 2.0
"""How late an order is read whose hint was lost."""
_RETRY_S = 0.5
_STOP_S = 1.0


class Orders:
    """Reads the orders to one worker, and carries them out one after the other.

    ``execute`` carries out an order and announces it in the lease; ``store_log`` stores the last
    lines of the log of a model's server.
    """

    def __init__(
        self,
        worker: str,
        execute: Callable[[WorkerOrder], None],
        store_log: Callable[[str], None],
    ) -> None:
        self._worker, self._execute, self._store_log = worker, execute, store_log
        self.unloaded: tuple[str, ...] = ()
        """The models that were unloaded from all workers and not loaded since."""
        self._carried_out: dict[int, dt.datetime] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._main, name="orders", daemon=True)

    def start(self) -> None:
        """Start to read orders, also those that were given before."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current order."""
        self._ended.set()
        if self._thread.is_alive():
            with contextlib.suppress(redis.exceptions.RedisError):
                site_client().publish(orders.channel(self._worker), orders.READ_ORDERS)
            self._thread.join(_STOP_S)

    def _main(self) -> None:
        client: Any = site_client()
        while not self._ended.is_set():
            try:
                with client.pubsub(ignore_subscribe_messages=True) as hints:
                    hints.subscribe(orders.channel(self._worker))
                    while not self._ended.is_set():
                        self._read()
                        self._await_hint(hints)
            except redis.exceptions.RedisError as exc:
                logger.warning("orders: no hints: %s", exc)
                self._read()
                self._ended.wait(_RETRY_S)

    def _await_hint(self, hints: Any) -> None:
        """Wait for the next hint, or until the orders are to be read without one."""
        hint = hints.get_message(timeout=_PERIOD_S)
        text = "" if hint is None else hint["data"].decode()
        if text.startswith(orders.STORE_LOG):
            self._store_log(text.removeprefix(orders.STORE_LOG))

    def _read(self) -> None:
        try:
            with release_connection_after():
                self._carry_out()
        except django.db.Error as exc:
            logger.warning("orders: %s", exc)
        except Exception:  # The thread must survive.
            logger.exception("orders: cannot be read")

    def _carry_out(self) -> None:
        found = orders.orders_of(self._worker)
        self.unloaded = tuple(order.model_id for order in found if order.worker == orders.ALL)
        new = [order for order in found if order.worker != orders.ALL and order.seen_at is None]
        for order in new:
            if self._carried_out.get(order.pk) == order.ordered_at:
                continue  # The database was away when the order was to be marked.
            logger.info("order: %s", order)
            try:
                self._execute(order)
            except Exception:
                logger.exception("orders: %s failed", order)
            self._carried_out[order.pk] = order.ordered_at
        orders.mark_seen(new)
