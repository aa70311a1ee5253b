"""The fleet: all live workers of the site, what they may load, and the actions on their models.

An action (load, unload, drain, resume) is an order to a worker (``fleet.orders``). Its result is
the state that the worker announces in its lease a moment later. The callers check permissions: the
API requires the scope ``models:write``, because models belong to the whole site.

    FleetError
    ├── UnknownModel     the catalogue has no such model
    ├── UnknownWorker    no live worker has this id
    ├── NotLoadable      no live worker can load the model
    │   └── AlreadyLoading   a worker is loading it, or has loaded it
    └── NotLoaded        the worker does not have the model

A worker loads a model with ``hosts`` only if it has one of these labels. A model with ``replicas``
is loaded by that number of workers. Before a worker loads it, the worker claims a replica with a
script in Redis. The claim ends with the lease of its worker, so another worker can claim the
replica of a dead or frozen worker a few seconds later. Every worker computes from the leases which
worker should claim a free replica (``planned``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import Any, Literal

from django.conf import settings

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.catalogue.fleet import orders
from inference_site.catalogue.fleet.leases import (
    LiveWorker,
    ModelReport,
    ModelState,
    lease_key,
    live_view,
    live_workers,
)
from inference_site.catalogue.model_store.models import OrderState
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.storage.redis import ALLOW_WHEN_FULL, Deadlines, site_client

_CLAIMS_TTL_S = 86_400
"""Redis deletes the claims of a model at this time after the last claim."""
_COUNTED_STATES = (ModelState.LOADING, ModelState.READY)
# KEYS: a sorted set of workers by the time of their claims. ARGV: the worker, the number of
# replicas, the prefix of lease keys, a time to live. Claims of workers without a lease are removed
# first. The caller is alive, whatever its lease says. Returns 1 if the worker holds a claim.
_CLAIM = (
    ALLOW_WHEN_FULL
    + """
for _, other in ipairs(redis.call("ZRANGE", KEYS[1], 0, -1)) do
    if other ~= ARGV[1] and redis.call("EXISTS", ARGV[3] .. other) == 0 then
        redis.call("ZREM", KEYS[1], other)
    end
end
local replicas = tonumber(ARGV[2])
if not redis.call("ZSCORE", KEYS[1], ARGV[1]) and redis.call("ZCARD", KEYS[1]) < replicas then
    local now = redis.call("TIME")
    redis.call("ZADD", KEYS[1], now[1] + now[2] / 1000000, ARGV[1])
