"""Leases: which workers live and what they serve.

A worker renews a key with a short time to live; a worker whose key is gone is dead or cut off, and
what it was running is given up by ``worker.upkeep``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
import redis.exceptions

from worker.redis_clients import site_client

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
LEASE_S = 5
_INDEX = "workers"


def _key(worker: str) -> str:
    return f"worker:{worker}"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as one worker serves it; ``busy`` of its ``slots`` are running."""

    id: str
    slots: int
    busy: int


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker that holds its lease."""

    id: str
    models: tuple[ServedModel, ...]


class Lease:
    """Renews this process's lease on a thread of its own, whatever the engines do."""

    def __init__(self, worker: str, models: Callable[[], list[ServedModel]]) -> None:
        self._worker, self._models = worker, models
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._main, name="lease", daemon=True)

    def start(self) -> None:
        """Announce the worker, then go on announcing it."""
        self.renew()
        self._thread.start()

    def stop(self) -> None:
        """Give the lease back, so that nobody waits for it to end."""
        self._ended.set()
        self._thread.join(timeout=PERIOD_S)
        try:
            site_client().delete(_key(self._worker))
            site_client().srem(_INDEX, self._worker)
        except redis.exceptions.RedisError as exc:
            logger.warning("lease: could not give back: %s", exc)

    def renew(self) -> None:
        """Write the lease once."""
        try:
            pipeline = site_client().pipeline(transaction=False)
            pipeline.set(_key(self._worker), orjson.dumps(self._models()), ex=LEASE_S)
            pipeline.sadd(_INDEX, self._worker)
            pipeline.execute()
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
    return [
        LiveWorker(name, tuple(_served(model) for model in orjson.loads(lease)))
        for name, lease in zip(names, leases, strict=True)
        if lease is not None
    ]


def _served(model: dict[str, Any]) -> ServedModel:
    # By name: a worker of another release may announce more than this one knows.
    return ServedModel(model["id"], model["slots"], model["busy"])


def is_alive(worker: str) -> bool:
    """Whether this worker holds its lease now."""
    return bool(site_client().exists(_key(worker)))


def prune() -> None:
    """Drop the workers without a lease from the index; one that lives comes back with its next."""
    client = site_client()
    gone = [name for name in _members(client) if not client.exists(_key(name.decode()))]
    if gone:
        client.srem(_INDEX, *gone)


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
        """Return the workers that serve this model."""
        return [w for w in self.workers() if any(served.id == model for served in w.models)]


live_view = LiveView()
