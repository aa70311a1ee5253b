"""What a worker process holds: its engines, its publisher and its lease."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from django.conf import settings
from django.db import DatabaseError
from redis.exceptions import RedisError

from worker.engines.base import Engine, ModelSpec
from worker.engines.registry import load_engine
from worker.hooks import check_hooks
from worker.leases import Lease, LiveWorker, ServedModel
from worker.models import Claim, Generation
from worker.publisher import Publisher
from worker.run import Run
from worker.upkeep import give_up_orphans

logger = logging.getLogger(__name__)

_ORPHANS_S = 10.0


class LoadedModel:
    """An engine and its slots."""

    def __init__(self, spec: ModelSpec, engine: Engine) -> None:
        self.spec, self.engine = spec, engine
        self._free = threading.BoundedSemaphore(spec.slots)
        self._busy = 0
        self.missed_bell = False
        """Whether a bell was heard while no slot was free; whoever frees one looks again."""

    @property
    def served(self) -> ServedModel:
        """What the lease says of this model."""
        return ServedModel(self.spec.id, self.spec.slots, self._busy)

    @contextmanager
    def slot(self) -> Iterator[bool]:
        """Hold a slot if one is free; yield whether one is."""
        if not self._free.acquire(blocking=False):
            yield False
            return
        self._busy += 1
        try:
            yield True
        finally:
            self._busy -= 1
            self._free.release()


class Runtime:
    """One worker process. ``start`` before the first task, ``stop`` after the last."""

    def __init__(self, specs: list[ModelSpec]) -> None:
        self.id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self._specs = specs
        self._models: dict[str, LoadedModel] = {}
        self._publisher = Publisher()
        self._lease = Lease(self.id, self._described)
        self._draining = False
        self._running: set[str] = set()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Load every model, then announce them.

        Raise EngineLoadError for one that cannot load, and ImproperlyConfigured for a bad hook.
        """
        check_hooks()
        for spec in self._specs:
            self._models[spec.id] = LoadedModel(spec, load_engine(spec))
            logger.info("loaded model %s on %s (%d slots)", spec.id, spec.engine, spec.slots)
        self._publisher.start()
        self._lease.start()
        threading.Thread(target=self._watch_orphans, name="orphans", daemon=True).start()

    def drain(self) -> None:
        """Take no new work, and give what is running ``DRAIN_TIMEOUT_S`` to end by itself."""
        self._draining = True
        timer = threading.Timer(settings.DRAIN_TIMEOUT_S, self._publisher.stop_all)
        timer.daemon = True
        timer.start()

    def stop(self) -> None:
        """Send out what is left and give the lease back."""
        self._stopped.set()
        self._publisher.stop()
        self._lease.stop()
        for model in self._models.values():
            model.engine.close()

    def serve(self, model_id: str) -> None:
        """Answer a bell: run waiting generations of the model until none waits or no slot is free.

        A thread that ends a generation looks for the next one itself, so under load nobody waits
        for a bell.
        """
        model = self._models.get(model_id)
        if model is None:
            logger.error("a bell for %s, which this worker does not serve", model_id)
            return
        model.missed_bell = True
        while model.missed_bell:
            with model.slot() as free:
                if not free:
                    return
                model.missed_bell = False
                self._run_waiting(model)

    def _run_waiting(self, model: LoadedModel) -> None:
        while not self._draining:
            claim = Generation.objects.claim(model.spec.id, self.id)
            if claim is None:
                return
            self._run(model, claim)

    def _described(self) -> LiveWorker:
        models = tuple(model.served for model in self._models.values())
        return LiveWorker(self.id, models, is_draining=self._draining)

    def _run(self, model: LoadedModel, claim: Claim) -> None:
        self._running.add(claim.public_id)
        try:
            Run(claim, self._publisher.open(claim.public_id)).drive(model.engine)
        finally:
            self._running.discard(claim.public_id)

    def _watch_orphans(self) -> None:
        """Give up rows that say they run here and do not: a claim whose reply was lost, say."""
        while not self._stopped.wait(_ORPHANS_S):
            try:
                give_up_orphans(self.id, frozenset(self._running))
            except (DatabaseError, RedisError) as exc:
                logger.warning("orphans: %s", exc)
