"""Which models are in the memory of this host: load queue, capacity, eviction, replicas.

A model that does not fit waits in the load queue; the model that has waited longest is loaded next.
To make room, models that are not pinned are evicted. An idle model, on which nothing runs and for
which nothing waits, is evicted at once, the least recently used first. If none is idle, a model
that has been loaded for the ``min_resident_s`` of its entry accepts no new work, and is evicted
when its runs have ended.

``Replicas`` claims the replicas of models whose entries restrict their number or hosts.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import django.db
import redis.exceptions
from django.conf import settings

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet import fleet, orders
from inference_site.catalogue.fleet.leases import LiveWorker, live_workers
from inference_site.core.domain.errors import EngineLoadError
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.host import Device, memory_bytes
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.core.storage.redis import site_client
from inference_site.runs.maintenance import try_and_log
from inference_site.runs.models import Generation, Status
from worker.model_servers.memory import measured, needed_bytes
from worker.model_servers.nvml import gpus
from worker.runtime.served_model import ServedModel

if TYPE_CHECKING:
    from worker.runtime.loading import ModelLoader

logger = logging.getLogger(__name__)

_MEMORY_SHARE = 0.85
"""Share of the host's memory for models; the rest is for the platform and the page cache."""
_MIB = 2**20
_HISTORY_KEPT_S = 30 * 86_400
_CHECK_IDLE_S = 1.0
_ANNOUNCED_S = 3.0
"""After this time all web processes have read that the model accepts no new work."""
_CHECK_REPLICAS_S = 1.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many models, and how many bytes of host memory and of each GPU, models may use.

    0 means: any number of models, ``_MEMORY_SHARE`` of the host's memory, all free memory of a GPU.
    """

    models: int = 0
    bytes: int = 0
    gpu_bytes: int = 0

    def fits(
        self, wanted: ModelSpec, residents: Sequence[ServedModel], sleeping_bytes: int = 0
    ) -> bool:
        """Whether a model can be loaded beside these. Raise EngineLoadError if it never can.

        ``sleeping_bytes`` is the host memory of sleeping servers.
        """
        others = [resident.spec for resident in residents if uses_host(resident.spec)]
        if self.models and len(others) >= self.models:
            return False
        if any(_are_exclusive(wanted, other) for other in others):
            return False
        needed, found = needed_bytes(wanted), gpus()
        if used := _gpus_of(wanted, found):
            return self._fits_gpus(wanted, others, {index: found[index] for index in used})
        budget = self.bytes or round(memory_bytes()[0] * _MEMORY_SHARE)
        if needed > budget:
            raise EngineLoadError(
                f"Model '{wanted.id}': it needs about {needed // _MIB} MiB of memory, and models "
                f"may take {budget // _MIB} MiB on this host."
            )
        taken = sum(
            measured(spec).host if _gpus_of(spec, found) else needed_bytes(spec) for spec in others
        )
        return needed + taken + sleeping_bytes <= budget

    def _fits_gpus(
        self, wanted: ModelSpec, others: Sequence[ModelSpec], used: dict[int, Device]
    ) -> bool:
        """Whether a model fits on these GPUs, by number.

        If its use of each GPU is not known yet, one estimate is compared with all GPUs together.
        """
        budgets = {i: self.gpu_bytes or device.memory_total for i, device in used.items()}
        needed = measured(wanted).gpus or {-1: needed_bytes(wanted)}
        for index, bytes_ in needed.items():
            budget = budgets.get(index, sum(budgets.values()))
            if bytes_ > budget:
                where = "its GPUs" if index < 0 else f"GPU {index}"
                raise EngineLoadError(
                    f"Model '{wanted.id}': it needs about {bytes_ // _MIB} MiB of memory, and "
                    f"models may take {budget // _MIB} MiB on {where}."
                )
        taken = {i: sum(measured(spec).gpus.get(i, 0) for spec in others) for i in used}
        free = {i: min(used[i].memory_free, budgets[i] - taken[i]) for i in used}
        return all(n <= free.get(i, sum(free.values())) for i, n in needed.items())


def _gpus_of(spec: ModelSpec, found: Sequence[Device]) -> list[int]:
    """Return the numbers of this host's GPUs that a model uses."""
    named = spec.options.get("gpus")
    numbers = range(len(found)) if named is None else named
    return [index for index in numbers if index < len(found)] if spec.gpu_layers else []


