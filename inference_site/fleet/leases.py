"""Leases: which workers are alive and which models they serve.

A worker renews a key with a short time to live. A worker whose key is gone is dead or cut off, and
``generations.maintenance`` ends or requeues its generations. A worker announces itself before it
loads its models, so that others can tell a loading model from one that no worker serves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import redis.exceptions
from pydantic import TypeAdapter

from inference_site.domain.device import Device
from inference_site.observability.metrics import LEASE_RENEWED
from inference_site.storage.cached_value import CachedValue
from inference_site.storage.redis import ALLOW_WHEN_FULL, site_client

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
LEASE_S = 5
HOST_MEMORY = "memory"
"""The name of the device that is the host's memory."""
_RUNS_A_SECOND = 100
"""For each so many runs a lease lives a second longer: of as many threads that want to compute, the
one that renews it has its turn late."""
_INDEX = "workers"
_MOMENT_S = 0.1
"""However many requests ask who lives now, no more than ten a second read it."""
# KEYS: lease, index. ARGV: the lease, its seconds, id of the worker.
_RENEW = (
    ALLOW_WHEN_FULL
    + """
redis.call("SET", KEYS[1], ARGV[1], "EX", ARGV[2])
redis.call("SADD", KEYS[2], ARGV[3])
"""
)


def lease_key(worker: str) -> str:
    """Return the key in Redis that lives as long as a worker's lease."""
    return f"worker:{worker}"


class ModelState(StrEnum):
    """A model in one worker: loading → ready → draining or sleeping, or loading → failed."""

    LOADING = "loading"  # The file is being read, or the engine built.
    READY = "ready"  # The worker takes work for it.
    SLEEPING = "sleeping"  # It made room; its server is there, and wakes for the next load.
    DRAINING = "draining"  # No new work; running generations continue.
    FAILED = "failed"  # The load failed; ``reason`` says why.


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One model in one worker; ``busy`` of its ``slots`` are running.

    ``progress`` of a load is from 0 to 1, None when it is unknown. ``since`` is the Unix time at
    which the model entered its state, or at which a failed load began. ``library`` is the name and
    version of the inference library. ``capabilities`` are what requests may ask for; they are
    announced because a web host may not have the model's files. ``run_s`` is how long its last runs
    took, in the mean; 0 before the first. What is known of its file: ``size_bytes``, 0 without one;
    its ``architecture`` and ``quantisation``; ``trained_context``, in tokens; ``memory_bytes``,
    about what it needs with all slots full, and ``memory_parts``, what that is made of.
    ``context_length`` is that of a slot. ``taken_bytes`` is what its server takes, and
    ``telemetry`` what that tells of itself, by the names of ``worker.model_servers.telemetry``.
    ``expected_s`` is in how many seconds a model that is loading should be ready, by how long its
    loads took and those before it; None when that is unknown. ``tools`` is how it is shown the
    tools of requests; None where it takes none. ``away_since`` is when its server went away, which
    may come back by itself; 0 while it is there, and if it was never ready.
    """

    id: str
    slots: int
    busy: int
    state: ModelState = ModelState.READY
    progress: float | None = None
    reason: str = ""
    since: float = 0.0
    engine: str = ""
    library: str = ""
    capabilities: tuple[str, ...] = ()
    run_s: float = 0.0
    context_length: int = 0
    size_bytes: int = 0
    memory_bytes: int = 0
    memory_parts: str = ""
    architecture: str = ""
    quantisation: str = ""
    trained_context: int = 0
    taken_bytes: int = 0
    telemetry: dict[str, float] = field(default_factory=dict)
    expected_s: float | None = None
    tools: Literal["native", "prompt"] | None = None
    away_since: float = 0.0

    @property
    def free(self) -> int:
        """The number of free slots; 0 unless the model is ready."""
        return max(0, self.slots - self.busy) if self.state == ModelState.READY else 0


@dataclass(frozen=True, slots=True)
class HostState:
    """A worker's host: its processor, the load of its last minute, its memory and its GPUs."""

    cpu: str = ""
    cores: int = 0
    load: float = 0.0
    memory: Device | None = None
    gpus: tuple[Device, ...] = ()
    python: str = ""


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker that holds its lease.

    ``host`` is a host name, ``started_at`` a Unix time. ``loadable`` has the ids of the models that
    it can load on command. ``release`` is the version of this program in the worker. ``state`` is
    that of its host. ``memory_bytes`` is what its process has in memory. ``labels`` are its names
    in the ``hosts`` of entries. ``offers`` are the models with ``replicas`` that it would load, and
    whether it has room for each (``fleet.placement``).
    """

    id: str
    models: tuple[ModelReport, ...] = ()
    host: str = ""
    started_at: float = 0.0
    is_draining: bool = False
    devices: tuple[Device, ...] = ()
    loadable: tuple[str, ...] = ()
    release: str = ""
    state: HostState | None = None
    memory_bytes: int = 0
    labels: tuple[str, ...] = ()
    offers: dict[str, bool] = field(default_factory=dict)

    def model(self, id_: str) -> ModelReport | None:
        """Return this worker's report of the model, None if it does not have it."""
        return next((served for served in self.models if served.id == id_), None)

    def serves(self, model: str) -> bool:
        """Return whether this worker takes work for the model."""
        served = self.model(model)
        return served is not None and served.state == ModelState.READY and not self.is_draining


