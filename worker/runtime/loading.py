"""ModelLoader: loads, evicts and unloads the models of one worker (see ``residency``)."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import django.db
import redis.exceptions
from django.conf import settings

from inference_site.catalogue.catalogue import CatalogueChanges, catalogue
from inference_site.catalogue.fleet import fleet, orders
from inference_site.catalogue.fleet.fleet import ModelStatus
from inference_site.catalogue.fleet.leases import live_workers
from inference_site.catalogue.model_store import adapters
from inference_site.core.domain.errors import EngineLoadError
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.host import memory_bytes
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.runs.maintenance import try_and_log
from inference_site.runs.models import Generation, Status
from worker.runtime.residency import (
    Capacity,
    IdleWatch,
    LoadQueue,
    Replicas,
    longest_residency_s,
    next_to_evict,
    uses_host,
)
from worker.runtime.served_model import ServedModel

if TYPE_CHECKING:
    from worker.runtime.runtime import Runtime

logger = logging.getLogger(__name__)

_CHECK_WAITING_S = 1.0
STOP_S = 5.0
"""How long runs may take to end after they were stopped."""
_POLL_S = 0.2
_CHUNK_BYTES = 16 * 2**20
"""Bytes of a model's file that are read into the page cache at once."""


def in_background(act: Callable[..., object], *arguments: Any) -> None:
    """Call a function on a new daemon thread."""
    threading.Thread(target=act, args=arguments, daemon=True).start()