def uses_host(spec: ModelSpec) -> bool:
    """Whether the model uses memory of this host; a model of an upstream does not."""
    return spec.engine != "openai_upstream"


def _loads_on_gpu(spec: ModelSpec) -> bool:
    """Whether loading the model may take GPU memory. Such loads run one after the other: whether
    the next one fits is known only then."""
    return spec.gpu_layers != 0 and spec.engine != "scripted" and bool(gpus())


def _are_exclusive(one: ModelSpec, other: ModelSpec) -> bool:
    """Whether the entry of one excludes the other."""
    return other.id in one.exclusive_with or one.id in other.exclusive_with


def longest_residency_s(residents: Sequence[ServedModel]) -> float:
    """Return after how many seconds, at the latest, one of these may be evicted."""
    now = time.monotonic()
    left = (r.spec.min_resident_s - (now - r.loaded_at) for r in _evictable(residents))
    return max(0.0, min(left, default=0.0))


def next_to_evict(
    wanted: ModelSpec, residents: Sequence[ServedModel], waited_for: Collection[str]
) -> ServedModel | None:
    """Return the model to evict for another one; None if none may be evicted now.

    ``waited_for`` are the ids of models that queued generations wait for.
    """
    now, evictable = time.monotonic(), _evictable(residents)
    evictable.sort(key=lambda r: (not _are_exclusive(wanted, r.spec), r.used_at))
    for resident in evictable:
        if not resident.is_in_use and resident.spec.id not in waited_for:
            return resident
    stayed = [r for r in evictable if now - r.loaded_at >= r.spec.min_resident_s]
    return min(stayed, key=lambda r: r.loaded_at, default=None)


def _evictable(residents: Sequence[ServedModel]) -> list[ServedModel]:
    return [r for r in residents if uses_host(r.spec) and not r.spec.is_pinned]


class LoadQueue:
    """The models that wait to be loaded, oldest first, and those that are loading.

    It estimates when a model is ready from how long its last load on this host took, which is kept
    in Redis. Thread-safe.
    """

    def __init__(self) -> None:
        self._waiting: list[ServedModel] = []
        self._started: dict[ServedModel, float] = {}
        self._load_s: dict[str, float] = {}
        self._changed = threading.Condition()

    def add(self, model: ServedModel) -> None:
        """Append a model to the queue."""
        with self._changed:
            self._waiting.append(model)
            self._changed.notify()

    def next(self) -> ServedModel:
        """Wait until a model may be loaded, and return it; it stays in the queue.

        A model that loads on a GPU waits for such a load in progress.
        """

        def found() -> ServedModel | None:
            is_gpu_busy = any(_loads_on_gpu(model.spec) for model in self._started)
            free = (m for m in self._waiting if not (is_gpu_busy and _loads_on_gpu(m.spec)))
            return next(free, None)

        with self._changed:
            self._changed.wait_for(lambda: found() is not None)
            model = found()
            assert model is not None
            return model

    def start(self, model: ServedModel) -> None:
        """Record that the load of a model starts."""
        with self._changed:
            self._started[model] = time.monotonic()

    def remove(self, model: ServedModel) -> None:
        """Remove a model that is loading now or will never be loaded."""
        with self._changed, contextlib.suppress(ValueError):
            self._waiting.remove(model)

    def end(self, model: ServedModel, *, is_loaded: bool) -> None:
        """Record that the load of a model has ended; store how long it took if it succeeded."""
        with self._changed:
            started = self._started.pop(model, None)
            self._changed.notify()
        if started is None or not is_loaded:
            return
        seconds = self._load_s[model.spec.id] = time.monotonic() - started
        with contextlib.suppress(redis.exceptions.RedisError):
            pipeline, key = site_client().pipeline(transaction=False), _history_key()
            pipeline.hset(key, model.spec.id, round(seconds, 3))
            pipeline.expire(key, _HISTORY_KEPT_S)
            pipeline.execute()

    def read_history(self) -> None:
        """Read how long loads on this host took before this process started."""
        with contextlib.suppress(redis.exceptions.RedisError):
            stored: Any = site_client().hgetall(_history_key())
            known = {id_.decode(): float(seconds) for id_, seconds in stored.items()}
            self._load_s = {**known, **self._load_s}

    def expected_s(
        self, model: ServedModel, loading_s: float, eviction_s: float | None
    ) -> float | None:
        """Return in how many seconds a model should be ready; None if unknown.

        ``loading_s``: for how long a model has been loading that is not in the queue, because its
        server is restarted. ``eviction_s``: after how long a resident may be evicted for the first
        of the queue; None if that fits. Then each model before this one must stay its
        ``min_resident_s``, too.
        """
        with self._changed:
            started, waiting = self._started.get(model), list(self._waiting)
        own_s = self._load_s.get(model.spec.id)
        if own_s is None:
            return None
        if started is not None:
            return max(0.0, own_s - (time.monotonic() - started))
        if model not in waiting:
            return max(0.0, own_s - loading_s)
        before = waiting[: waiting.index(model)]
        loads = [s for other in before if (s := self._load_s.get(other.spec.id)) is not None]
        if len(loads) < len(before):
            return None
        residency_s = 0.0
        if eviction_s is not None:
            residency_s = eviction_s + sum(other.spec.min_resident_s for other in before)
        return own_s + residency_s + sum(loads)


