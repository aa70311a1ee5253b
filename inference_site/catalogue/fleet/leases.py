"""Leases: which workers are alive and which models they serve.

A worker renews a key with a short time to live. A worker without a key is dead or cut off, and
``runs.maintenance`` fails or requeues its generations. A worker announces itself before it
loads its models, so that other processes see a loading model, which otherwise no worker serves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

import redis.exceptions
from django.conf import settings
from pydantic import TypeAdapter

from inference_site.core.host import Device
from inference_site.core.observability.metrics import LEASE_RENEWED
from inference_site.core.observability.outages import OutageLog
from inference_site.core.storage.cached_value import CachedValue
from inference_site.core.storage.redis import ALLOW_WHEN_FULL, require_writes, site_client

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
LEASE_S = 5
HOST_MEMORY = "memory"
"""The name of the device that is the host's memory."""
_HUNG_S = 15.0
"""Longer than a try may take: each command of Redis has a time limit."""
_RUNS_PER_EXTRA_SECOND = 100
"""For each 100 runs the lease lives a second longer, because the thread that renews it waits longer
for the processor."""
_INDEX = "workers"
_MIN_READ_INTERVAL_S = 0.1
"""Bounds how often ``LiveView.serving_now`` reads Redis, for any number of requests."""
# KEYS: lease, index, unsent tokens. ARGV: the lease, its seconds, id of the worker, seconds of the
# unsent tokens, then pairs of a generation and its tokens.
_RENEW = (
    ALLOW_WHEN_FULL
    + """
redis.call("SET", KEYS[1], ARGV[1], "EX", ARGV[2])
redis.call("SADD", KEYS[2], ARGV[3])
redis.call("DEL", KEYS[3])
for i = 5, #ARGV, 2 do redis.call("HSET", KEYS[3], ARGV[i], ARGV[i + 1]) end
redis.call("EXPIRE", KEYS[3], ARGV[4])
"""
)


def lease_key(worker: str) -> str:
    """Return the key in Redis of a worker's lease."""
    return f"worker:{worker}"


def _unsent_key(worker: str) -> str:
    return f"worker:{worker}:unsent"


class ModelState(StrEnum):
    """A model in one worker: loading → ready → draining or sleeping, or loading → failed."""

    LOADING = "loading"  # The file is being read, or the engine built.
    READY = "ready"  # The worker takes work for it.
    SLEEPING = "sleeping"  # Evicted; its server sleeps, and wakes for the next load.
    DRAINING = "draining"  # No new work; running generations continue.
    FAILED = "failed"  # The load failed; ``reason`` says why.


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One model in one worker; ``busy`` of its ``slots`` are running.

    ``progress`` of a load is from 0 to 1, None if unknown. ``since`` is the Unix time at which the
    model entered its state, or at which a failed load began. ``library`` is the name and version of
    the inference library. ``capabilities`` are announced because a web host may not have the
    model's files. ``run_s`` is the mean duration of the last runs; 0 before the first.
    ``context_length`` is that of a slot.

    Facts of the file: ``size_bytes``, 0 without a file; ``architecture``, ``quantisation``;
    ``trained_context`` in tokens; ``memory_bytes``, the estimate with all slots full, and
    ``memory_parts``, its breakdown. ``taken_bytes`` is the memory of the model's server, and
    ``telemetry`` its own metrics, by the names in ``worker.model_servers.process``.

    ``expected_s`` is the estimated time until a loading model is ready, None if unknown. ``tools``
    is how the model is given the tools of requests; None if it takes no tools. ``away_since`` is
    the Unix time at which the model's server became unreachable; it may come back by itself. 0
    while it is reachable, or if it was never ready.
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
        """Free slots; 0 unless the model is ready."""
        return max(0, self.slots - self.busy) if self.state == ModelState.READY else 0


