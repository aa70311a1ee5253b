"""The fleet: every live worker of the site, and what an operator can tell them.

What is told goes through Redis to the worker that is meant; the answer is the state that it then
announces in its lease, a moment later. Who calls these functions has made sure that the caller may:
models belong to the whole site, so for the API that is the scope ``models:write``.

    FleetError
    ├── UnknownModel     the catalogue has no such model
    ├── UnknownWorker    no worker of this id lives
    ├── NotLoadable      no live worker can load the model
    └── NotLoaded        the worker does not have the model
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.domain.model_spec import ModelSpec
from inference_site.fleet.commands import Command, send
from inference_site.fleet.leases import LiveWorker, ModelReport, ModelState, live_view, live_workers
from inference_site.storage.redis_clients import site_client

_ASKED_S = 30
"""For how long a load that was asked for counts, until a worker announces it."""
_TOLD_S = 3
"""For how long an unload may take to show in a lease."""


class FleetError(Exception):
    """What the operator wants cannot be done."""


class UnknownModel(FleetError):
    """The catalogue has no such model."""


class UnknownWorker(FleetError):
    """No worker of this id lives."""


class NotLoadable(FleetError):
    """No live worker can load this model."""


class NotLoaded(FleetError):
    """No such worker has this model."""


class ModelStatus(StrEnum):
    """A model on the whole site, by the best that any worker has of it."""

    LOADED = "loaded"  # At least one worker takes work for it.
    LOADING = "loading"  # None does yet, and at least one is loading it, or was told to.
    FAILED = "failed"  # None does, and the last that tried could not load it.
    UNLOADED = "unloaded"  # No worker has it; one that is draining it counts as none.


def workers() -> list[LiveWorker]:
    """Return the live workers with their models, as they are now.

    Each has ``id``, ``host``, ``started_at``, ``is_draining``, ``devices`` (memory), ``models``
    (state, progress, reason, slots, busy, free, engine, library), ``loadable`` and ``parent``.
    Raise redis' errors when Redis is down.
    """
    return live_workers()


def status_of(model: str) -> ModelStatus:
    """Return how this model of the catalogue is served, as of at most a second ago."""
    return status_among(live_view.workers(), model)


def status_among(live: Iterable[LiveWorker], model: str) -> ModelStatus:
    """Return how this model is served by these workers."""
    return statuses_among(list(live), [model])[model]


def statuses_among(live: Sequence[LiveWorker], models: Sequence[str]) -> dict[str, ModelStatus]:
    """Return how each of these models is served by these workers; one reading of Redis for all."""
    found = {model: _announced(live, model) for model in models}
    out = (ModelStatus.FAILED, ModelStatus.UNLOADED)
    idle = [model for model in models if found[model] in out]
    if idle:
        asked: Any = site_client().mget([_asked_key(model) for model in idle])
        found |= {
            model: ModelStatus.LOADING
            for model, worker in zip(idle, asked, strict=True)
            if worker is not None
        }
    return found


def _announced(live: Sequence[LiveWorker], model: str) -> ModelStatus:
    having = [worker for worker in live if worker.model(model) is not None]
    if any(worker.serves(model) for worker in having):
        return ModelStatus.LOADED
    states = {served.state for worker in having if (served := worker.model(model)) is not None}
    if ModelState.LOADING in states:
        return ModelStatus.LOADING
    return ModelStatus.FAILED if ModelState.FAILED in states else ModelStatus.UNLOADED


def load(worker: str | None, model: str) -> str:
    """Have a worker load a model beside those that it has; return the id of the worker.

    ``model`` is a name of the catalogue. Without ``worker`` it is the one with the most free
    memory that has it not yet; a load that was asked for already is not asked for again.
    Raise UnknownModel, UnknownWorker, or NotLoadable.
    """
    spec = _known(model)
    if worker is None and (asked := asked_worker(spec.id)) is not None:
        return asked
    chosen = _loader(spec.id, _found(worker))
    if site_client().set(_asked_key(spec.id), chosen.id, ex=_ASKED_S, nx=worker is None) is None:
        return asked_worker(spec.id) or chosen.id  # Somebody else was faster.
    send(chosen.id, Command("load", spec.id))
    return chosen.id


def unload(worker: str | None, model: str) -> list[str]:
    """Have a worker drop a model, without ``worker`` all of them; return the ids of the workers.

    It takes no new work for the model; what runs gets ``DRAIN_TIMEOUT_S`` to end.
    Raise UnknownModel, UnknownWorker, or NotLoaded.
    """
    spec = _known(model)
    having = [found.id for found in _found(worker) if found.model(spec.id) is not None]
    if not having:
        raise NotLoaded(f"No worker has the model '{spec.id}'.")
    answered(spec.id)
    site_client().set(_told_key(spec.id), 1, ex=_TOLD_S)
    for id_ in having:
        send(id_, Command("unload", spec.id))
    return having


def drain(worker: str) -> None:
    """Have a worker take no new work, until ``resume``; what runs ends by itself.

    So that its machine can be stopped without an answer being cut. Raise UnknownWorker.
    """
    for found in _with_child_workers(worker):
        send(found.id, Command("drain"))


def resume(worker: str) -> None:
    """Have a drained worker take work again. Raise UnknownWorker."""
    for found in _with_child_workers(worker):
        send(found.id, Command("resume"))


def asked_worker(model: str) -> str | None:
    """Return which worker was told to load this model and has not announced it yet."""
    asked = site_client().get(_asked_key(model))
    return asked.decode() if isinstance(asked, bytes) else None


def is_settling(model: str) -> bool:
    """Whether workers may not have obeyed yet what they were told of this model."""
    return bool(site_client().exists(_asked_key(model), _told_key(model)))


def answered(model: str) -> None:
    """Note that a worker announces what it was told to load."""
    site_client().delete(_asked_key(model))


def capabilities_of(spec: ModelSpec) -> frozenset[str]:
    """Return what requests to this model may ask for, by the worker that serves it.

    Without one, by what this host knows: it may lack the files that say so.
    """
    announced = (served.capabilities for served in live_view.having(spec.id))
    told = next((names for names in announced if names), None)
    return model_capabilities(spec) if told is None else frozenset(told)


def _known(model: str) -> ModelSpec:
    spec = catalogue().find(model)
    if spec is None:
        raise UnknownModel(f"There is no model '{model}'.")
    return spec


def _found(worker: str | None) -> list[LiveWorker]:
    live = live_workers()
    if worker is None:
        return live
    return [_only(live, worker)]


def _only(live: Iterable[LiveWorker], worker: str) -> LiveWorker:
    found = next((one for one in live if one.id == worker), None)
    if found is None:
        raise UnknownWorker(f"There is no live worker '{worker}'.")
    return found


def _with_child_workers(worker: str) -> list[LiveWorker]:
    live = live_workers()
    return [_only(live, worker), *(found for found in live if found.parent == worker)]


def _loader(model: str, candidates: Iterable[LiveWorker]) -> LiveWorker:
    able = [found for found in candidates if model in found.loadable and not found.is_draining]
    if not able:
        raise NotLoadable(f"No live worker can load the model '{model}'.")
    return max(able, key=lambda found: max((d.memory_free for d in found.devices), default=0))


def _asked_key(model: str) -> str:
    return f"load:{model}"


def _told_key(model: str) -> str:
    return f"unload:{model}"


__all__ = [
    "FleetError",
    "LiveWorker",
    "ModelState",
    "ModelStatus",
    "NotLoadable",
    "NotLoaded",
    "ModelReport",
    "UnknownModel",
    "UnknownWorker",
    "asked_worker",
    "capabilities_of",
    "drain",
    "is_settling",
    "load",
    "resume",
    "status_among",
    "status_of",
    "statuses_among",
    "unload",
    "workers",
]