_document = TypeAdapter(LiveWorker)
"""Unknown fields are ignored and missing ones get defaults: workers may run another release."""


class Lease:
    """Renews the lease of this process on its own thread, independently of the engines.

    ``describe`` returns the value to announce.
    """

    def __init__(self, worker: str, describe: Callable[[], LiveWorker]) -> None:
        self._worker, self._describe = worker, describe
        self._ttl_s = LEASE_S
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._main, name="lease", daemon=True)

    def start(self) -> None:
        """Write the lease, then start the thread that renews it."""
        self.renew()
        self._thread.start()

    def stop(self) -> None:
        """Delete the lease, so that nobody has to wait for it to expire."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=PERIOD_S)
        try:
            site_client().delete(lease_key(self._worker))
            site_client().srem(_INDEX, self._worker)
        except redis.exceptions.RedisError as exc:
            logger.warning("lease: could not delete: %s", exc)

    def renew(self, ttl_s: int | None = None) -> None:
        """Write the lease once; ``ttl_s``, if given, becomes its time to live from now on."""
        with self._lock:
            self._ttl_s = ttl_s or self._ttl_s
            try:
                described = self._describe()
                busy = sum(model.busy for model in described.models)
                lease, keys = _document.dump_json(described), (lease_key(self._worker), _INDEX)
                kept_s = self._ttl_s + busy // _RUNS_A_SECOND
                site_client().eval(_RENEW, 2, *keys, lease, kept_s, self._worker)
                LEASE_RENEWED.set_to_current_time()
            except redis.exceptions.RedisError as exc:
                logger.warning("lease: could not renew: %s", exc)

    def _main(self) -> None:
        while not self._ended.wait(PERIOD_S):
            try:
                self.renew()
            except Exception:
                # The thread must survive: without a lease, all runs of this worker are ended.
                logger.exception("lease: could not renew")


def live_workers() -> list[LiveWorker]:
    """Return the workers that hold a lease. Raise redis' errors when Redis is down."""
    client = site_client()
    names = sorted(name.decode() for name in _members(client))
    if not names:
        return []
    leases: Any = client.mget([lease_key(name) for name in names])
    return [_document.validate_json(lease) for lease in leases if lease is not None]


def is_alive(worker: str) -> bool:
    """Return whether this worker holds its lease."""
    return bool(site_client().exists(lease_key(worker)))


def prune() -> list[str]:
    """Remove workers without a lease from the index, and return their ids.

    A worker that is alive after all adds itself again with its next renewal.
    """
    client = site_client()
    names = [name.decode() for name in _members(client)]
    gone = [name for name in names if not client.exists(lease_key(name))]
    if gone:
        client.srem(_INDEX, *gone)
    return gone


def _members(client: Any) -> set[bytes]:
    members: set[bytes] = client.smembers(_INDEX)
    return members


def _live_workers_or_error() -> list[LiveWorker] | redis.exceptions.RedisError:
    try:
        return live_workers()
    except redis.exceptions.RedisError as exc:
        return exc


def _or_raise(found: list[LiveWorker] | redis.exceptions.RedisError) -> list[LiveWorker]:
    if isinstance(found, redis.exceptions.RedisError):
        raise found
    return found


class LiveView:
    """The live workers, read once a second, because every request asks for them."""

    def __init__(self, ttl_s: float = 1.0) -> None:
        self._recent = CachedValue(_live_workers_or_error, ttl_s)

    def workers(self) -> list[LiveWorker]:
        """Return the workers as they were a second ago at most. Raise redis' errors.

        An error lasts as long, so that only one thread at a time waits for an unreachable Redis.
        """
        return _or_raise(self._recent.now())

    def workers_now(self) -> list[LiveWorker]:
        """Return the workers as they were a moment ago at most. Raise redis' errors."""
        return _or_raise(self._recent.no_older_than(_MOMENT_S))

    def look(self) -> list[LiveWorker]:
        """Return the workers as they are, which this process then knows. Raise redis' errors."""
        return _or_raise(self._recent.no_older_than(0))

    def forget(self) -> None:
        """Have them read anew."""
        self._recent.forget()

    def serving(self, model: str) -> list[LiveWorker]:
        """Return the workers that take work for this model."""
        return [worker for worker in self.workers() if worker.serves(model)]

    def serving_now(self, model: str) -> list[LiveWorker]:
        """Return the same; when there seem to be none, look again before that is believed.

        So a worker that has just become ready is used by its first request.
        """
        return self.serving(model) or [w for w in self.workers_now() if w.serves(model)]

    def away_since(self, model: str) -> float:
        """Return when the last server of this model went away, which may come back; 0 if one is
        there, or none will come back."""
        if self.serving(model):
            return 0.0
        return max((served.away_since for served in self.having(model)), default=0.0)

    def having(self, model: str) -> list[ModelReport]:
        """Return every worker's report of this model, in any state."""
        found = (worker.model(model) for worker in self.workers())
        return [served for served in found if served is not None]


live_view = LiveView()
