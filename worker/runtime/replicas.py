"""The replicas of models that this worker has or claims (see ``fleet.placement``)."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import django.db
import redis.exceptions
from django.conf import settings

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.fleet import orders, placement
from inference_site.catalogue.fleet.leases import LiveWorker, live_workers
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.storage.postgresql import release_connection_after

if TYPE_CHECKING:
    from worker.runtime.loading import ModelLoader

logger = logging.getLogger(__name__)

_CHECK_S = 1.0


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
        return placement.may_host(spec, self.labels)

    def is_assigned(self, model: str) -> bool:
        """Whether this worker is to load the model without a command."""
        return model in self._assigned

    def assign(self, model: str) -> None:
        """Have this worker load a model as soon as there is a place for it."""
        self._assigned.add(model)

    def unassign(self, model: str) -> None:
        """Have this worker not load a model by itself: it was unloaded or evicted here.

        A model that was unloaded everywhere stays assigned, for the time after its next load.
        """
        self._assigned.discard(model)

    def claim(self, spec: ModelSpec) -> bool:
        """Claim a place for a model; return whether there was one. Raise redis' errors."""
        return placement.claim(spec, self._worker.id)

    def release(self, model: str) -> None:
        """Give up the place of a model that was dropped."""
        spec = catalogue().models.get(model)
        if spec is not None and spec.replicas:
            with contextlib.suppress(redis.exceptions.RedisError):
                placement.give_back(model, self._worker.id)

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

    def watch(self, stopped: threading.Event) -> None:
        """Call ``reconcile`` every second, on a thread of its own."""

        def main() -> None:
            while not stopped.wait(_CHECK_S):
                self.reconcile()

        threading.Thread(target=main, name="replicas", daemon=True).start()

    def reconcile(self) -> None:
        """Drop models that this worker may no longer have, and load those whose place it gets."""
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
            logger.exception("replicas: cannot look")

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
                logger.warning("model %s: its place is another worker's now", id_)
                self._loader.leave(id_)

    def _load_one(self) -> bool:
        """Claim and load the first model that the plan gives to this worker; False if none.

        One at a time, because the next plan depends on what is loaded then.
        """
        offers, live = self.offers(), live_workers()
        if not offers or self._worker.id not in [worker.id for worker in live]:
            return False
        specs = [spec for spec in catalogue().models.values() if spec.replicas]
        for id_, workers in placement.planned(specs, live).items():
            if self._worker.id in workers and id_ in offers:
                spec = catalogue().models[id_]
                if self.claim(spec):
                    logger.info("model %s: this worker has one of its places", id_)
                    self._loader.load_replica(id_)
                    return True
        return False
