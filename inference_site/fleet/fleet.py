"""The fleet: all live workers of the site, and the actions load, unload, drain and resume.

An action is a command that is sent to a worker through Redis. Its result is the state that the
worker announces in its lease a moment later. The caller of these functions checks permissions: the
API requires the scope ``models:write``, because models belong to the whole site.

    FleetError
    ├── UnknownModel     the catalogue has no such model
    ├── UnknownWorker    no live worker has this id
    ├── NotLoadable      no live worker can load the model
    │   └── AlreadyLoading   a worker is loading it
    └── NotLoaded        the worker does not have the model
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, Literal

from django.conf import settings

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.domain.model_spec import ModelSpec
from inference_site.fleet import placement
from inference_site.fleet.commands import Command, send
from inference_site.fleet.leases import (
    LiveWorker,
    ModelReport,
    ModelState,
    live_view,
    live_workers,
)
from inference_site.storage.redis import site_client

_LOAD_REQUEST_S = 30
"""A requested load counts as pending for this time, unless a worker announces it earlier."""
_SEEN_S = 2
_UNLOADED = "unloaded-on-purpose"
_UNLOAD_REQUEST_S = 3
"""A requested unload counts as pending for this time, until leases show it."""


class FleetError(Exception):
    """The action is not possible."""


class UnknownModel(FleetError):
    """The catalogue has no such model."""


class UnknownWorker(FleetError):
    """No live worker has this id."""


class NotLoadable(FleetError):
    """No live worker can load this model."""


class AlreadyLoading(NotLoadable):
    """A worker is loading the model."""


class NotLoaded(FleetError):
    """The worker does not have this model."""


class ModelStatus(StrEnum):
    """The state of a model on the whole site: the best state in any worker."""

    LOADED = "loaded"  # At least one worker takes work for it.
    LOADING = "loading"  # At least one worker is loading it or about to, or a load was requested.
    FAILED = "failed"  # No worker has loaded it, and the last attempt failed.
    UNLOADED = "unloaded"  # No worker has it, or only workers that are draining it.


def workers() -> list[LiveWorker]:
    """Return the live workers as they are now. Raise redis' errors when Redis is down."""
    return live_workers()


def status_of(model: str) -> ModelStatus:
    """Return the status of a model of the catalogue, at most a second old."""
    return status_among(live_view.workers(), model)


def status_among(live: Iterable[LiveWorker], model: str) -> ModelStatus:
    """Return the status of this model in these workers."""
    return statuses_among(list(live), [model])[model]