end
redis.call("EXPIRE", KEYS[1], ARGV[4])
local rank = redis.call("ZRANK", KEYS[1], ARGV[1])
if rank and rank < replicas then return 1 end
if rank then redis.call("ZREM", KEYS[1], ARGV[1]) end
return 0
"""
)
_LEASE_VISIBLE_S = 2
"""After this time all web processes have read a new lease."""


def may_host(spec: ModelSpec, labels: Collection[str]) -> bool:
    """Whether a worker with these labels may load a model."""
    return not spec.hosts or not set(spec.hosts).isdisjoint(labels)


def why_no_host(spec: ModelSpec, live: Iterable[LiveWorker]) -> str:
    """Return an error if no live worker has a label that the model needs; else an empty text."""
    if not spec.hosts or any(may_host(spec, worker.labels) for worker in live):
        return ""
    one_of = "the label" if len(spec.hosts) == 1 else "one of the labels"
    return f"No worker has {one_of} {', '.join(spec.hosts)}."


def planned(specs: Iterable[ModelSpec], live: Sequence[LiveWorker]) -> dict[str, list[str]]:
    """Return the workers that should have each of these models with ``replicas``.

    Workers that have the model come first, then those with free memory for it, then those with the
    fewest models. Only workers that offer to load it and are not draining count.
    """
    loaded = Counter({worker.id: len(worker.models) for worker in live})
    plan = {}
    for spec in sorted(specs, key=lambda spec: spec.id):
        able = [w for w in live if spec.id in w.offers or _has_replica(w, spec.id)]
        able = [w for w in able if not w.is_draining and may_host(spec, w.labels)]
        able.sort(
            key=lambda w: (
                not _has_replica(w, spec.id),
                not w.offers.get(spec.id, True),
                loaded[w.id],
                w.id,
            )
        )
        chosen = able[: spec.replicas]
        loaded.update(w.id for w in chosen if not _has_replica(w, spec.id))
        plan[spec.id] = [w.id for w in chosen]
    return plan


def replicas_of(spec: ModelSpec, live: Iterable[LiveWorker]) -> int:
    """Return the number of workers that have a model or are loading it."""
    return sum(_has_replica(worker, spec.id) for worker in live)


def claim_replica(spec: ModelSpec, worker: str) -> bool:
    """Claim a replica for a live worker, or keep its claim; return whether it has one.

    Raise redis' errors.
    """
    if spec.replicas is None:
        return True
    keys_and_values = (_key(spec.id), worker, spec.replicas, lease_key(""), _CLAIMS_TTL_S)
    return bool(site_client().eval(_CLAIM, 1, *keys_and_values))


def give_back_replica(model: str, worker: str) -> None:
    """Release the worker's claim of a replica, if it has one. Raise redis' errors."""
    site_client().zrem(_key(model), worker)


def _has_replica(worker: LiveWorker, model: str) -> bool:
    served = worker.model(model)
    return served is not None and served.state in _COUNTED_STATES


def _key(model: str) -> str:
    return f"replicas:{model}"


load_deadlines = Deadlines("load-deadlines")
"""The generations that fail at these times if their models are still loading."""


class FleetError(Exception):
    """The action is not possible."""


class UnknownModel(FleetError):
    """The catalogue has no such model."""


class UnknownWorker(FleetError):
    """No live worker has this id."""


class NotLoadable(FleetError):
    """No live worker can load this model."""


class AlreadyLoading(NotLoadable):
    """A worker is loading the model, or has loaded it since its state was read."""


class NotLoaded(FleetError):
    """The worker does not have this model."""


class ModelStatus(StrEnum):
    """The state of a model on the whole site: its best state in any worker."""

    LOADED = "loaded"  # At least one worker takes work for it.
    LOADING = "loading"  # At least one worker is loading it or about to, or a load was requested.
    FAILED = "failed"  # No worker has loaded it, and the last attempt failed.
    UNLOADED = "unloaded"  # No worker has it, or workers are draining it.


def status_of(model: str) -> ModelStatus:
    """Return the status of a model of the catalogue, at most a second old."""
    return status_among(live_view.workers(), model)


def status_among(live: Sequence[LiveWorker], model: str) -> ModelStatus:
    """Return the status of a model in these workers."""
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
    """Order a worker to load an additional model; return the id of the worker.

    ``model`` is a name of the catalogue. Without ``worker``, choose the worker with the most free
    memory among those that can load the model. In that case give no second order while one is
    pending, and raise AlreadyLoading once a worker has announced the load.
    Raise UnknownModel, UnknownWorker or NotLoadable.
    """
    spec = _spec_of(model)
    if worker is None and (pending := orders.loading_worker(spec.id)) is not None:
        return pending
    live = live_workers()
    if worker is None and status_among(live, spec.id) == ModelStatus.LOADING:
        raise AlreadyLoading(f"The model '{spec.id}' is being loaded.")
    if spec.replicas is not None and replicas_of(spec, live) >= spec.replicas:
        raise NotLoadable(f"The model '{spec.id}' has all of its replicas ({spec.replicas}).")
    candidates = live if worker is None else [_worker_among(live, worker)]
    able = [one for one in candidates if spec.id in one.loadable and not one.is_draining]
    if not able:
        if any(one.serves(spec.id) for one in candidates):
            raise AlreadyLoading(f"The model '{spec.id}' is loaded already.")
        why = why_no_host(spec, candidates)
        raise NotLoadable(f"No live worker can load the model '{spec.id}'. {why}".strip())
    chosen = max(able, key=lambda one: max((d.memory_free for d in one.devices), default=0))
    if worker is not None:
        _give(OrderState.LOADED, [chosen.id], live, spec.id)
        return chosen.id
    loading = orders.give_load_once(chosen.id, spec.id)
    live_view.forget()
    return loading


def unload(worker: str | None, model: str) -> list[str]:
    """Order a worker to unload a model, without ``worker`` all workers; return their ids.

    A worker takes no new work for the model; its running generations have ``DRAIN_TIMEOUT_S`` to
    end. Raise UnknownModel, UnknownWorker or NotLoaded.
    """
    spec = _spec_of(model)
    live = live_workers()
    asked = live if worker is None else [_worker_among(live, worker)]
    having = [one.id for one in asked if one.model(spec.id) is not None]
    if not having:
        raise NotLoaded(f"No worker has the model '{spec.id}'.")
    orders.cancel_loads(spec.id)
    everywhere = [orders.ALL] if worker is None else []
    _give(OrderState.UNLOADED, [*having, *everywhere], live, spec.id)
    return having


def reload(model: str) -> list[str]:
    """Order all workers that have a model to reload it; return their ids.

    Each takes no new work for it until it is loaded; running generations have ``DRAIN_TIMEOUT_S``
    to end.
    """
    live = live_workers()
    having = sorted(worker.id for worker in live if worker.model(model) is not None)
    _give(OrderState.RELOADED, having, live, model)
    return having


def drain(worker: str) -> None:
    """Order a worker to take no new work until ``resume``; running generations go on.

    After that the host can be stopped without losing an answer. Raise UnknownWorker.
    """
    live = live_workers()
    _give(OrderState.DRAINED, [_worker_among(live, worker).id], live)


def resume(worker: str) -> None:
    """Order a drained worker to take work again. Raise UnknownWorker."""
    live = live_workers()
    _give(OrderState.ACTIVE, [_worker_among(live, worker).id], live)


def _give(
    state: OrderState, workers: Collection[str], live: Iterable[LiveWorker], model: str = ""
) -> None:
    orders.give(state, workers, model, live=[worker.id for worker in live])
    live_view.forget()  # The next read gets leases that show the result.


def unloaded_on_purpose(live: Iterable[LiveWorker]) -> frozenset[str]:
    """Return the models that were unloaded from all workers, as these workers announce them."""
    return frozenset(model for worker in live for model in worker.unloaded)


def note_restart(models: Iterable[str]) -> None:
    """Record that a worker of these models stops and that another one will replace it.

    Until then requests for the models wait in the queue, at most for ``QUEUE_TIMEOUT_S``.
    """
    pipeline = site_client().pipeline(transaction=False)
    for model in models:
        pipeline.set(_restart_key(model), 1, ex=settings.QUEUE_TIMEOUT_S)
    pipeline.execute()


def note_restarted(models: Iterable[str]) -> None:
    """Let the record of ``note_restart`` expire once web processes see the new worker's lease."""
    pipeline = site_client().pipeline(transaction=False)
    for model in models:
        pipeline.expire(_restart_key(model), _LEASE_VISIBLE_S)
    pipeline.execute()