class ModelLoader:
    """The models of a worker in any state, and the threads that load and unload them."""

    def __init__(self, worker: Runtime, specs: list[ModelSpec]) -> None:
        self.worker = worker
        self.replicas = Replicas(self, [spec.id for spec in specs])
        self._sleeping: dict[str, ServedModel] = {}
        """Evicted models whose servers sleep, the longest sleeping first."""
        self.models = {
            spec.id: self._new_model(spec)
            for spec in specs
            if spec.replicas is None and self.replicas.may_host(spec)
        }
        self.never_ready = set(self.models)
        """The models of the start that have not been announced as ready yet."""
        self.after_restart = set(self.models)
        """The models that a worker started in place of this one would serve, too."""
        self._idle_watches: dict[str, IdleWatch] = {}
        self._presence = threading.Lock()
        """Held while a model and its idle watch are added or removed."""
        self._locks: dict[str, threading.Lock] = {}
        self._added_while_drained: set[str] = set()
        """The models to load when an operator has the worker take work again."""
        self._loaded_on_demand: set[str] = set()
        """The models that were loaded at run time; they are unloaded when idle."""
        self._evicted: set[str] = set()
        """The models that have made room for others; what waits for one has it loaded again."""
        mib = settings.MODEL_MEMORY_MIB, settings.GPU_MEMORY_MIB
        self._capacity = Capacity(settings.MAX_LOADED_MODELS, *(n * 2**20 for n in mib))
        self._queue = LoadQueue()
        self._placed: set[ServedModel] = set()
        """The models that have room and are loading."""
        self._closing: set[ServedModel] = set()
        """The models that still take memory, since their servers have not ended yet."""
        self._waits_for_room = False
        """Whether the first of the queue does not fit."""
        self._settled = threading.Condition()
        """Notified when a load has succeeded or failed."""

    def _new_model(self, spec: ModelSpec) -> ServedModel:
        """Return a model to load: the sleeping one, if its entry is the same."""
        if asleep := self._sleeping.pop(spec.id, None):
            if asleep.spec == spec:
                asleep.wake()
                return asleep
            with self._takes_memory(asleep):
                asleep.close()
        return ServedModel(spec, self.worker.changed, self.worker.announce_fault)

    def start(self) -> None:
        """Start to load the models; return when one is loaded.

        Raise EngineLoadError if all fail.
        """
        self._queue.read_history()
        in_background(self._load_in_order)
        for model in tuple(self.models.values()):
            self._enqueue(model)
        self.replicas.reconcile()
        with self._settled:
            self._settled.wait_for(
                lambda: (
                    any(model.is_loaded for model in self.models.values())
                    or all(model.has_failed_to_load for model in self.models.values())
                )
            )
        models = list(self.models.values())
        if models and not any(model.is_loaded for model in models):
            raise EngineLoadError("\n".join(model.report.reason for model in models))

    def watch(self) -> None:
        """Start the threads that claim replicas and load models that generations wait for."""
        self.replicas.watch()

        def main() -> None:
            while not self.worker.stopped.wait(_CHECK_WAITING_S):
                with release_connection_after():
                    try_and_log("waiting models", self._load_waited_for)

        threading.Thread(target=main, name="wanted", daemon=True).start()

    def stop_idle_watches(self) -> None:
        """Unload no model for being idle any more."""
        for watch in tuple(self._idle_watches.values()):
            watch.stop()

    def close(self) -> None:
        """Free the memory of all models. Nothing runs when this is called."""
        models = (*self.models.values(), *self._sleeping.values())
        with ThreadPoolExecutor(max(1, len(models))) as pool:
            list(pool.map(ServedModel.close, models))

    @property
    def sleeping(self) -> tuple[ServedModel, ...]:
        """The evicted models whose servers sleep."""
        return tuple(self._sleeping.values())

    def loadable(self) -> tuple[str, ...]:
        """Return the other models of the catalogue that this worker could load."""
        if not self.worker.is_up or not self.worker.accepts_work:
            return ()
        taken = {id_ for id_, m in tuple(self.models.items()) if not m.has_failed_to_load}
        taken -= {id_ for id_, watch in tuple(self._idle_watches.items()) if watch.is_leaving}
        return tuple(
            spec.id
            for spec in catalogue().models.values()
            if spec.id not in taken
            and self.replicas.may_host(spec)
            and (spec.file is None or spec.file.is_file())
        )

    def expected_s(self, model: ServedModel, loading_s: float) -> float | None:
        """Return in how many seconds a model should be loaded; None if unknown.

        ``loading_s`` is for how long its state has been loading.
        """
        eviction_s = None
        if self._waits_for_room:
            eviction_s = longest_residency_s(
                [m for m in tuple(self.models.values()) if m.is_loaded]
            )
        seconds = self._queue.expected_s(model, loading_s, eviction_s)
        return None if seconds is None else round(seconds, 1)

    def apply(self, changes: CatalogueChanges, *, takes_new: bool) -> None:
        """Load and unload models after a change of the catalogue.

        ``takes_new``: load new entries, too.
        """
        for spec in changes.removed:
            self.after_restart.discard(spec.id)
            in_background(self.unload, spec.id)
        for old, new in changes.changed:
            if new.runs_otherwise_than(old):
                in_background(self.reload, new.id)
            is_absent = new.id not in self.models and self.replicas.is_assigned(new.id)
            if is_absent and (old.replicas, old.hosts) != (new.replicas, new.hosts):
                in_background(self._load_assigned, new)
        for spec in changes.new if takes_new else ():
            if spec.is_preloaded:
                self.replicas.assign(spec.id)
                in_background(self._load_assigned, spec)

    def _load_assigned(self, spec: ModelSpec) -> None:
        """Load a model that is assigned to this worker; one with replicas is claimed later."""
        if spec.replicas is None and self.replicas.may_host(spec):
            self.after_restart.add(spec.id)
            if self.worker.is_draining:
                self._added_while_drained.add(spec.id)
            else:
                self._load_after_unload(spec.id)

    def load_added(self) -> None:
        """Load the models that were added while the worker was drained."""
        while self._added_while_drained:
            if spec := catalogue().models.get(self._added_while_drained.pop()):
                in_background(self._load_assigned, spec)

    def load(self, model_id: str) -> None:
        """Load a model that this worker was not started with."""
        spec = self._find_spec(model_id)
        if spec is None or spec.id not in self.loadable():
            logger.warning("cannot load %s: unknown, loaded already, or without file", model_id)
            return
        watch = self._idle_watches.get(spec.id)
        if watch is not None and watch.is_leaving:
            if not watch.keep():
                in_background(self._load_after_unload, spec.id)
            return
        try:
            is_claimed = self.replicas.claim(spec)
        except redis.exceptions.RedisError as exc:
            logger.warning("model %s: a replica could not be claimed: %s", spec.id, exc)
            is_claimed = False
        if not is_claimed:
            logger.info("model %s is not loaded: other workers have all its replicas", spec.id)
            return
        self._loaded_on_demand.add(spec.id)
        self._load_new(spec)

    def _load_new(self, spec: ModelSpec) -> None:
        """Take a model into ``models``, and load it in its turn."""
        model = self._new_model(spec)
        self._evicted.discard(spec.id)
        with self._presence:
            self.models[spec.id] = model
            if spec.id in self._loaded_on_demand:
                # It is stopped when the model is dropped, which may be before the thread of its
                # load starts it.
                unload = partial(self.unload, spec.id, may_sleep=True)
                self._idle_watches[spec.id] = IdleWatch(model, self.worker.lease.renew, unload)
        self.worker.lease.renew()
        self._enqueue(model)

    def _load_after_unload(self, model_id: str) -> None:
        """Load a model, if it is being unloaded then after that."""
        self.worker.stopped.wait(_POLL_S)  # An unload that is about to begin comes first.
        with self._changing(model_id):
            self.load(model_id)

    def reload(self, model_id: str) -> None:
        """Load a model again, if this worker has it or has failed to load it."""
        with self._changing(model_id):
            model = self.models.get(model_id)
            if model is None or not self._drain(model, reloads=True):
                return
            self._stop_idle_watch(model_id)
            with self._takes_memory(model):
                model.close()
            if (spec := self._find_spec(model_id)) is None:
                self._drop(model)
                return
            self._load_new(spec)

    def unload(self, model_id: str, *, may_sleep: bool = False) -> None:
        """Drop a model once its runs have ended; ``may_sleep``: its server may sleep instead."""
        with self._changing(model_id):
            self._end_sleep(model_id)
            model = self.models.get(model_id)
            if model is not None and self._drain(model):
                (self._sleep_or_drop if may_sleep else self._drop)(model)

    def _changing(self, model_id: str) -> threading.Lock:
        """Return the lock of a model, of which one reload or unload runs at a time."""
        return self._locks.setdefault(model_id, threading.Lock())

    def _find_spec(self, model_id: str) -> ModelSpec | None:
        """Return the current spec of a model, with the adapters that were added to it."""
        spec = catalogue().find(model_id)
        if spec is not None:
            with contextlib.suppress(django.db.Error):
                return adapters.read().to(spec)
        return spec

    def _drain(self, model: ServedModel, *, reloads: bool = False) -> bool:
        """Let the runs of a model end, for ``DRAIN_TIMEOUT_S``, and then stop them.

        Return once none is left, or False if the worker stops before that. A run that was stopped
        cannot end, for example, while PostgreSQL is away.
        """
        # A run that calls tools during a reload has its next turn after that.
        timeout_s = settings.DRAIN_TIMEOUT_S
        if not model.drain(timeout_s, reloads=reloads, lets_loops_end=not reloads):
            self.worker.runs.stop(model)
        if model.drain(STOP_S, reloads=reloads):
            return True
        logger.error("model %s is not dropped yet: a run on it does not end", model.spec.id)
        while not model.drain(_POLL_S, reloads=reloads):
            if self.worker.stopped.is_set():
                return False
        return True

    def held(self) -> Collection[str]:
        """Return the models that are loaded or loading, and are not leaving."""
        models = tuple(self.models.items())
        return [id_ for id_, m in models if not (m.has_failed_to_load or m.is_leaving)]

    def has_room_for(self, spec: ModelSpec) -> bool:
        """Whether a model can be loaded beside the present ones."""
        models = [m for m in tuple(self.models.values()) if not m.has_failed_to_load]
        try:
            return self._capacity.fits(spec, models)
        except EngineLoadError:
            return False

    def load_replica(self, model_id: str) -> None:
        """Load a model of which this worker has claimed a replica."""
        if (spec := self._find_spec(model_id)) is None:
            return
        self.after_restart.add(spec.id)
        if not self.worker.is_announced:
            self.never_ready.add(spec.id)
        self._load_new(spec)

    def leave(self, model_id: str) -> None:
        """Accept no new runs of a model, and drop it when its runs have ended."""

        def drop_when_idle(model: ServedModel) -> None:
            model.drain(0)
            self.worker.lease.renew()
            while not model.drain(_POLL_S, lets_loops_end=True):
                if self.worker.stopped.is_set():
                    return
            self._drop(model)

        if model := self.models.get(model_id):
            model.is_leaving = True
            in_background(drop_when_idle, model)

    def _enqueue(self, model: ServedModel) -> None:
        """Load a model in its turn, or at once if it uses no memory of this host."""
        if uses_host(model.spec):
            self._queue.add(model)
        else:
            self._queue.start(model)
            in_background(self._load_or_fail, model)

    def _load_in_order(self) -> None:
        """Make room for the models of the queue, one after the other, until the process ends.

        The loads themselves run concurrently, except on GPUs.
        """
        while True:
            model = self._queue.next()
            if self._reserve_room(model):
                self._queue.start(model)
                in_background(self._load_or_fail, model)
            self._queue.remove(model)
            self._waits_for_room = False

    def _load_or_fail(self, model: ServedModel) -> None:
        try:
            self._load(model)
        except Exception as exc:
            logger.exception("model %s could not be loaded", model.spec.id)
            model.fail(f"Model '{model.spec.id}': it could not be loaded ({type(exc).__name__}).")
            self._settle(model)
        self._placed.discard(model)

    def _load(self, model: ServedModel) -> None:
        """Load a model; report the result in the log and the lease.

        If the process of a model with added adapters ends itself, the model is loaded again without
        the newest one. Other faults, of a disk or the host's memory, are not those of adapters.
        """
        spec, is_suspect = model.spec, False
        try:
            if spec.file is not None:
                for fraction in read_ahead(spec.file):
                    model.progress = fraction
            model.load()
        except EngineLoadError as exc:
            logger.error("%s", exc)  # Its message is complete.
            is_suspect = exc.by_process
        else:
            if model.is_loaded:  # It may have been unloaded meanwhile.
                logger.info("loaded model %s on %s (%d slots)", spec.id, spec.engine, spec.slots)
                with release_connection_after():
                    try_and_log("orders", partial(orders.note_loaded, spec.id))
        finally:
            self._queue.end(model, is_loaded=model.is_loaded)
        dropped = None
        if is_suspect and model.has_failed_to_load and self.models.get(spec.id) is model:
            with contextlib.suppress(django.db.Error):
                dropped = adapters.remove_newest(spec, catalogue().find(spec.id))
        if dropped is not None:
            logger.error("%s: it is loaded without the adapter %s", spec.id, dropped)
            self.reload(spec.id)
            return
        watch = self._idle_watches.get(spec.id)
        if model.is_loaded and watch is not None and watch.model is model:
            watch.start()
        self._settle(model)

    def _settle(self, model: ServedModel) -> None:
        """Announce that a load has succeeded or failed."""
        with self._settled:
            self._settled.notify_all()
        if self.worker.is_announced:
            self.worker.lease.renew()
            self.worker.changed()
            if model.is_loaded:
                self.worker.note_restarted([model.spec.id])

    def _reserve_room(self, model: ServedModel) -> bool:
        """Evict models until this one fits, and reserve the room.

        Return False if the model never fits, or is not wanted any more.
        """
        try:
            while not self.worker.stopped.is_set() and self.models.get(model.spec.id) is model:
                loaded = [m for m in tuple(self.models.values()) if m.is_loaded]
                closing = self._closing.copy()
                placed = (m for m in self._placed.copy() if not m.is_loaded)
                residents = [*loaded, *placed, *closing.difference(loaded)]
                self._waits_for_room = not self._fits(model.spec, residents)
                if not self._waits_for_room:
                    self._placed.add(model)
                    return True
                model.reason = "It waits until there is room for it."
                evicted = None
                if not closing:  # A server that ends may make the room, so no other model goes.
                    evicted = next_to_evict(model.spec, loaded, self._waited_for())
                if evicted is not None:
                    self._evict(evicted, model)
                else:
                    self.worker.stopped.wait(_POLL_S)
        except EngineLoadError as exc:
            model.fail(str(exc))
            logger.error("%s", exc)
            self._settle(model)
        except Exception as exc:
            logger.exception("model %s: no room could be made for it", model.spec.id)
            reason = f"no room could be made for it ({type(exc).__name__})"
            model.fail(f"Model '{model.spec.id}': {reason}.")
            self._settle(model)
        return False

    def _fits(self, wanted: ModelSpec, residents: Sequence[ServedModel]) -> bool:
        """Whether a model fits. Ends sleeping servers if their memory is what is missing."""
        while asleep := tuple(self._sleeping.values()):
            sleeping_bytes = sum(model.report.taken_bytes for model in asleep)
            if self._capacity.fits(wanted, residents, sleeping_bytes):
                return True
            if not self._capacity.fits(wanted, residents):
                return False
            self._end_sleep(asleep[0].spec.id)
        return self._capacity.fits(wanted, residents)

    def _evict(self, model: ServedModel, wanted: ServedModel) -> None:
        """Unload a model when its runs have ended, unless the other is no longer wanted by then."""
        logger.info("model %s makes room for %s", model.spec.id, wanted.spec.id)
        reloads = fleet.is_on_demand(model.spec)
        # Runs that call tools now may need the wanted model for that. Theirs is loaded again then.
        while not model.drain(_POLL_S, reloads=reloads, lets_loops_end=not reloads):
            if self.worker.stopped.is_set() or self.models.get(wanted.spec.id) is not wanted:
                # It may also drain for an unload, a reload or another worker.
                if not (model.is_leaving or self._changing(model.spec.id).locked()):
                    model.resume()
                return
        self.replicas.unassign(model.spec.id)
        self._evicted.add(model.spec.id)
        self._sleep_or_drop(model)

    def _sleep_or_drop(self, model: ServedModel) -> None:
        """Drop a model on which nothing runs; its server sleeps if its entry says so."""
        if model.sleep():
            self._sleeping[model.spec.id] = model
        self._drop(model)

    def _drop(self, model: ServedModel) -> None:
        """Forget a model on which nothing runs, and free its memory unless its server sleeps."""
        id_ = model.spec.id
        with self._takes_memory(model):
            with self._presence:
                # Another thread may have dropped it, and it may have been loaded again.
                is_present = self.models.get(id_) is model
                if is_present:
                    del self.models[id_]
                    self._stop_idle_watch(id_)
            if is_present:
                self.never_ready.discard(id_)
                self.replicas.release(id_)
            if self._sleeping.get(id_) is model:
                logger.info("model %s sleeps", id_)
            else:
                model.close()
                logger.info("dropped model %s", id_)
        self.worker.lease.renew()

    @contextlib.contextmanager
    def _takes_memory(self, model: ServedModel) -> Iterator[None]:
        """Let models that wait for room wait until the server of this one has ended."""
        self._closing.add(model)
        try:
            yield
        finally:
            self._closing.discard(model)

    def _stop_idle_watch(self, model_id: str) -> None:
        if watch := self._idle_watches.pop(model_id, None):
            watch.stop()

    def _end_sleep(self, model_id: str) -> None:
        if asleep := self._sleeping.pop(model_id, None):
            with self._takes_memory(asleep):
                asleep.close()
            self.worker.lease.renew()
            logger.info("ended the sleeping server of model %s", model_id)

    def _waited_for(self) -> set[str]:
        """Return the models that generations wait for, in the queue or after their tools.

        All while PostgreSQL is down.
        """
        models = set(self.models)

        def query() -> None:
            waiting = Generation.objects.filter(status=Status.QUEUED).order_by()
            models.clear()
            models.update(self.worker.runs.awaited_models)
            models.update(waiting.values_list("model", flat=True).distinct())

        with release_connection_after():
            try_and_log("waiting models", query)
        return models

    def _load_waited_for(self) -> None:
        """Load models that generations wait for and no worker has: on demand, or evicted here.

        A model may be evicted after generations of it were accepted.
        """
        specs = [catalogue().models.get(id_) for id_ in self.loadable()]
        returning = {s.id for s in specs if s and (fleet.is_on_demand(s) or s.id in self._evicted)}
        wanted = returning and self._waited_for() & returning
        live = live_workers() if wanted else ()
        for id_ in sorted(wanted):
            if fleet.status_among(live, id_) == ModelStatus.UNLOADED:
                with contextlib.suppress(fleet.FleetError):
                    fleet.load(None, id_)


def read_ahead(path: Path) -> Iterator[float]:
    """Read a file into the page cache; yield the fraction that is read, after each chunk.

    Some libraries hold the GIL while they load a model, so less waiting for the disk means a
    shorter pause of all other threads. A file that is larger than the free memory is not read.
    Neither is an unreadable one: the library reports that.
    """
    try:
        size = path.stat().st_size
        if not 0 < size < memory_bytes()[1]:
            return
        with path.open("rb", buffering=0) as file:
            buffer, done = bytearray(_CHUNK_BYTES), 0
            while count := file.readinto(buffer):
                done += count
                yield min(1.0, done / size)
    except OSError:
        return
