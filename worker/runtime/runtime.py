"""What a worker process holds: its models, its publisher and its lease."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import django.db
import redis.exceptions
from django.conf import settings
from django.db import connection

from inference_site.catalogue.catalogue import CatalogueChanges, catalogue
from inference_site.domain.errors import EngineLoadError
from inference_site.domain.model_spec import ModelSpec
from inference_site.fleet import commands, fleet
from inference_site.fleet.commands import Command, CommandListener
from inference_site.fleet.fleet import ModelStatus
from inference_site.fleet.leases import (
    Lease,
    LiveWorker,
    ModelReport,
    ModelState,
    live_workers,
)
from inference_site.generations.maintenance import attempt, give_up_orphans
from inference_site.generations.models import Generation, Status
from inference_site.model_store import adapters
from inference_site.process_lifecycle import notify, notify_stopping, predecessor_runs
from worker.engines.openai_upstream.event_loop import event_loop
from worker.runtime.hooks import check_hooks
from worker.runtime.host.memory import read_ahead
from worker.runtime.host.state import host_state, process_memory_bytes
from worker.runtime.idle import IdleWatch
from worker.runtime.load_line import LoadLine
from worker.runtime.publisher import Publisher
from worker.runtime.replicas import Replicas
from worker.runtime.residents import (
    Room,
    longest_stay_s,
    next_to_go,
    shares_gpu,
    takes_room,
)
from worker.runtime.runs import Runs
from worker.runtime.served_model import ServedModel

logger = logging.getLogger(__name__)

_ORPHANS_S = 10.0
_LOOK_S = 1.0
_WANTED_S = 1.0
_STOPPING_S = 5.0
_TELLING_S = 5.0
_PREDECESSOR_ENDS_S = 30.0
_POLL_S = 0.2
_UNREAD = "The worker reads no wake-ups; it is connecting to the broker again."


class Runtime:
    """One worker process. ``start`` before the first task, ``stop`` after the last."""

    def __init__(self, specs: list[ModelSpec]) -> None:
        self.id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self._started_at = time.time()
        self._replicas = Replicas(self, [spec.id for spec in specs])
        self._sleeping: dict[str, ServedModel] = {}
        """Those that have made room and whose servers sleep; the first for the longest time."""
        self._models = {
            spec.id: self._served(spec)
            for spec in specs
            if spec.replicas is None and self._replicas.may_host(spec)
        }
        self._lacking = set(self._models)
        self._returning = set(self._models)
        """The models that a worker in the place of this one would serve too."""
        self._publisher = Publisher()
        self._runs = Runs(self.id, self._publisher, lambda: self._takes_nothing, self._changed)
        self._lease = Lease(self.id, self.described)
        self._listener = CommandListener(self.id, self.obey)
        self._idle_watches: dict[str, IdleWatch] = {}
        self._may_idle: set[str] = set()
        """The models that were loaded at run time: they are unloaded when idle for long."""
        mib = settings.MODEL_MEMORY_MIB, settings.GPU_MEMORY_MIB
        self._room = Room(settings.MAX_LOADED_MODELS, *(n * 2**20 for n in mib))
        self._line: LoadLine[ServedModel] = LoadLine()
        self._placed: set[ServedModel] = set()
        """The models that are being loaded."""
        self._lacks_room = False
        """Whether the first of the line waits for room."""
        self._leaving: set[str] = set()
        """The models that go because others are to have them."""
        self._settled = threading.Condition()
        """Notified when a model was loaded, or could not be."""
        self._is_up = self._is_announced = self._is_draining = self._is_ending = False
        self._is_replaced = self._tells_end = False
        self._reads_wake_ups = True
        self._ending = threading.Thread(target=self._begin_end, name="end", daemon=True)
        self._stopped = threading.Event()
        self.on_change: Callable[[], None] = lambda: None
        """Called, from any thread, when other models may be open than before."""

    def _served(self, spec: ModelSpec) -> ServedModel:
        """Return a model that is to be loaded: the one that sleeps, if its entry is the same."""
        if asleep := self._sleeping.pop(spec.id, None):
            if asleep.spec == spec:
                asleep.awake()
                return asleep
            asleep.close()
        return ServedModel(spec, self._changed, self._announce_state)

    def start(self) -> None:
        """Announce the models and begin to load them.

        Return when one at least takes work. Raise EngineLoadError when none of them can be loaded,
        and ImproperlyConfigured for a bad hook. A model that cannot be loaded beside others that
        can is announced as failed.
        """
        check_hooks()
        self._lease.start()
        self._await_memory()
        self._line.read()
        self._in_background(self._load_all)
        for model in tuple(self._models.values()):
            self._load_in_turn(model)
        self._replicas.look()
        with self._settled:
            self._settled.wait_for(
                lambda: (
                    any(model.is_loaded for model in self._models.values())
                    or all(map(_has_failed, self._models.values()))
                )
            )
        models = list(self._models.values())
        if models and not any(model.is_loaded for model in models):
            self._lease.stop()
            raise EngineLoadError("\n".join(model.report.reason for model in models))
        self._publisher.start()
        self._is_up = True
        self._lease.renew()
        self._is_announced = True
        self._note_restarted([id_ for id_, m in tuple(self._models.items()) if m.is_loaded])
        self._listener.start()
        threading.Thread(target=self._watch_orphans, name="orphans", daemon=True).start()
        self._replicas.watch(self._stopped)
        threading.Thread(target=self._watch_wanted, name="wanted", daemon=True).start()
        if settings.ENGINE_STALL_S:
            threading.Thread(target=self._watch_loop, name="loop watch", daemon=True).start()

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
        self._lacking -= ready
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
        return model.is_open and not self._takes_nothing

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

    def _announce_state(self, model: ServedModel) -> None:
        """Have the lease say that a model can run nothing, or can again; as ``_announce``."""

        def tell() -> None:
            self._lease.renew()
            if model.state == ModelState.READY:
                self._note_restarted([model.spec.id])

        with contextlib.suppress(RuntimeError):  # The worker has stopped.
            self._runs.pool.submit(tell)

    @property
    def _takes_nothing(self) -> bool:
        return self._is_draining or self._is_ending or self._stopped.is_set()

    def drain(self) -> None:
        """Take no new work, and give what is running ``DRAIN_TIMEOUT_S`` to end by itself."""
        if self._is_ending:
            return
        self._is_ending = True
        for watch in tuple(self._idle_watches.values()):
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
        self._lease.renew()

    def cut(self) -> None:
        """Stop what is running, without the rest of its time."""
        self._in_background(self._publisher.stop_all)

    def stop(self) -> None:
        """Send out what is left and give the lease back."""
        self._stopped.set()
        self._listener.stop()
        if self._is_ending:
            self._ending.join(_TELLING_S)
        self._runs.wait(settings.DRAIN_TIMEOUT_S + _STOPPING_S)
        self._publisher.stop()
        self._lease.stop()
        if self._is_replaced:
            attempt("restart", self._note_served_by_others)
        models = (*self._models.values(), *self._sleeping.values())
        with ThreadPoolExecutor(max(1, len(models))) as pool:
            list(pool.map(ServedModel.close, models))

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
                self._replicas.unloaded(command.model)
                self._in_background(self._unload, command.model)
            case "reload":
                self._in_background(self._load_anew, command.model)
            case "log":
                self._tell_log(command.model)
                return
            case "drain":
                self._is_draining = True
            case "resume":
                self._is_draining = False
        self._changed()
        self._lease.renew()

    def _tell_log(self, model_id: str) -> None:
        if model := self._models.get(model_id):
            with contextlib.suppress(redis.exceptions.RedisError):
                commands.store_server_log(self.id, model_id, model.log_lines)

    def take_up(self, changes: CatalogueChanges, *, takes_new: bool) -> None:
        """Serve the models as they are described now; ``takes_new``: also those that are new."""
        for spec in changes.removed:
            self._returning.discard(spec.id)
            self._in_background(self._unload, spec.id)
        for old, new in changes.changed:
            if new.runs_otherwise_than(old):
                self._in_background(self._load_anew, new.id)
            is_elsewhere = new.id not in self._models and self._replicas.is_told(new.id)
            if is_elsewhere and (old.replicas, old.hosts) != (new.replicas, new.hosts):
                self._load_by_itself(new)
        for spec in changes.new if takes_new else ():
            if spec.is_preloaded:
                self._replicas.tell(spec.id)
                self._load_by_itself(spec)

    def _load_by_itself(self, spec: ModelSpec) -> None:
        """Load a model that this worker was told to have; with replicas, when a place is its."""
        if spec.replicas is None and self._replicas.may_host(spec):
            self._returning.add(spec.id)
            self.obey(Command("load", spec.id))

    def _in_background(self, act: Callable[..., object], *arguments: Any) -> None:
        threading.Thread(target=act, args=arguments, daemon=True).start()

    def _load_anew(self, model_id: str) -> None:
        """Load a model again, if this worker has it or has failed to load it."""
        model = self._models.get(model_id)
        if model is None or not self._empty(model, comes_again=True):
            return
        model.close()
        if (spec := self._spec_of(model_id)) is None:
            self._models.pop(model_id, None)
            return
        self._models[model_id] = model = self._served(spec)
        self._lease.renew()
        self._load_in_turn(model)

    def _spec_of(self, model_id: str) -> ModelSpec | None:
        """Return a model as it is described now, with the adapters that were added to it."""
        spec = catalogue().find(model_id)
        if spec is not None:
            with contextlib.suppress(django.db.Error):
                return adapters.read().to(spec)
        return spec

    def described(self) -> LiveWorker:
        """Return what the lease says."""
        models = [self._report(model) for model in tuple(self._models.values())]
        models += [model.report for model in tuple(self._sleeping.values())]
        state = host_state()
        return LiveWorker(
            self.id,
            tuple(models),
            host=socket.gethostname(),
            started_at=self._started_at,
            is_draining=self._is_draining or self._tells_end or self._stopped.is_set(),
            devices=state.gpus or ((state.memory,) if state.memory else ()),
            loadable=self._loadable(),
            release=settings.VERSION,
            state=state,
            memory_bytes=process_memory_bytes(),
            labels=self._replicas.labels,
            offers=self._replicas.offers(),
        )

    def _report(self, model: ServedModel) -> ModelReport:
        """Return what is said of a model: it takes work once all are loaded, and wake-ups read."""
        report = model.report
        if report.state == ModelState.LOADING:
            return replace(report, expected_s=self._expected_s(model, report))
        if report.state != ModelState.READY or (self._is_up and self._reads_wake_ups):
            return report
        reason = report.reason if self._reads_wake_ups else _UNREAD
        return replace(report, state=ModelState.LOADING, reason=reason)

    def _expected_s(self, model: ServedModel, report: ModelReport) -> float | None:
        """Return in how many seconds a model that is loading should be ready; None if unknown."""
        stay_s = None
        if self._lacks_room:
            stay_s = longest_stay_s([m for m in tuple(self._models.values()) if m.is_loaded])
        seconds = self._line.expected_s(model, time.time() - report.since, stay_s)
        return None if seconds is None else round(seconds, 1)

    def _loadable(self) -> tuple[str, ...]:
        """Return which other models of the catalogue this host has the files of."""
        if not self._is_up or self._takes_nothing:
            return ()
        models = tuple(self._models.items())
        taken = {id_ for id_, m in models if m.is_loaded or m.state != ModelState.FAILED}
        taken -= {id_ for id_, watch in tuple(self._idle_watches.items()) if watch.is_leaving}
        specs = catalogue().models.values()
        return tuple(
            spec.id
            for spec in specs
            if spec.id not in taken
            and self._replicas.may_host(spec)
            and (spec.file is None or spec.file.is_file())
        )

    def _load_in_turn(self, model: ServedModel) -> None:
        """Have a model loaded when it is its turn; at once if it takes no room on this host."""
        if takes_room(model.spec):
            self._line.put(model)
        else:
            self._in_background(self._load, model)

    def _load_all(self) -> None:
        """Load what waits for it, as long as the worker runs: whoever waits longest gets the next
        room. Loads do not wait for each other, unless they share a GPU."""
        while True:
            model = self._line.first(lambda model: shares_gpu(model.spec))
            if self._has_room(model):
                self._line.begin(model)
                self._in_background(self._load_placed, model)
            self._line.leave(model)
            self._lacks_room = False

    def _load_placed(self, model: ServedModel) -> None:
        try:
            self._load(model)
        except Exception as exc:
            logger.exception("model %s could not be loaded", model.spec.id)
            model.fail(f"Model '{model.spec.id}': it could not be loaded ({type(exc).__name__}).")
            self._settle(model)
        self._placed.discard(model)

    def _has_room(self, model: ServedModel) -> bool:
        """Return True once there is room for a model, which is its own then; False if never."""
        try:
            if not self._make_room(model):
                return False
        except EngineLoadError as exc:
            model.fail(str(exc))
            logger.error("%s", exc)
            self._settle(model)
            return False
        except Exception:
            logger.exception("model %s: no room was made for it", model.spec.id)
            return False
        self._placed.add(model)
        return True

    def _load(self, model: ServedModel) -> None:
        """Load a model; say in the log and the lease what came of it.

        If adapters were added to it and it cannot be loaded with them, it is loaded without the
        newest of them.
        """
        spec = model.spec
        self._line.begin(model)
        try:
            if spec.file is not None:
                for model.progress in read_ahead(spec.file):
                    pass
            model.load()
        except EngineLoadError as exc:
            logger.error("%s", exc)  # It says all there is to say.
        else:
            logger.info("loaded model %s on %s (%d slots)", spec.id, spec.engine, spec.slots)
            fleet.clear_pending_load(spec.id)
        finally:
            self._line.end(model, is_loaded=model.is_loaded)
        if not model.is_loaded and self._drops_newest_adapter(spec.id):
            self._load_anew(spec.id)
            return
        if spec.id in self._may_idle and model.is_loaded:
            watch = IdleWatch(
                model, self._lease.renew, lambda: self._unload(spec.id, may_sleep=True)
            )
            self._idle_watches[spec.id] = watch
            watch.start()
        self._settle(model)

    def _settle(self, model: ServedModel) -> None:
        """Tell everybody that a model is loaded, or that it could not be."""
        with self._settled:
            self._settled.notify_all()
        if self._is_announced:
            self._lease.renew()
            self._changed()
            if model.is_loaded:
                self._note_restarted([model.spec.id])

    def _make_room(self, model: ServedModel) -> bool:
        """Return True once a model can be loaded; False when it is not wanted any more.

        Raise EngineLoadError if it never can.
        """
        while not self._stopped.is_set() and self._models.get(model.spec.id) is model:
            loaded = [m for m in tuple(self._models.values()) if m.is_loaded]
            residents = [*loaded, *(m for m in self._placed.copy() if not m.is_loaded)]
            self._lacks_room = takes_room(model.spec) and self._lacks(model.spec, residents)
            if not self._lacks_room:
                return True
            model.say("It waits until there is room for it.")
            leaves = next_to_go(model.spec, loaded, self._wanted())
            if isinstance(leaves, ServedModel):
                self._make_leave(leaves, model)
            else:
                self._stopped.wait(_POLL_S)
        return False

    def _lacks(self, wanted: ModelSpec, residents: Sequence[ServedModel]) -> bool:
        """Whether there is no room for a model; servers that sleep in its room are ended."""
        while asleep := tuple(self._sleeping.values()):
            if not self._room.lacks(
                wanted, residents, sum(model.report.taken_bytes for model in asleep)
            ):
                return False
            if self._room.lacks(wanted, residents):
                return True  # The ones that are awake take too much.
            self._end_sleep(asleep[0].spec.id)
        return self._room.lacks(wanted, residents)

    def _end_sleep(self, model_id: str) -> None:
        if asleep := self._sleeping.pop(model_id, None):
            asleep.close()
            self._lease.renew()
            logger.info("ended the sleeping server of model %s", model_id)

    def _make_leave(self, model: ServedModel, wanted: ServedModel) -> None:
        """Drop a model when nothing runs on it any more, as long as the other one is wanted.

        Its server sleeps then, if its entry says so.
        """
        logger.info("model %s makes room for %s", model.spec.id, wanted.spec.id)
        while not model.drain(_POLL_S, comes_again=fleet.is_on_demand(model.spec)):
            if self._stopped.is_set() or self._models.get(wanted.spec.id) is not wanted:
                model.resume()
                return
        self._replicas.forget(model.spec.id)
        self._retire(model)

    def _wanted(self) -> set[str]:
        """Return the models that generations wait for; all of them while nobody can tell."""
        wanted = set(self._models)

        def look() -> None:
            waiting = Generation.objects.filter(status=Status.QUEUED).order_by()
            wanted.clear()
            wanted.update(waiting.values_list("model", flat=True).distinct())

        attempt("waiting models", look)
        connection.close()
        return wanted

    def _watch_wanted(self) -> None:
        """Have a model loaded that generations wait for and no worker has.

        It has left to make room when they were accepted already.
        """
        while not self._stopped.wait(_WANTED_S):
            loadable = {id_ for id_ in self._loadable() if self._is_on_demand(id_)}
            if wanted := loadable and self._wanted() & loadable:
                statuses = fleet.statuses_among(live_workers(), sorted(wanted))
                for id_, status in statuses.items():
                    if status == ModelStatus.UNLOADED:
                        with contextlib.suppress(fleet.FleetError):
                            fleet.load(None, id_)

    def _is_on_demand(self, model_id: str) -> bool:
        spec = catalogue().models.get(model_id)
        return spec is not None and fleet.is_on_demand(spec)

    def _drops_newest_adapter(self, model: str) -> bool:
        dropped = None
        with contextlib.suppress(django.db.Error):
            dropped = adapters.remove_newest(model)
        if dropped is not None:
            logger.error("%s: it is loaded without the adapter %s", model, dropped)
        return dropped is not None

    def _load_beside(self, model_id: str) -> None:
        """Load a model that this worker was not started with."""
        spec = self._spec_of(model_id)
        if spec is None or spec.id not in self._loadable():
            logger.warning("cannot load %s: unknown, loaded already, or without file", model_id)
            fleet.clear_pending_load(model_id)  # Of a request that saw an older lease.
            return
        if (watch := self._idle_watches.get(spec.id)) and watch.keep():
            fleet.clear_pending_load(spec.id)
            return
        if not self._claims(spec):
            logger.info("model %s is not loaded: other workers have its places", spec.id)
            fleet.clear_pending_load(spec.id)
            return
        self._may_idle.add(spec.id)
        model = self._models[spec.id] = self._served(spec)
        self._lease.renew()
        fleet.note_announced_load(spec.id)
        self._load_in_turn(model)

    def _claims(self, spec: ModelSpec) -> bool:
        """Return whether this worker may load a model; claim a place if it has replicas."""
        try:
            return self._replicas.claim(spec)
        except redis.exceptions.RedisError as exc:
            logger.warning("model %s: no place was claimed: %s", spec.id, exc)
            return False

    @property
    def is_ending(self) -> bool:
        """Whether the worker ends (see ``replicas.Host``)."""
        return self._is_ending or self._stopped.is_set()

    @property
    def is_draining(self) -> bool:
        """Whether it was told to take nothing new."""
        return self._is_draining

    def present(self) -> Collection[str]:
        """Return the models that it has in any state."""
        return tuple(self._models)

    def held(self) -> Collection[str]:
        """Return those of them that have not failed to load, and do not leave."""
        models = tuple(self._models.items())
        return [id_ for id_, m in models if not _has_failed(m) and id_ not in self._leaving]

    def has_room_for(self, spec: ModelSpec) -> bool:
        """Whether a model can be loaded beside those that it has."""
        models = [m for m in tuple(self._models.values()) if not _has_failed(m)]
        try:
            return not self._room.lacks(spec, models)
        except EngineLoadError:
            return False

    def load_replica(self, model_id: str) -> None:
        """Begin to load a model of which this worker has a place."""
        if (spec := self._spec_of(model_id)) is None:
            return
        model = self._models[spec.id] = self._served(spec)
        self._returning.add(spec.id)
        if not self._is_announced:
            self._lacking.add(spec.id)
        self._lease.renew()
        self._load_in_turn(model)

    def leave(self, model_id: str) -> None:
        """Take nothing new for a model, and drop it when nothing runs on it any more."""
        if model := self._models.get(model_id):
            self._leaving.add(model_id)
            self._in_background(self._drop_when_idle, model)

    def _drop_when_idle(self, model: ServedModel) -> None:
        model.drain(0)
        self._lease.renew()
        while not model.drain(_POLL_S):
            if self._stopped.is_set():
                return
        self._drop(model)

    def _unload(self, model_id: str, *, may_sleep: bool = False) -> None:
        """Drop a model; ``may_sleep``: its server need not end, if its entry says so."""
        self._end_sleep(model_id)
        model = self._models.get(model_id)
        if model is not None and self._empty(model):
            (self._retire if may_sleep else self._drop)(model)

    def _retire(self, model: ServedModel) -> None:
        """Drop a model on which nothing runs; its server sleeps if its entry says so."""
        if model.sleep():
            self._sleeping[model.spec.id] = model
        self._drop(model)

    def _drop(self, model: ServedModel) -> None:
        """Drop a model on which nothing runs."""
        id_ = model.spec.id
        if watch := self._idle_watches.pop(id_, None):
            watch.stop()
        if self._models.get(id_) is model:  # It may have been asked for again.
            del self._models[id_]
            self._leaving.discard(id_)
            self._lacking.discard(id_)
            self._replicas.give_back(id_)
        if self._sleeping.get(id_) is model:
            logger.info("model %s sleeps", id_)
        else:
            model.close()
            logger.info("dropped model %s", id_)
        self._lease.renew()

    def _empty(self, model: ServedModel, *, comes_again: bool = False) -> bool:
        """Let what runs on a model end, and nothing begin; return whether nothing runs on it."""
        if not model.drain(settings.DRAIN_TIMEOUT_S, comes_again=comes_again):
            self._runs.stop(model)
        if model.drain(_STOPPING_S, comes_again=comes_again):
            return True
        logger.error("model %s is not dropped: what runs on it does not stop", model.spec.id)
        return False

    def _watch_loop(self) -> None:
        """End this process when the loop that reads all servers stands still, in a hook say."""
        while not self._stopped.wait(_LOOK_S):
            if event_loop().turned_within(settings.ENGINE_STALL_S):
                continue
            stall_s = settings.ENGINE_STALL_S
            logger.critical("no server was read for %d s; this process ends", stall_s)
            self.end_now()

    def end_now(self) -> None:
        """End this process as if it had been killed, but give back its lease."""
        self._lease.stop()
        os._exit(1)

    def _watch_orphans(self) -> None:
        """Give up rows that say they run here and do not: a claim whose reply was lost, say."""
        while not self._stopped.wait(_ORPHANS_S):
            attempt("orphans", lambda: give_up_orphans(self.id, lambda: self._runs.attempts))


def _has_failed(model: ServedModel) -> bool:
    return not model.is_loaded and model.state == ModelState.FAILED