def restarting(models: Sequence[str]) -> frozenset[str]:
    """Return the models among these whose worker is being replaced."""
    if not models:
        return frozenset()
    noted: Any = site_client().mget([_restart_key(model) for model in models])
    return frozenset(model for model, is_noted in zip(models, noted, strict=True) if is_noted)


def is_on_demand(spec: ModelSpec) -> bool:
    """Whether a request for the model makes a worker load it."""
    return settings.LOAD_ON_DEMAND or not spec.is_preloaded


def why_absent(spec: ModelSpec, live: Sequence[LiveWorker]) -> str:
    """Return why none of these workers serves a model: placement, or the error of a load."""
    if why := why_no_host(spec, live):
        return why
    reports = (worker.model(spec.id) for worker in live)
    return next((served.reason for served in reports if served and served.reason), "")


def capabilities_of(spec: ModelSpec) -> frozenset[str]:
    """Return the model's capabilities as its workers announce them.

    Without a worker, return the facts of this host, which may not have the model's files.
    """
    announced = (served.capabilities for served in live_view.having(spec.id))
    first = next((names for names in announced if names), None)
    return model_capabilities(spec) if first is None else frozenset(first)


def tools_of(model: str) -> Literal["native", "prompt"] | None:
    """Return how a model is given the tools of requests; None if no worker announces it."""
    return next((served.tools for served in live_view.having(model) if served.tools), None)


def context_of(spec: ModelSpec) -> int:
    """Return the context length of this model: the shortest that its workers announce.

    Without a worker, return the facts of this host.
    """
    return context_among(spec, live_view.having(spec.id))


def context_among(spec: ModelSpec, reports: Iterable[ModelReport]) -> int:
    """Return the shortest context that these reports of the model announce, else the spec's."""
    announced = (served.context_length for served in reports)
    return min(filter(None, announced), default=spec.context_length)


def _spec_of(model: str) -> ModelSpec:
    spec = catalogue().find(model)
    if spec is None:
        raise UnknownModel(f"There is no model '{model}'.")
    return spec


def _worker_among(live: Iterable[LiveWorker], worker: str) -> LiveWorker:
    found = next((one for one in live if one.id == worker), None)
    if found is None:
        raise UnknownWorker(f"There is no live worker '{worker}'.")
    return found


def _restart_key(model: str) -> str:
    return f"restart:{model}"