def _history_key() -> str:
    return f"load-seconds:{socket.gethostname()}"


class IdleWatch:
    """Unloads a model that has been idle for ``keep_alive_s`` of its spec.

    ``announce`` is called when the model stops or resumes accepting work; ``unload`` unloads it.
    """

    def __init__(
        self, model: ServedModel, announce: Callable[[], None], unload: Callable[[], None]
    ) -> None:
        self.model, self._announce, self._unload = model, announce, unload
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self.is_leaving = False
        """Whether the model accepts no new work because it is about to be unloaded."""
        self._is_kept = False

    def start(self) -> None:
        """Start the thread, if the model's entry has ``keep_alive``."""
        keep_alive_s = self.model.spec.keep_alive_s
        if keep_alive_s is None:
            return

        def main() -> None:
            while not self._stopped.wait(_CHECK_IDLE_S):
                is_idle = self.model.idle_s >= keep_alive_s
                if is_idle and not self._is_wanted() and self._closes():
                    self._unload()
                    return

        threading.Thread(target=main, name="idle", daemon=True).start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()

    def keep(self) -> bool:
        """Keep a model that is leaving; return False if it is not, or if it is too late."""
        with self._lock:
            self._is_kept = self.is_leaving and not self._stopped.is_set()
            return self._is_kept

    def _closes(self) -> bool:
        """Accept no new work; return True if none has come meanwhile, else resume."""
        self._is_kept, self.is_leaving = False, True
        self.model.drain(0)
        self._announce()
        if self._stopped.wait(_ANNOUNCED_S):  # It was unloaded or reloaded meanwhile.
            return False
        is_wanted = self._is_wanted()
        with self._lock:
            if not (is_wanted or self._is_kept):
                self._stopped.set()
                return True
            self.is_leaving = False
        self.model.resume()
        self._announce()
        return False

    def _is_wanted(self) -> bool:
        """Whether something runs on the model or waits for it; True while PostgreSQL is down."""
        waits = True

        def query() -> None:
            nonlocal waits
            rows = Generation.objects.filter(model=self.model.spec.id, status=Status.QUEUED)
            waits = rows.exists()

        with release_connection_after():
            try_and_log("idle model", query)
        return waits or self.model.idle_s == 0


