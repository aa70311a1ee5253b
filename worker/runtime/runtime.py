"""What a worker process holds: its models, its publisher and its lease."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace

import redis.exceptions
from django.conf import settings

from inference_site.catalogue.catalogue import Changes, catalogue
from inference_site.catalogue.engines.registry import LIBRARIES
from inference_site.domain.errors import EngineLoadError
from inference_site.domain.model_spec import ModelSpec
from inference_site.fleet import adapters, fleet
from inference_site.fleet.commands import Command, Listener
from inference_site.fleet.leases import (
    LEASE_S,
    Lease,
    LiveWorker,
    ModelReport,
    ModelState,
    live_workers,
)
from inference_site.generations.maintenance import attempt, give_up_orphans
from inference_site.process_lifecycle import notify, notify_stopping, predecessor_runs
from worker.runtime.children.child_workers import ChildWorkers, ParentLink
from worker.runtime.children.fork_server import ChildOrder, ForkServer
from worker.runtime.children.idle import IdleWatch
from worker.runtime.hooks import check_hooks
from worker.runtime.host.memory import devices, read_ahead
from worker.runtime.host.state import host_state, process_memory_bytes
from worker.runtime.publisher import Publisher
from worker.runtime.runs import Runs
from worker.runtime.served_model import ServedModel
from worker.runtime.watchdog import Watchdog

logger = logging.getLogger(__name__)

_ORPHANS_S = 10.0
_STOPPING_S = 5.0
_PARENT_S = 5.0
_TELLING_S = 5.0
_PREDECESSOR_ENDS_S = 30.0
_POLL_S = 0.2
_UNREAD = "The worker reads no wake-ups; it is connecting to the broker again."
_BUILDS_BYTES_PER_S = 200e6
"""How fast an engine is built of a file in memory, at the least. Until it is, the lease may not be
renewed: libraries keep the thread that does so from running."""


class Runtime:
    """One worker process. ``start`` before the first task, ``stop`` after the last.

    ``role`` is the order of a child worker, or what forks the child workers of this one; without
    it, all models are in this process.
    """

    def __init__(self, specs: list[ModelSpec], role: ForkServer | ChildOrder | None = None) -> None:
        self.id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self._started_at = time.time()
        self._order = role if isinstance(role, ChildOrder) else None
        self._parent = ParentLink(self._order.link) if self._order else None
        self._models = {spec.id: ServedModel(spec, self._changed, self._announce) for spec in specs}
        self._lacking = set(self._models)
        self._returning = set(self._models)
        """The models that a worker in the place of this one would serve too."""
        self._publisher = Publisher()
        self._runs = Runs(self.id, self._publisher, lambda: self._takes_nothing, self._changed)
        self._lease = Lease(self.id, self.described)
        self._listener = Listener(self.id, self.obey)
        self._idle_watches = [
            IdleWatch(model, self._tell_leaving, _end_gently)
            for model in self._models.values()
            if self._order and self._order.may_idle
        ]
        server = role if isinstance(role, ForkServer) else None
        self._child_workers = ChildWorkers(self.id, server, self)
        self._apart = [] if server is None else _apart(specs)
        self._watchdog = Watchdog(self._steps, self._give_up, settings.ENGINE_STALL_S)
        self._is_up = self._is_announced = self._is_draining = self._is_ending = False
        self._is_replaced = self._tells_end = False
        self._reads_wake_ups = True
        self._ending = threading.Thread(target=self._begin_end, name="end", daemon=True)
        self._stopped = threading.Event()
        self.on_change: Callable[[], None] = lambda: None
        """Called, from any thread, when other models may be open than before."""

    def start(self) -> None:
        """Announce the models and load them, one after the other; those in child workers later.

        Return when one at least takes work. Raise EngineLoadError when none of them can be loaded,
        and ImproperlyConfigured for a bad hook. A model that cannot be loaded beside others that
        can is announced as failed.
        """
        check_hooks()
        self._lease.start()
        if self._parent:
            self._parent.watch(self.end_now)
            self._parent.tell("announced")
        self._await_memory()
        try:
            self._load_all()
        except EngineLoadError as exc:
            if self._parent:  # It tells of the failure before this lease is gone.
                self._parent.tell("failed", str(exc))
                self._parent.gone.wait(_PARENT_S)
            self._lease.stop()
            raise
        self._publisher.start()
        self._is_up = True
        self._lease.renew()
        self._is_announced = True
        self._note_restarted([id_ for id_, m in tuple(self._models.items()) if m.is_loaded])
        if self._parent:
            self._parent.tell("loaded")
        for watch in self._idle_watches:
            watch.start()
        self._listener.start()
        threading.Thread(target=self._watch_orphans, name="orphans", daemon=True).start()
        self._watchdog.start()

    @property
    def child_worker_ports(self) -> dict[str, int]:
        """The ports of the metrics of child workers on this host, by model."""
        return self._child_workers.metrics_ports

    def lacking(self) -> list[str]:
        """Return the models it was started with that have never been ready when this was asked.

        None is ready before the lease says so: until then no request would find it. While wake-ups
        are not read, none is.
        """
        if not self._reads_wake_ups:
            return sorted(self._models)
        if not self._is_announced:
            return sorted(self._lacking)
        models = [self._report(model) for model in tuple(self._models.values())]
        ready = {model.id for model in models if model.state == ModelState.READY}
        self._lacking -= ready | self._child_workers.loaded
        return sorted(self._lacking)

    @property
    def lag_s(self) -> float:
        """How long the oldest frame waits that is not in the event log, in seconds."""
        return self._publisher.lag_s

    def open_models(self) -> list[str]:
        """Return the models of which a generation would be taken now."""
        return [id_ for id_, model in tuple(self._models.items()) if self._would_take(model)]

    def expect(self, model_id: str) -> bool:
        """Hold a slot of this model for a wake-up until ``serve`` is called for it.

        Return whether one generation more of it would be taken.
        """
        model = self._models.get(model_id)
        if model is None:
            return False
        model.expect()
        return self._would_take(model)

    def _would_take(self, model: ServedModel) -> bool:
        return model.is_open and self._runs.is_open and not self._takes_nothing

    @property
    def threads(self) -> int:
        """How many threads its models need at most to begin generations, or to run them."""
        return sum(model.threads for model in tuple(self._models.values()))

    def _changed(self) -> None:
        self.on_change()

    def _announce(self) -> None:
        """Have the lease say at once what has changed; for threads that must not be blocked."""
        with contextlib.suppress(RuntimeError):  # The worker has stopped.
            self._runs.pool.submit(self._lease.renew)

    @property
    def _takes_nothing(self) -> bool:
        return self._is_draining or self._is_ending or self._stopped.is_set()

    def drain(self) -> None:
        """Take no new work, and give what is running ``DRAIN_TIMEOUT_S`` to end by itself."""
        if self._is_ending:
            return
        self._is_ending = True
        for watch in self._idle_watches:
            watch.stop()
        self._ending.start()
        timer = threading.Timer(settings.DRAIN_TIMEOUT_S, self._publisher.stop_all)
        timer.daemon = True
        timer.start()

    def _begin_end(self) -> None:
        """Tell everybody that this worker takes nothing more.

        Requests for its models are to wait for the next worker before its lease says so.
        """
        logger.info("draining for %d s at most", settings.DRAIN_TIMEOUT_S)
        self._is_replaced = notify_stopping()
        if self._is_replaced:
            attempt("restart", lambda: fleet.note_restart(self._returning))
        self._tells_end = True
        self._child_workers.terminate()
        self._lease.renew()

    def cut(self) -> None:
        """Stop what is running, without the rest of its time."""
        self._in_background(lambda _: self._publisher.stop_all(), "")
        self._child_workers.interrupt()

    def stop(self) -> None:
        """Send out what is left and give the lease back."""
        self._stopped.set()
        self._watchdog.stop()
        self._listener.stop()
        if self._is_ending:
            self._ending.join(_TELLING_S)
        self._child_workers.wait(settings.DRAIN_TIMEOUT_S)
        self._runs.wait(settings.DRAIN_TIMEOUT_S + _STOPPING_S)
        self._publisher.stop()
        self._lease.stop()
        if self._is_replaced:
            attempt("restart", self._note_served_by_others)
        for model in tuple(self._models.values()):
            model.close()

    def _note_restarted(self, models: Collection[str]) -> None:
        attempt("restart", lambda: fleet.note_restarted(models))

    def _note_served_by_others(self) -> None:
        """Have requests not wait for the restart of a model that another worker serves already."""
        live = live_workers()
        self._note_restarted([id_ for id_ in self._returning if any(w.serves(id_) for w in live)])

    def _await_memory(self) -> None:
        """On a host with GPUs, load nothing until the worker that this one replaces has ended.

        Their memory rarely has room for a model twice. The next requests wait meanwhile.
        """
        if not predecessor_runs() or not host_state().gpus:
            return
        notify("ready")  # The supervisor stops the other one now.
        until = time.monotonic() + settings.DRAIN_TIMEOUT_S + _PREDECESSOR_ENDS_S
        while predecessor_runs() and time.monotonic() < until:
            time.sleep(_POLL_S)

    def tell_supervisor_when_loaded(self) -> None:
        """Tell the supervisor once each model is loaded, or one cannot be."""
        threading.Thread(target=self._tell_supervisor, name="loaded", daemon=True).start()

    def _tell_supervisor(self) -> None:
        while not self._stopped.wait(_POLL_S):
            states = {id_: m.state for id_, m in tuple(self._models.items()) if not m.is_loaded}
            if ModelState.FAILED in states.values():
                notify("failed")
                return
            if not states and not self.lacking():
                notify("ready")
                return

    def note_consumer(self, *, reads: bool) -> None:
        """Announce that the wake-ups of this process are not read, or are read again.

        Its models are not ready meanwhile. The lease goes on, and with it what runs.
        """
        self._reads_wake_ups = reads
        self._announce()

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs in this process."""
        return not self._runs.attempts

    def serve(self, model_id: str) -> None:
        """Run waiting generations of the model until none waits or no slot is free."""
        model = self._models.get(model_id)
        if model is None:
            logger.error("a wake-up for %s, which this worker does not serve", model_id)
            return
        self._runs.serve(model)

    def obey(self, command: Command) -> None:
        """Do what an operator wants; the lease says what came of it."""
        match command.do:
            case "load":
                self._load_beside(command.model)
            case "unload":
                self._in_background(self._unload, command.model)
            case "reload":
                self._in_background(self._load_anew, command.model)
            case "drain":
                self._is_draining = True
            case "resume":
                self._is_draining = False
        self._changed()
        self._lease.renew()

    def take_up(self, changes: Changes, *, takes_new: bool) -> None:
        """Serve the models as they are described now; ``takes_new``: also those that are new."""
        for spec in changes.gone:
            self._returning.discard(spec.id)
            self._in_background(self._leave, spec.id)
        for old, new in changes.changed:
            if new.runs_otherwise_than(old):
                self._in_background(self._load_anew, new.id)
        for spec in changes.new if takes_new else ():
            self._returning.add(spec.id)
            self.obey(Command("load", spec.id))

    def _in_background(self, act: Callable[[str], None], model_id: str) -> None:
        threading.Thread(target=act, args=(model_id,), daemon=True).start()

    def _leave(self, model_id: str) -> None:
        """Serve a model no more, in this process or in a child worker."""
        self._child_workers.stop(model_id)
        self._unload(model_id)

    def _load_anew(self, model_id: str) -> None:
        """Load a model again, if this worker has it or has failed to load it."""
        if model_id in self._child_workers.models:
            self._tell_of(model_id, "", has_failed=False)  # It is loading, until the child says so.
            self._child_workers.restart(model_id)
        elif model_id in self._models:
            self._unload(model_id)
            self.obey(Command("load", model_id))

    def described(self) -> LiveWorker:
        """Return what the lease says."""
        models = [self._report(model) for model in tuple(self._models.values())]
        return LiveWorker(
            self.id,
            tuple(models),
            host=socket.gethostname(),
            started_at=self._started_at,
            is_draining=self._is_draining or self._tells_end or self._stopped.is_set(),
            devices=devices(),
            loadable=self._loadable(),
            parent=self._order.parent if self._order else "",
            release=settings.VERSION,
            state=None if self._order else host_state(),
            memory_bytes=process_memory_bytes(),
        )

    def _report(self, model: ServedModel) -> ModelReport:
        """Return what is said of a model: it takes work once all are loaded, and wake-ups read."""
        report = model.report
        if report.state != ModelState.READY or (self._is_up and self._reads_wake_ups):
            return report
        reason = report.reason if self._reads_wake_ups else _UNREAD
        return replace(report, state=ModelState.LOADING, reason=reason)

    def _loadable(self) -> tuple[str, ...]:
        """Return which other models of the catalogue this host has the files of."""
        if not (self._child_workers.can_start and self._is_up) or self._takes_nothing:
            return ()
        models = tuple(self._models.items())
        taken = {id_ for id_, m in models if m.is_loaded or m.state != ModelState.FAILED}
        taken |= self._child_workers.models
        specs = catalogue().models.values()
        return tuple(
            spec.id
            for spec in specs
            if spec.id not in taken and (spec.file is None or spec.file.is_file())
        )

    def _load_all(self) -> None:
        for id_ in self._apart:
            self._child_workers.start(id_, may_idle=False)
        own = [model for id_, model in tuple(self._models.items()) if id_ not in self._apart]
        for model in own:
            try:
                self._load(model)
            except EngineLoadError as exc:
                logger.error("%s", exc)  # It says all there is to say.
        if any(model.is_loaded for model in own):
            return
        self._child_workers.wait_for_one()
        models = tuple(self._models.values())
        if models and not self._child_workers.models:
            raise EngineLoadError("\n".join(model.report.reason for model in models))

    def _load(self, model: ServedModel) -> None:
        spec = model.spec
        if spec.file is not None:
            for model.progress in read_ahead(spec.file):
                pass
        size = spec.file.stat().st_size if spec.file and spec.file.is_file() else 0
        self._lease.renew(LEASE_S + round(size / _BUILDS_BYTES_PER_S))
        try:
            model.load()
        finally:
            self._lease.renew(LEASE_S)
        fleet.clear_pending_load(spec.id)
        logger.info("loaded model %s on %s (%d slots)", spec.id, spec.engine, spec.slots)

    def _load_beside(self, model: str) -> None:
        """Load a model in a process of its own."""
        spec = catalogue().find(model)
        if spec is None or spec.id not in self._loadable():
            logger.warning("cannot load %s: unknown, loaded already, or without its file", model)
            fleet.clear_pending_load(model)  # Of a request that saw an older lease.
            return
        self._models[spec.id] = ServedModel(spec)  # Until the child worker announces it.
        self._child_workers.start(spec.id)
        self._lease.renew()
        fleet.note_announced_load(spec.id)

    def _unload(self, model_id: str) -> None:
        """Drop a model; the process of a child worker ends with it."""
        model = self._models.get(model_id)
        if model is None:
            return
        if self._parent:
            _end_gently()
            return
        self._child_workers.stop(model_id)
        if not model.drain(settings.DRAIN_TIMEOUT_S):
            self._runs.stop(model)
        if not model.drain(_STOPPING_S):
            logger.error("model %s is not dropped: what runs on it does not stop", model_id)
            return
        self._models.pop(model_id, None)
        model.close()
        self._lease.renew()
        logger.info("dropped model %s", model_id)

    def on_child_announced(self, model: str) -> None:
        """Leave it to the child's own lease to tell of the model."""
        self._models.pop(model, None)
        self._lease.renew()

    def on_child_gone(self) -> None:
        """Tell which models may be loaded now."""
        if not self._is_ending:
            self._lease.renew()

    def on_child_failed(self, model: str, reason: str) -> None:
        """Announce that a child worker could not load its model.

        If adapters were added to it, it is loaded again without the newest of them.
        """
        logger.error("%s: %s", model, reason)
        dropped = None
        with contextlib.suppress(redis.exceptions.RedisError):
            dropped = adapters.remove_newest(model)
        self._tell_of(model, reason, has_failed=dropped is None)
        if dropped is not None:
            logger.error("%s: it is loaded without the adapter %s", model, dropped)
            self._child_workers.restart(model)

    def on_child_crashed(self, model: str, reason: str) -> None:
        """Announce that a model is being loaded again."""
        logger.error("%s: %s It is loaded again.", model, reason)
        self._tell_of(model, reason, has_failed=False)

    def _tell_of(self, model_id: str, reason: str, *, has_failed: bool) -> None:
        spec = catalogue().find(model_id)
        if spec is None:
            return
        model = self._models[spec.id] = ServedModel(spec, reason=reason)
        if has_failed:
            model.fail(reason)
        self._lease.renew()

    def _tell_leaving(self, is_leaving: bool) -> None:
        self._lease.renew()
        if self._parent:
            self._parent.tell("leaving" if is_leaving else "loaded")

    def _steps(self) -> dict[str, int]:
        models = tuple(self._models.values())
        return {model.spec.id: steps for model in models if (steps := model.steps) is not None}

    def _give_up(self, model_id: str) -> None:
        """End this process now: the engine of a model stands still, and nothing can stop it."""
        logger.critical(
            "the engine of %s has made no step for %d s; ending this process",
            model_id,
            settings.ENGINE_STALL_S,
        )
        self.end_now()

    def end_now(self) -> None:
        """End this process as if it had been killed, but give back its lease."""
        self._lease.stop()
        os._exit(1)

    def _watch_orphans(self) -> None:
        """Give up rows that say they run here and do not: a claim whose reply was lost, say."""
        while not self._stopped.wait(_ORPHANS_S):
            attempt("orphans", lambda: give_up_orphans(self.id, lambda: self._runs.attempts))


def _end_gently() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _apart(specs: list[ModelSpec]) -> list[str]:
    """Return the models that get a process of their own: those that a library runs.

    The only model stays in the worker, unless others may come on demand: there is nothing else that
    its crash could harm.
    """
    if len(specs) == 1 and not settings.LOAD_ON_DEMAND:
        return []
    return [spec.id for spec in specs if spec.engine in LIBRARIES]