@dataclass(frozen=True, slots=True)
class HostState:
    """A worker's host; ``load`` is the average of the last minute."""

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
    that of its host. ``memory_bytes`` is the memory of its process. ``labels`` match the ``hosts``
    of entries. ``offers`` maps the models with ``replicas`` that it would load to whether it has
    free memory for them (``fleet.fleet``). ``unloaded`` has the models that were unloaded from
    all workers and not loaded since. ``written_at`` is the worker's clock at the last renewal of
    its lease; 0 if it runs an earlier release.
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
    unloaded: tuple[str, ...] = ()
    written_at: float = field(default=0.0, compare=False)

    def model(self, id_: str) -> ModelReport | None:
        """Return the worker's report of a model; None if it does not have the model."""
        return next((served for served in self.models if served.id == id_), None)

    def serves(self, model: str) -> bool:
        """Whether this worker takes work for the model."""
        served = self.model(model)
        return served is not None and served.state == ModelState.READY and not self.is_draining


_document = TypeAdapter(LiveWorker)
"""Unknown fields are ignored and missing ones get defaults: workers may run another release."""


class Lease:
    """Renews the lease of this process on its own thread; ``describe`` returns its content.

    ``unsent`` returns the output tokens so far of the generations that have sent nothing, by id;
    they outlive the lease (see ``unsent_tokens``).
    """

    def __init__(
        self,
        worker: str,
        describe: Callable[[], LiveWorker],
        unsent: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._worker, self._describe, self._unsent = worker, describe, unsent
        self._ttl_s = LEASE_S
        self._tried_at: float | None = None
        self._outage = OutageLog(logger, "lease: could not renew")
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._main, name="lease", daemon=True)

    def start(self) -> None:
        """Write the lease, then start the thread that renews it."""
        self.renew()
        self._thread.start()

    def stop(self) -> None:
        """Delete the lease, so that no process waits for it to expire."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=PERIOD_S)
        try:
            site_client().delete(lease_key(self._worker))
            site_client().srem(_INDEX, self._worker)
        except redis.exceptions.RedisError as exc:
            logger.warning("lease: could not delete: %s", exc)

    def renew(self, ttl_s: int | None = None) -> None:
        """Write the lease once; ``ttl_s`` changes its time to live, also for later renewals."""
        with self._lock:
            self._ttl_s = ttl_s or self._ttl_s
            try:
                described = replace(self._describe(), written_at=time.time())
                busy = sum(model.busy for model in described.models)
                keys = (lease_key(self._worker), _INDEX, _unsent_key(self._worker))
                kept_s = self._ttl_s + busy // _RUNS_PER_EXTRA_SECOND
                lease = (_document.dump_json(described), kept_s, self._worker)
                unsent: list[str | int] = [settings.RUN_TTL_S]
                for id_and_tokens in self._unsent().items():
                    unsent += id_and_tokens
                site_client().eval(_RENEW, len(keys), *keys, *lease, *unsent)
                LEASE_RENEWED.set_to_current_time()
                self._outage.succeeded()
            except redis.exceptions.RedisError as exc:
                self._outage.failed(exc)
            finally:
                self._tried_at = time.monotonic()

    @property
    def is_hung(self) -> bool:
        """Whether the process has not even tried to renew the lease for a while, or never has.

        A renewal that Redis did not take is a try: a new process would not help.
        """
        return self._tried_at is None or time.monotonic() - self._tried_at > _HUNG_S

    def _main(self) -> None:
        while not self._ended.wait(PERIOD_S):
            try:
                self.renew()
            except Exception:
                # The thread must survive: without a lease, all runs of this worker are ended.
                logger.exception("lease: could not renew")


def live_workers() -> list[LiveWorker]:
    """Return the workers that hold a lease. Raise redis' errors when Redis is down."""
    names = sorted(_indexed_workers())
    if not names:
        return []
    leases: Any = site_client().mget([lease_key(name) for name in names])
    return [_by_our_clock(_document.validate_json(lease)) for lease in leases if lease is not None]


