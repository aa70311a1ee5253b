"""Placement of models whose entries restrict it by ``hosts`` or ``replicas``.

A worker loads a model with ``hosts`` only if it has one of these labels. A model with ``replicas``
is loaded by that number of workers. Before a worker loads it, the worker claims a replica with a
script in Redis. The claim ends with the lease of its worker, so another worker can claim the
replica of a dead or frozen worker a few seconds later. Every worker computes from the leases which
worker should claim a free replica (``planned``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from inference_site.catalogue.fleet.leases import LiveWorker, ModelState, lease_key
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.storage.redis import ALLOW_WHEN_FULL, site_client

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


def claim(spec: ModelSpec, worker: str) -> bool:
    """Claim a replica for a live worker, or keep its claim; return whether it has one.

    Raise redis' errors.
    """
    if spec.replicas is None:
        return True
    keys_and_values = (_key(spec.id), worker, spec.replicas, lease_key(""), _CLAIMS_TTL_S)
    return bool(site_client().eval(_CLAIM, 1, *keys_and_values))


def give_back(model: str, worker: str) -> None:
    """Release the worker's claim of a replica, if it has one. Raise redis' errors."""
    site_client().zrem(_key(model), worker)


def _has_replica(worker: LiveWorker, model: str) -> bool:
    served = worker.model(model)
    return served is not None and served.state in _COUNTED_STATES


def _key(model: str) -> str:
    return f"replicas:{model}"
