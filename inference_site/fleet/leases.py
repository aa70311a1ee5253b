"""Leases: which workers live and what they serve.

A worker renews a key with a short time to live; a worker whose key is gone is dead or cut off, and
what it was running is given up by ``generations.maintenance``. It is announced before its models
are loaded, so that a model that is loading can be told from one that nobody serves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import redis.exceptions
from pydantic import TypeAdapter

from inference_site.observability.metrics import LEASE_RENEWED
from inference_site.storage.redis_clients import site_client

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
LEASE_S = 5
_INDEX = "workers"


def _key(worker: str) -> str:
    return f"worker:{worker}"


class ModelState(StrEnum):
    """A model in one worker: loading → ready → draining, or loading → failed."""

    LOADING = "loading"  # Its file is read, or its engine is built.
    READY = "ready"  # It takes work.
    DRAINING = "draining"  # It takes no new work; what runs may end.
    FAILED = "failed"  # It could not be loaded; ``reason`` says why.


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model as one worker has it; ``busy`` of its ``slots`` are running.

    ``progress`` is how far a load is, from 0 to 1, None when that is not known. ``since`` is when
    it came into its state, or, for one that failed, when its load began; in Unix seconds.
    ``library`` names what runs it, with its version. ``capabilities`` are what requests may ask of
    it: a web host may not have the files that say so.
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

    @property
    def free(self) -> int:
        """How many of its slots are free; none unless it is ready."""
        return max(0, self.slots - self.busy) if self.state == ModelState.READY else 0


@dataclass(frozen=True, slots=True)
class Device:
    """What holds weights: a GPU, or the host's own memory. Sizes are bytes."""

    name: str
    memory_total: int
    memory_free: int


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker that holds its lease.

    ``host`` is its machine, ``started_at`` Unix seconds. ``loadable`` are the ids of models that
    it can be told to load. ``parent`` is the worker that started it for such a model, if any did.
    ``release`` is the version of this program that it runs.
    """

    id: str
    models: tuple[ModelReport, ...] = ()
    host: str = ""
    started_at: float = 0.0
    is_draining: bool = False
    devices: tuple[Device, ...] = ()
    loadable: tuple[str, ...] = ()
    parent: str = ""
    release: str = ""

    def model(self, id_: str) -> ModelReport | None:
        """Return what it has of this model."""
        return next((served for served in self.models if served.id == id_), None)

    def serves(self, model: str) -> bool:
        """Whether it takes work for this model."""
        served = self.model(model)
        return served is not None and served.state == ModelState.READY and not self.is_draining


_document = TypeAdapter(LiveWorker)
"""A worker of another release may announce more than this one knows, or less."""


class Lease:
    """Renews this process's lease on a thread of its own, whatever the engines do.

    ``describe`` returns what is announced.
    """

    def __init__(self, worker: str, describe: Callable[[], LiveWorker]) -> None:
        self._worker, self._describe = worker, describe
        self._ttl_s = LEASE_S
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._main, name="lease", daemon=True)

    def start(self) -> None:
        """Announce the worker, then go on announcing it."""
        self.renew()
        self._thread.start()

    def stop(self) -> None:
        """Give the lease back, so that nobody waits for it to end."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=PERIOD_S)
        try:
            site_client().delete(_key(self._worker))
            site_client().srem(_INDEX, self._worker)
        except redis.exceptions.RedisError as exc:
            logger.warning("lease: could not give back: %s", exc)

    def renew(self, ttl_s: int | None = None) -> None:
        """Write the lease once. From now on it lives for ``ttl_s``, if that is given."""
        with self._lock:
            self._ttl_s = ttl_s or self._ttl_s
            try:
                pipeline = site_client().pipeline(transaction=False)
                pipeline.set(
                    _key(self._worker), _document.dump_json(self._describe()), ex=self._ttl_s
                )
                pipeline.sadd(_INDEX, self._worker)
                pipeline.execute()
                LEASE_RENEWED.set_to_current_time()
            except redis.exceptions.RedisError as exc:
                logger.warning("lease: could not renew: %s", exc)

    def _main(self) -> None:
        while not self._ended.wait(PERIOD_S):
            try:
                self.renew()
            except Exception:
                # A lease that is not renewed ends every run of this worker.
                logger.exception("lease: could not renew")


def live_workers() -> list[LiveWorker]:
    """Return the workers that hold a lease now. Raise redis' errors when Redis is down."""
    client = site_client()
    names = sorted(name.decode() for name in _members(client))
    if not names:
        return []
    leases: Any = client.mget([_key(name) for name in names])
    return [_document.validate_json(lease) for lease in leases if lease is not None]


def is_alive(worker: str) -> bool:
    """Whether this worker holds its lease now."""
    return bool(site_client().exists(_key(worker)))


def prune() -> list[str]:
    """Drop the workers without a lease from the index, and return them.

    One that lives comes back with its next renewal.
    """
    client = site_client()
    names = [name.decode() for name in _members(client)]
    gone = [name for name in names if not client.exists(_key(name))]
    if gone:
        client.srem(_INDEX, *gone)
    return gone


def _members(client: Any) -> set[bytes]:
    members: set[bytes] = client.smembers(_INDEX)
    return members


class LiveView:
    """The live workers, remembered for a second: asked for on every request."""

    def __init__(self, ttl_s: float = 1.0) -> None:
        self._ttl_s = ttl_s
        self._read_at = float("-inf")
        self._workers: list[LiveWorker] = []
        self._failure: redis.exceptions.RedisError | None = None
        self._lock = threading.Lock()

    def workers(self) -> list[LiveWorker]:
        """Return the workers as they were at most ``ttl_s`` ago.

        A failure is remembered too: with Redis away only one thread at a time waits for it.
        """
        with self._lock:
            if time.monotonic() - self._read_at > self._ttl_s:
                self._read()
            if self._failure is not None:
                raise self._failure
            return self._workers

    def _read(self) -> None:
        try:
            self._workers, self._failure = live_workers(), None
        except redis.exceptions.RedisError as exc:
            self._failure = exc
        self._read_at = time.monotonic()

    def serving(self, model: str) -> list[LiveWorker]:
        """Return the workers that take work for this model."""
        return [worker for worker in self.workers() if worker.serves(model)]

    def having(self, model: str) -> list[ModelReport]:
        """Return what each worker has of this model, in whatever state."""
        found = (worker.model(model) for worker in self.workers())
        return [served for served in found if served is not None]


live_view = LiveView()