def _by_our_clock(worker: LiveWorker) -> LiveWorker:
    """Return it with its times by the clock of this process.

    They are compared with our times: a request would wait longer for the server of a model by as
    much as the worker's clock is ahead. A lease is some seconds old; less than that is no fault.
    """
    ahead_s = worker.written_at - time.time()
    if not worker.written_at or abs(ahead_s) <= LEASE_S:
        return worker
    models = (
        replace(
            served,
            since=served.since and served.since - ahead_s,
            away_since=served.away_since and served.away_since - ahead_s,
        )
        for served in worker.models
    )
    return replace(worker, started_at=worker.started_at - ahead_s, models=tuple(models))


def is_alive(worker: str) -> bool:
    """Whether this worker holds its lease."""
    return bool(site_client().exists(lease_key(worker)))


def unsent_tokens(worker: str, generation_id: str) -> int:
    """Return the output tokens of a generation at the last renewal of its worker's lease.

    0 if it had none, or had sent some: those are in its event log.
    """
    tokens: Any = site_client().hget(_unsent_key(worker), generation_id)
    return int(tokens or 0)


def prune() -> list[str]:
    """Remove workers without a lease from the index, and return their ids.

    A removed worker that is alive adds itself again with its next renewal.
    """
    client = site_client()
    dead = [name for name in _indexed_workers() if not client.exists(lease_key(name))]
    if dead:
        client.srem(_INDEX, *dead)
    return dead


def _indexed_workers() -> list[str]:
    members: Any = site_client().smembers(_INDEX)
    return [name.decode() for name in members]


def _live_workers_or_error() -> list[LiveWorker] | redis.exceptions.RedisError:
    try:
        live = live_workers()
        if not live:  # Perhaps they live, and Redis does not take their leases.
            require_writes(site_client())
    except redis.exceptions.RedisError as exc:
        return exc
    return live


def _or_raise(found: list[LiveWorker] | redis.exceptions.RedisError) -> list[LiveWorker]:
    if isinstance(found, redis.exceptions.RedisError):
        # Many requests raise this one object, and each would add its frames to the traceback.
        raise found.with_traceback(None)
    return found


class LiveView:
    """A cache of the live workers, read once a second, because every request needs them."""

    def __init__(self, ttl_s: float = 1.0) -> None:
        self._recent = CachedValue(_live_workers_or_error, ttl_s)

    def keep_fresh(self) -> None:
        """Read the workers on a thread, so that no request waits for them."""
        self._recent.keep_fresh()

    def workers(self) -> list[LiveWorker]:
        """Return the workers, at most a second old. Raise redis' errors when Redis does not answer,
        or takes no writes: then the leases of all workers expire, although the workers live.

        An error is cached, too, so that only one thread at a time waits for an unreachable Redis.
        """
        return _or_raise(self._recent.now())

    def refresh(self) -> list[LiveWorker]:
        """Read the workers, cache and return them. Raise redis' errors."""
        return _or_raise(self._recent.no_older_than(0))

    def forget(self) -> None:
        """Drop the cached workers."""
        self._recent.forget()

    def serving(self, model: str) -> list[LiveWorker]:
        """Return the workers that take work for this model."""
        return [worker for worker in self.workers() if worker.serves(model)]

    def serving_now(self, model: str) -> list[LiveWorker]:
        """Return the workers that take work for this model; if the cache has none, read again.

        So the first request after a load finds the worker.
        """
        if serving := self.serving(model):
            return serving
        workers = _or_raise(self._recent.no_older_than(_MIN_READ_INTERVAL_S))
        return [worker for worker in workers if worker.serves(model)]

    def away_since(self, model: str) -> float:
        """Return when the last server of this model became unreachable; 0 if one is reachable.

        Also 0 if none will come back by itself.
        """
        if self.serving(model):
            return 0.0
        return max((served.away_since for served in self.having(model)), default=0.0)

    def having(self, model: str) -> list[ModelReport]:
        """Return each worker's report of this model, in any state."""
        found = (worker.model(model) for worker in self.workers())
        return [served for served in found if served is not None]


live_view = LiveView()
