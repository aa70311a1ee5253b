"""Runtime: the state of a worker process: its models, its runs, its publisher and its lease.

A thread reads the orders to this worker and has each carried out once.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import django.db
import redis.exceptions
from django.conf import settings

from inference_site.catalogue.fleet import fleet, orders
from inference_site.catalogue.fleet.leases import (
    HOST_MEMORY,
    HostState,
    Lease,
    LiveWorker,
    ModelReport,
    ModelState,
    live_workers,
)
from inference_site.catalogue.fleet.orders import store_server_log
from inference_site.catalogue.model_store.models import OrderState, WorkerOrder
from inference_site.core.domain.errors import EngineLoadError
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.host import Device, memory_bytes
from inference_site.core.observability.outages import OutageLog
from inference_site.core.process_lifecycle import notify, notify_stopping, predecessor_runs
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.core.storage.redis import site_client
from inference_site.runs.maintenance import end_orphans, try_and_log
from worker.engines.openai_upstream.event_loop import event_loop
from worker.model_servers.nvml import gpus
from worker.runtime.hooks import check_hooks
from worker.runtime.loading import STOP_S, ModelLoader, in_background
from worker.runtime.publisher import Publisher
from worker.runtime.runs import Runs
from worker.runtime.served_model import ServedModel

logger = logging.getLogger(__name__)

_READ_ORDERS_S = 2.0
"""How late an order is read whose hint was lost."""
_RETRY_HINTS_S = 0.5
_STOP_ORDERS_S = 1.0
_ORPHANS_S = 10.0
_CHECK_LOOP_S = 1.0
_ANNOUNCE_END_S = 5.0
_PREDECESSOR_ENDS_S = 30.0
_POLL_S = 0.2
_AWAY_S = 5.0
"""After this time a server that has not answered since the load counts as down."""
_UNREAD = "The worker reads no wake-ups; it is connecting to the broker again."


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
        self._outage = OutageLog(logger, "orders")
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
            self._thread.join(_STOP_ORDERS_S)

    def _main(self) -> None:
        client: Any = site_client()
        outage = OutageLog(logger, "orders: no hints")
        while not self._ended.is_set():
            try:
                with client.pubsub(ignore_subscribe_messages=True) as hints:
                    hints.subscribe(orders.channel(self._worker))
                    outage.succeeded()
                    while not self._ended.is_set():
                        self._read()
                        hint = hints.get_message(timeout=_READ_ORDERS_S)
                        text = "" if hint is None else hint["data"].decode()
                        if text.startswith(orders.STORE_LOG):
                            self._store_log(text.removeprefix(orders.STORE_LOG))
            except redis.exceptions.RedisError as exc:
                outage.failed(exc)
                self._read()
                self._ended.wait(_RETRY_HINTS_S)

    def _read(self) -> None:
        """Read the orders, and carry out the new ones."""
        try:
            with release_connection_after():
                found = orders.orders_of(self._worker)
                of_all = (order for order in found if order.worker == orders.ALL)
                self.unloaded = tuple(order.model_id for order in of_all)
                new = [o for o in found if o.worker != orders.ALL and o.seen_at is None]
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
            self._outage.succeeded()
        except django.db.Error as exc:
            self._outage.failed(exc)
        except Exception:  # The thread must survive.
            logger.exception("orders: cannot be read")


class Runtime:
    """One worker process. ``start`` before the first task, ``stop`` after the last."""

    def __init__(self, specs: list[ModelSpec]) -> None:
        self.id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self._started_at = time.time()
        self.stopped = threading.Event()
        self.is_up = self.is_announced = self.is_draining = False
        """Whether models accept runs, whether the lease says so, and whether an operator has
        drained the worker."""
        self._is_ending = self._is_replaced = self._announces_end = False
        self._reads_wake_ups = True
        self.loader = ModelLoader(self, specs)
        self._publisher = Publisher()
        self.runs = Runs(
            self.id,
            self._publisher,
            lambda: self.accepts_work,
            self.changed,
            self.loader.models.get,
        )
        self.lease = Lease(self.id, self.described, lambda: self.runs.unsent_tokens)
        self.orders = Orders(self.id, self.execute, self.store_server_log)
        self._ending = threading.Thread(target=self._announce_end, name="end", daemon=True)
        self.on_change: Callable[[], None] = lambda: None
        """Called, from any thread, when the list of open models may have changed."""

    def start(self) -> None:
        """Announce the models and start to load them.

        Return when at least one accepts runs. Raise EngineLoadError when none of them can be
        loaded, and ImproperlyConfigured for a bad hook. A model that cannot be loaded beside others
        that can is announced as failed.
        """
        check_hooks()
        self.lease.start()
        self._await_memory()
        try:
            self.loader.start()
        except EngineLoadError:
            self.lease.stop()
            raise
        self._publisher.start()
        self.is_up = True
        self.lease.renew()
        self.is_announced = True
        self.note_restarted([id_ for id_, m in tuple(self.loader.models.items()) if m.is_loaded])
        self.orders.start()
        threading.Thread(target=self._watch_orphans, name="orphans", daemon=True).start()
        self.loader.watch()
        if settings.ENGINE_STALL_S:
            threading.Thread(target=self._watch_loop, name="upstreams watch", daemon=True).start()

    def _await_memory(self) -> None:
        """On a host with GPUs, wait until the worker that this one replaces has ended.

        GPU memory rarely has room for a model twice. Requests wait meanwhile.
        """
        if not predecessor_runs() or not host_state().gpus:
            return
        notify("ready")  # The supervisor stops the other one now.
        until = time.monotonic() + settings.DRAIN_TIMEOUT_S + _PREDECESSOR_ENDS_S
        while predecessor_runs() and time.monotonic() < until:
            time.sleep(_POLL_S)

    def drain(self) -> None:
        """Accept no new work for the rest of the process; runs get ``DRAIN_TIMEOUT_S`` to end."""
        if self._is_ending:
            return
        self._is_ending = True
        self.loader.stop_idle_watches()
        self._ending.start()
        timer = threading.Timer(settings.DRAIN_TIMEOUT_S, self._publisher.stop_all)
        timer.daemon = True
        timer.start()

    def _announce_end(self) -> None:
        """Announce that this worker ends.

        First, requests are made to wait for the worker that replaces it; then the lease says so.
        """
        logger.info("draining for %d s at most", settings.DRAIN_TIMEOUT_S)
        self._is_replaced = notify_stopping()
        if self._is_replaced:
            try_and_log("restart", lambda: fleet.note_restart(self.loader.after_restart))
        self._announces_end = True
        self.lease.renew()

    def stop_runs(self) -> None:
        """Stop all runs before their time to drain is over."""
        in_background(self._publisher.stop_all)

    def stop(self) -> None:
        """End the runs, publish the remaining frames, give up the lease, and free all memory."""
        self.stopped.set()
        self.orders.stop()
        if self._is_ending:
            self._ending.join(_ANNOUNCE_END_S)
        self.runs.wait(settings.DRAIN_TIMEOUT_S + STOP_S)
        self._publisher.stop()
        self.lease.stop()
        if self._is_replaced:

            def note_served_by_others() -> None:
                live, models = live_workers(), self.loader.after_restart
                self.note_restarted([id_ for id_ in models if any(w.serves(id_) for w in live)])

            try_and_log("restart", note_served_by_others)
        self.loader.close()

    def note_restarted(self, models: Collection[str]) -> None:
        """Record that requests need not wait for a restart of these models."""
        try_and_log("restart", lambda: fleet.note_restarted(models))

    def end_now(self) -> None:
        """End this process as if it were killed, but give up its lease."""
        self.lease.stop()
        os._exit(1)

    @property
    def is_ending(self) -> bool:
        """Whether the process ends."""
        return self._is_ending or self.stopped.is_set()

    @property
    def accepts_work(self) -> bool:
        """Whether runs may start."""
        return not (self.is_draining or self.is_ending)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs in this process."""
        return not self.runs.attempts

    @property
    def threads(self) -> int:
        """The most threads that the generations of its models need at once."""
        return sum(model.threads for model in tuple(self.loader.models.values()))

    def open_models(self) -> list[str]:
        """Return the models that accept another generation now."""
        models = tuple(self.loader.models.items())
        return [id_ for id_, model in models if model.is_open and self.accepts_work]

    def reserve_slot(self, model_id: str) -> bool:
        """Reserve a slot of this model for a wake-up until ``serve`` is called for it.

        Return whether the model accepts another generation after that.
        """
        model = self.loader.models.get(model_id)
        if model is None:
            return False
        model.reserve_slot()
        return model.is_open and self.accepts_work

    def serve(self, model_id: str) -> None:
        """Run waiting generations of the model until none waits or no slot is free."""
        model = self.loader.models.get(model_id)
        if model is None:
            logger.error("a wake-up for %s, which this worker does not serve", model_id)
            return
        self.runs.serve(model)

    def changed(self) -> None:
        """Report that the list of open models may have changed."""
        self.on_change()

    def not_ready(self) -> list[str]:
        """Return the models of the start that have never been ready when this was called.

        None is ready before the lease says so, because no request finds it before that, nor while
        wake-ups are not read. A model whose server belongs to others and is down does not count
        while another model is ready.
        """
        if not self._reads_wake_ups:
            return sorted(self.loader.models)
        if self.is_announced:
            models = [self._report(model) for model in tuple(self.loader.models.values())]
            ready = {m.id for m in models if m.state == ModelState.READY}
            long_ago = time.time() - _AWAY_S
            away = {m.id for m in models if 0 < m.away_since <= long_ago}
            self.loader.never_ready -= ready | away if ready else ready
        return sorted(self.loader.never_ready)

    @property
    def lag_s(self) -> float:
        """Age of the oldest frame that is not in the event log, in seconds."""
        return self._publisher.lag_s

    def described(self) -> LiveWorker:
        """Return the content of the lease."""
        models = [self._report(model) for model in tuple(self.loader.models.values())]
        models += [model.report for model in self.loader.sleeping]
        state = host_state()
        return LiveWorker(
            self.id,
            tuple(models),
            host=socket.gethostname(),
            started_at=self._started_at,
            is_draining=self.is_draining or self._announces_end or self.stopped.is_set(),
            devices=state.gpus or ((state.memory,) if state.memory else ()),
            loadable=self.loader.loadable(),
            release=settings.VERSION,
            state=state,
            memory_bytes=process_memory_bytes(),
            labels=self.loader.replicas.labels,
            offers=self.loader.replicas.offers(),
            unloaded=self.orders.unloaded,
        )

    def _report(self, model: ServedModel) -> ModelReport:
        """Return the report of a model, as loading until the worker is up and reads wake-ups."""
        report = model.report
        if report.state == ModelState.LOADING:
            expected_s = self.loader.expected_s(model, time.time() - report.since)
            return replace(report, expected_s=expected_s)
        if report.state != ModelState.READY or (self.is_up and self._reads_wake_ups):
            return report
        reason = report.reason if self._reads_wake_ups else _UNREAD
        return replace(report, state=ModelState.LOADING, reason=reason)

    def _announce(self, act: Callable[[], None]) -> None:
        """Call a function that writes to Redis; for threads that must not block."""
        with contextlib.suppress(RuntimeError):  # The worker has stopped.
            self.runs.pool.submit(act)

    def announce_fault(self, model: ServedModel) -> None:
        """Announce that the engine of a model has a fault, or has recovered."""

        def renew() -> None:
            self.lease.renew()
            if model.state == ModelState.READY:
                self.note_restarted([model.spec.id])

        self._announce(renew)

    def announce_consumer(self, *, reads: bool) -> None:
        """Announce that this process reads no wake-ups, or reads them again.

        Its models are not ready meanwhile. The lease and the runs continue.
        """
        self._reads_wake_ups = reads
        self._announce(self.lease.renew)

    def notify_supervisor_when_loaded(self) -> None:
        """Tell the supervisor when all models are loaded, or one has failed."""

        def watch() -> None:
            while not self.stopped.wait(_POLL_S):
                models = tuple(self.loader.models.values())
                if any(model.has_failed_to_load for model in models):
                    notify("failed")
                    return
                if all(model.is_loaded for model in models) and not self.not_ready():
                    notify("ready")
                    return

        threading.Thread(target=watch, name="loaded", daemon=True).start()

    def execute(self, order: WorkerOrder) -> None:
        """Carry out an order of an operator; the lease shows the result."""
        model = self.loader.models.get(order.model_id)
        match order.state:
            case OrderState.LOADED:
                self.loader.load(order.model_id)
            case OrderState.UNLOADED:
                if order.model_id not in self.orders.unloaded:  # Another worker may load it then.
                    self.loader.replicas.unassign(order.model_id)
                if model is not None:
                    model.drain(0)  # At once, so that the lease below shows it.
                in_background(self.loader.unload, order.model_id)
            case OrderState.RELOADED:
                if model is not None:
                    model.drain(0, reloads=True)
                in_background(self.loader.reload, order.model_id)
            case OrderState.DRAINED | OrderState.ACTIVE:
                self.is_draining = order.state == OrderState.DRAINED
                if not self.is_draining:
                    self.loader.load_added()
        self.changed()
        self.lease.renew()

    def store_server_log(self, model_id: str) -> None:
        """Store the last lines of the log of a model's server for the console."""
        if model := self.loader.models.get(model_id):
            store_server_log(self.id, model_id, model.log_lines)

    def _watch_loop(self) -> None:
        """End this process when the event loop of the upstreams stalls, in a hook for example."""
        while not self.stopped.wait(_CHECK_LOOP_S):
            stall_s = settings.ENGINE_STALL_S
            if not event_loop().turned_within(stall_s):
                logger.critical("the upstreams' loop stalled for %d s; this process ends", stall_s)
                self.end_now()

    def _watch_orphans(self) -> None:
        """End rows that claim to run here and do not: the reply to their claim was lost."""
        outage = OutageLog(logger, "orphans")
        while not self.stopped.wait(_ORPHANS_S):
            try_and_log("orphans", lambda: end_orphans(self.id, lambda: self.runs.attempts), outage)


def host_state() -> HostState:
    """Return the host's processors, memory, GPUs and load."""
    return HostState(
        cpu=_cpu_name(),
        cores=os.cpu_count() or 0,
        load=round(os.getloadavg()[0], 2),
        memory=Device(HOST_MEMORY, *memory_bytes()),
        gpus=gpus(),
        python=platform.python_version(),
    )


@cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def process_memory_bytes() -> int:
    """Return the resident memory of this process, mapped files included; 0 if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