def statuses_among(live: Sequence[LiveWorker], models: Sequence[str]) -> dict[str, ModelStatus]:
    """Return the status of each of these models in these workers, with one read of Redis."""
    found = {model: _announced(live, model) for model in models}
    not_served = (ModelStatus.FAILED, ModelStatus.UNLOADED)
    idle = [model for model in models if found[model] in not_served]
    if idle:
        requested: Any = site_client().mget([_load_key(model) for model in idle])
        found |= {
            model: ModelStatus.LOADING
            for model, worker in zip(idle, requested, strict=True)
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
    if ModelState.FAILED in states:
        return ModelStatus.FAILED
    is_offered = any(model in worker.offers and not worker.is_draining for worker in live)
    return ModelStatus.LOADING if is_offered else ModelStatus.UNLOADED


def load(worker: str | None, model: str) -> str:
    """Have a worker load an additional model; return the id of the worker.

    ``model`` is a name of the catalogue. Without ``worker``, choose the worker with the most free
    memory among those that can load the model; if a load is already pending, send no other, and if
    a worker has announced it, raise AlreadyLoading.
    Raise UnknownModel, UnknownWorker or NotLoadable.
    """
    spec = _known(model)
    if worker is None and (pending := loading_worker(spec.id)) is not None:
        return pending
    live = live_workers()
    if worker is None and _announced(live, spec.id) == ModelStatus.LOADING:
        raise AlreadyLoading(f"The model '{spec.id}' is being loaded.")
    if spec.replicas is not None and placement.replicas_of(spec, live) >= spec.replicas:
        raise NotLoadable(f"The model '{spec.id}' has all of its replicas ({spec.replicas}).")
    chosen = _loader(spec, live if worker is None else [_only(live, worker)])
    key = _load_key(spec.id)
    if site_client().set(key, chosen.id, ex=_LOAD_REQUEST_S, nx=worker is None) is None:
        return loading_worker(spec.id) or chosen.id  # Another request came first.
    send(chosen.id, Command("load", spec.id))
    return chosen.id


def unload(worker: str | None, model: str) -> list[str]:
    """Have a worker unload a model, without ``worker`` all workers; return their ids.

    A worker takes no new work for the model; running generations get ``DRAIN_TIMEOUT_S`` to end.
    Raise UnknownModel, UnknownWorker or NotLoaded.
    """
    spec = _known(model)
    having = [found.id for found in _found(worker) if found.model(spec.id) is not None]
    if not having:
        raise NotLoaded(f"No worker has the model '{spec.id}'.")
    clear_pending_load(spec.id)
    site_client().set(_unload_key(spec.id), 1, ex=_UNLOAD_REQUEST_S)
    if worker is None:
        site_client().sadd(_UNLOADED, spec.id)
    for id_ in having:
        send(id_, Command("unload", spec.id))
    return having


def reload(model: str) -> list[str]:
    """Have all workers that have a model load it anew; return their ids.

    Each takes no new work for it until it is loaded; running generations get ``DRAIN_TIMEOUT_S``.
    """
    told = sorted(found.id for found in live_workers() if found.model(model) is not None)
    for worker in told:
        send(worker, Command("reload", model))
    return told


def drain(worker: str) -> None:
    """Have a worker take no new work until ``resume``; running generations continue to their end.

    The host can then be stopped without cutting off an answer. Raise UnknownWorker.
    """
    send(_only(live_workers(), worker).id, Command("drain"))


def resume(worker: str) -> None:
    """Have a drained worker take work again. Raise UnknownWorker."""
    send(_only(live_workers(), worker).id, Command("resume"))


def loading_worker(model: str) -> str | None:
    """Return the worker with a pending load of this model: requested, but not yet announced."""
    worker = site_client().get(_load_key(model))
    return worker.decode() if isinstance(worker, bytes) else None


def has_pending_command(model: str) -> bool:
    """Return whether a load or unload of this model was requested and is not announced yet."""
    return bool(site_client().exists(_load_key(model), _unload_key(model)))


def clear_pending_load(model: str) -> None:
    """Note that a worker has announced the requested load."""
    site_client().delete(_load_key(model))
    site_client().srem(_UNLOADED, model)


def note_restart(models: Iterable[str]) -> None:
    """Note that a worker of these models stops, and that another takes its place.

    Until that one serves them, requests for them wait in the queue, at most for its timeout.
    """
    pipeline = site_client().pipeline(transaction=False)
    for model in models:
        pipeline.set(_restart_key(model), 1, ex=settings.QUEUE_TIMEOUT_S)
    pipeline.execute()


def note_restarted(models: Iterable[str]) -> None:
    """Note that a worker serves these models; web processes see its lease a second later."""
    pipeline = site_client().pipeline(transaction=False)
    for model in models:
        pipeline.expire(_restart_key(model), _SEEN_S)
    pipeline.execute()


def restarting(models: Sequence[str]) -> frozenset[str]:
    """Return those of these models whose worker stops or has stopped, to be replaced."""
    if not models:
        return frozenset()
    noted: Any = site_client().mget([_restart_key(model) for model in models])
    return frozenset(model for model, is_noted in zip(models, noted, strict=True) if is_noted)


def unloaded_on_purpose() -> frozenset[str]:
    """Return the models that all workers were told to unload, and none to load since."""
    names: Any = site_client().smembers(_UNLOADED)
    return frozenset(name.decode() for name in names)


def note_announced_load(model: str) -> None:
    """Note that a worker has announced the load; web processes see its lease a second later."""
    site_client().expire(_load_key(model), _SEEN_S)


def is_on_demand(spec: ModelSpec) -> bool:
    """Whether a request for the model has it loaded."""
    return settings.LOAD_ON_DEMAND or not spec.is_preloaded


def why_absent(spec: ModelSpec, live: Sequence[LiveWorker]) -> str:
    """Return why none of these workers serves a model: no host may, or what its load says."""
    if why := placement.why_no_host(spec, live):
        return why
    reports = (worker.model(spec.id) for worker in live)
    return next((served.reason for served in reports if served and served.reason), "")


def capabilities_of(spec: ModelSpec) -> frozenset[str]:
    """Return what requests to this model may ask for, as its workers announce it.

    Without a worker, use what this host knows, which may lack the model's files.
    """
    announced = (served.capabilities for served in live_view.having(spec.id))
    first = next((names for names in announced if names), None)
    return model_capabilities(spec) if first is None else frozenset(first)


def tools_of(model: str) -> Literal["native", "prompt"] | None:
    """Return how a model is shown the tools of requests; None where no worker tells."""
    return next((served.tools for served in live_view.having(model) if served.tools), None)


def context_of(spec: ModelSpec) -> int:
    """Return the tokens of this model's context, the shortest that its workers announce.

    Without a worker, it is what this host knows.
    """
    announced = (served.context_length for served in live_view.having(spec.id))
    return min(filter(None, announced), default=spec.context_length)


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


def _loader(spec: ModelSpec, candidates: Sequence[LiveWorker]) -> LiveWorker:
    able = [found for found in candidates if spec.id in found.loadable and not found.is_draining]
    if not able:
        why = placement.why_no_host(spec, candidates)
        raise NotLoadable(f"No live worker can load the model '{spec.id}'. {why}".strip())
    return max(able, key=_memory_free)


def _memory_free(worker: LiveWorker) -> int:
    """Return the most memory that a device of the worker has free."""
    return max((device.memory_free for device in worker.devices), default=0)


def _load_key(model: str) -> str:
    return f"load:{model}"


def _unload_key(model: str) -> str:
    return f"unload:{model}"


def _restart_key(model: str) -> str:
    return f"restart:{model}"


__all__ = [
    "AlreadyLoading",
    "FleetError",
    "LiveWorker",
    "ModelReport",
    "ModelState",
    "ModelStatus",
    "NotLoadable",
    "NotLoaded",
    "UnknownModel",
    "UnknownWorker",
    "capabilities_of",
    "clear_pending_load",
    "context_of",
    "drain",
    "has_pending_command",
    "is_on_demand",
    "load",
    "loading_worker",
    "note_restart",
    "note_restarted",
    "reload",
    "restarting",
    "resume",
    "status_among",
    "status_of",
    "statuses_among",
    "tools_of",
    "unload",
    "unloaded_on_purpose",
    "why_absent",
    "workers",
]