class Replicas:
    """Claims replicas of the models assigned to this worker, and drops those it has lost.

    A model is assigned when the worker is to load it without a command.
    """

    def __init__(self, loader: ModelLoader, assigned: Iterable[str]) -> None:
        self._loader, self._worker = loader, loader.worker
        self._assigned = set(assigned)
        self._unloaded_everywhere: frozenset[str] = frozenset()
        self.labels: tuple[str, ...] = tuple(settings.WORKER_LABELS or [socket.gethostname()])

    def may_host(self, spec: ModelSpec) -> bool:
        """Whether the entry of the model allows a worker with these labels."""
        return fleet.may_host(spec, self.labels)

    def is_assigned(self, model: str) -> bool:
        """Whether this worker is to load the model without a command."""
        return model in self._assigned

    def assign(self, model: str) -> None:
        """Have this worker load a model as soon as a replica of it can be claimed."""
        self._assigned.add(model)

    def unassign(self, model: str) -> None:
        """Have this worker not load a model by itself: it was unloaded or evicted here.

        A model that was unloaded everywhere stays assigned, for the time after its next load.
        """
        self._assigned.discard(model)

    def claim(self, spec: ModelSpec) -> bool:
        """Claim a replica of a model; return whether this worker has one. Raise redis' errors."""
        return fleet.claim_replica(spec, self._worker.id)

    def release(self, model: str) -> None:
        """Release the replica of a model that was dropped; its entry may have been removed."""
        with contextlib.suppress(redis.exceptions.RedisError):
            fleet.give_back_replica(model, self._worker.id)

    def offers(self) -> dict[str, bool]:
        """Return the models that this worker would load, and whether it has room for each."""
        if self._worker.is_ending or self._worker.is_draining:
            return {}
        present = tuple(self._loader.models)
        specs = (catalogue().models.get(id_) for id_ in self._assigned.difference(present))
        return {
            spec.id: self._loader.has_room_for(spec)
            for spec in specs
            if spec is not None
            and spec.replicas
            and spec.id not in self._unloaded_everywhere
            and self.may_host(spec)
            and (spec.file is None or spec.file.is_file())
        }

    def watch(self) -> None:
        """Call ``reconcile`` every second, on a thread of its own."""

        def main() -> None:
            while not self._worker.stopped.wait(_CHECK_REPLICAS_S):
                self.reconcile()

        threading.Thread(target=main, name="replicas", daemon=True).start()

    def reconcile(self) -> None:
        """Drop models that this worker may no longer have; load those whose replica it gets."""
        if not any(spec.replicas or spec.hosts for spec in catalogue().models.values()):
            return
        try:
            with release_connection_after():
                self._unloaded_everywhere = orders.unloaded_everywhere()
            self._renew_claims(live_workers())
            while not self._worker.is_ending and self._load_one():
                pass
        except (redis.exceptions.RedisError, django.db.Error) as exc:
            logger.warning("replicas: %s", exc)
        except Exception:  # The thread must survive.
            logger.exception("replicas: they could not be reconciled")

    def _renew_claims(self, live: Sequence[LiveWorker]) -> None:
        held = self._loader.held()
        for id_ in tuple(self._loader.models):
            spec = catalogue().models.get(id_)
            if spec is None or not (spec.replicas or spec.hosts):
                continue
            # A draining worker leaves its replica to another one that offers to load it.
            is_handed_over = self._worker.is_draining and any(
                id_ in worker.offers for worker in live if worker.id != self._worker.id
            )
            if id_ not in held or self._worker.is_ending:
                self.release(id_)
            elif not self.may_host(spec) or is_handed_over:
                self.release(id_)
                self._loader.leave(id_)
            elif not self.claim(spec):
                logger.warning("model %s is dropped: another worker has its replica now", id_)
                self._loader.leave(id_)

    def _load_one(self) -> bool:
        """Claim and load the first model that the plan gives to this worker; False if none.

        One at a time, because the next plan depends on what is loaded then.
        """
        offers, live = self.offers(), live_workers()
        if not offers or self._worker.id not in [worker.id for worker in live]:
            return False
        specs = [spec for spec in catalogue().models.values() if spec.replicas]
        for id_, workers in fleet.planned(specs, live).items():
            if self._worker.id in workers and id_ in offers:
                spec = catalogue().models[id_]
                if self.claim(spec):
                    logger.info("model %s: this worker has claimed a replica", id_)
                    self._loader.load_replica(id_)
                    return True
        return False
