"""The places of this worker among the replicas of models, and its labels (``fleet.placement``)."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import redis.exceptions
from django.conf import settings

from inference_site.catalogue.catalogue import catalogue
from inference_site.domain.model_spec import ModelSpec
from inference_site.fleet import fleet, placement
from inference_site.fleet.leases import LiveWorker, live_workers

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


class Host(Protocol):
    """The models of a worker, as they are seen from here."""

    id: str

    @property
    def is_ending(self) -> bool:
        """Whether the worker ends."""

    @property
    def is_draining(self) -> bool:
        """Whether it was told to take nothing new."""

    def present(self) -> Collection[str]:
        """Return the models that it has in any state."""

    def held(self) -> Collection[str]:
        """Return those of them that have not failed to load, and do not leave."""

    def has_room_for(self, spec: ModelSpec) -> bool:
        """Whether a model can be loaded beside those that it has."""

    def load_replica(self, model: str) -> None:
        """Begin to load a model, and say so in the lease."""

    def leave(self, model: str) -> None:
        """Take nothing new for a model, and drop it when nothing runs on it any more."""


class Replicas:
    """Claims places for the models that a worker was told to load, and has it leave lost ones."""

    def __init__(self, host: Host, told: Iterable[str]) -> None:
        self._host = host
        self._told = set(told)
        self._stays_unloaded: frozenset[str] = frozenset()
        self.labels: tuple[str, ...] = tuple(settings.WORKER_LABELS or [socket.gethostname()])

    def may_host(self, spec: ModelSpec) -> bool:
        """Whether the model may be on this worker."""
        return placement.may_host(spec, self.labels)

    def is_told(self, model: str) -> bool:
        """Whether this worker is to load the model by itself."""
        return model in self._told

    def tell(self, model: str) -> None:
        """Have this worker load a model by itself, as soon as there is a place for it."""
        self._told.add(model)

    def forget(self, model: str) -> None:
        """Have this worker not load a model by itself: it was unloaded, or made room."""
        self._told.discard(model)

    def unloaded(self, model: str) -> None:
        """Note that a model was unloaded here by a command. It goes elsewhere, unless it was to be
        unloaded everywhere: then its workers wait for the next command."""
        try:
            is_everywhere = model in fleet.unloaded_on_purpose()
        except redis.exceptions.RedisError:
            is_everywhere = False
        if not is_everywhere:
            self.forget(model)

    def claim(self, spec: ModelSpec) -> bool:
        """Claim a place for a model; return whether there was one. Raise redis' errors."""
        return placement.claim(spec, self._host.id)

    def give_back(self, model: str) -> None:
        """Give the place of a model back that has been dropped."""
        spec = catalogue().models.get(model)
        if spec is not None and spec.replicas:
            with contextlib.suppress(redis.exceptions.RedisError):
                placement.give_back(model, self._host.id)

    def offers(self) -> dict[str, bool]:
        """Return the models that it would load by itself, and whether it has room for each."""
        if self._host.is_ending or self._host.is_draining:
            return {}
        present = self._host.present()
        specs = (catalogue().models.get(id_) for id_ in self._told - {*present})
        return {
            spec.id: self._host.has_room_for(spec)
            for spec in specs
            if spec is not None
            and spec.replicas
            and spec.id not in self._stays_unloaded
            and self.may_host(spec)
            and (spec.file is None or spec.file.is_file())
        }

    def watch(self, stopped: threading.Event) -> None:
        """Look every second, on a thread of its own."""

        def main() -> None:
            while not stopped.wait(_LOOK_S):
                self.look()

        threading.Thread(target=main, name="replicas", daemon=True).start()

    def look(self) -> None:
        """Leave what this worker may not have any more, and load what is its to load."""
        if not any(spec.replicas or spec.hosts for spec in catalogue().models.values()):
            return
        try:
            self._stays_unloaded = fleet.unloaded_on_purpose()
            live = live_workers()
            self._check_held(live)
            while not self._host.is_ending and self._loads_one():
                pass
        except redis.exceptions.RedisError as exc:
            logger.warning("replicas: %s", exc)
        except Exception:  # The thread must survive.
            logger.exception("replicas: cannot look")

    def _check_held(self, live: Sequence[LiveWorker]) -> None:
        held = self._host.held()
        for id_ in self._host.present():
            spec = catalogue().models.get(id_)
            if spec is None or not (spec.replicas or spec.hosts):
                continue
            if id_ not in held or self._host.is_ending:
                self.give_back(id_)
            elif not self.may_host(spec) or self._is_given_away(spec, live):
                self.give_back(id_)
                self._host.leave(id_)
            elif not self.claim(spec):
                logger.warning("model %s: its place is another worker's now", id_)
                self._host.leave(id_)

    def _is_given_away(self, spec: ModelSpec, live: Sequence[LiveWorker]) -> bool:
        """Whether the worker takes nothing, and another one would take this model's place."""
        return self._host.is_draining and any(
            spec.id in worker.offers for worker in live if worker.id != self._host.id
        )

    def _loads_one(self) -> bool:
        """Claim the first place that is this worker's by the leases; return whether there was one.

        One at a time: the next is planned with what is loaded then.
        """
        offers, live = self.offers(), live_workers()
        if not offers or self._host.id not in [worker.id for worker in live]:
            return False
        specs = [spec for spec in catalogue().models.values() if spec.replicas]
        for id_, workers in placement.planned(specs, live).items():
            if self._host.id in workers and id_ in offers:
                spec = catalogue().models[id_]
                if self.claim(spec):
                    logger.info("model %s: this worker has one of its places", id_)
                    self._host.load_replica(id_)
                    return True
        return False
