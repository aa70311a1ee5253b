"""Which workers have a model whose entry bounds them: ``hosts``, and a number of ``replicas``.

A worker loads a model with ``hosts`` only if it has one of these labels. A model with ``replicas``
has that number of places. A worker claims one in Redis, by a script, before it loads the model. A
claim ends with the lease of its worker, so the places of a dead or frozen worker are free a few
seconds later. Every worker finds out from the leases who is to claim a free place (``planned``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from inference_site.domain.model_spec import ModelSpec
from inference_site.fleet.leases import LiveWorker, ModelState, lease_key
from inference_site.storage.redis import ALLOW_WHEN_FULL, site_client

_KEPT_S = 86_400
"""Seconds after the last claim in which Redis deletes the claims of a model."""
_HAVE = (ModelState.LOADING, ModelState.READY)
# KEYS: the claims of a model, by the time at which they were made. ARGV: the worker, how many may
# hold one, what the keys of leases begin with, seconds. The worker's own lease is not asked for: it
# lives. Returns 1 if the worker holds a claim.
_CLAIM = (
    ALLOW_WHEN_FULL
    + """
for _, other in ipairs(redis.call("ZRANGE", KEYS[1], 0, -1)) do
    if other ~= ARGV[1] and redis.call("EXISTS", ARGV[3] .. other) == 0 then
        redis.call("ZREM", KEYS[1], other)
    end
end
local places = tonumber(ARGV[2])
if not redis.call("ZSCORE", KEYS[1], ARGV[1]) and redis.call("ZCARD", KEYS[1]) < places then
    local now = redis.call("TIME")
    redis.call("ZADD", KEYS[1], now[1] + now[2] / 1000000, ARGV[1])
end
redis.call("EXPIRE", KEYS[1], ARGV[4])
local rank = redis.call("ZRANK", KEYS[1], ARGV[1])
if rank and rank < places then return 1 end
if rank then redis.call("ZREM", KEYS[1], ARGV[1]) end
return 0
"""
)


def may_host(spec: ModelSpec, labels: Collection[str]) -> bool:
    """Whether a worker with these labels may load a model."""
    return not spec.hosts or not set(spec.hosts).isdisjoint(labels)


def why_no_host(spec: ModelSpec, live: Iterable[LiveWorker]) -> str:
    """Return that no live worker has a label that the model needs; empty if one has."""
    if not spec.hosts or any(may_host(spec, worker.labels) for worker in live):
        return ""
    one_of = "the label" if len(spec.hosts) == 1 else "one of the labels"
    return f"No worker has {one_of} {', '.join(spec.hosts)}."


def planned(specs: Iterable[ModelSpec], live: Sequence[LiveWorker]) -> dict[str, list[str]]:
    """Return which workers are to have which of these models, which have ``replicas``.

    Who has a model keeps it; then come those with room for it, before others those with the fewest
    models. Only workers that offer to load it count, and none that is draining.
    """
    loaded = Counter({worker.id: len(worker.models) for worker in live})
    plan = {}
    for spec in sorted(specs, key=lambda spec: spec.id):
        able = [w for w in live if spec.id in w.offers or _has(w, spec.id)]
        able = [w for w in able if not w.is_draining and may_host(spec, w.labels)]
        able.sort(
            key=lambda w: (
                not _has(w, spec.id),
                not w.offers.get(spec.id, True),
                loaded[w.id],
                w.id,
            )
        )
        chosen = able[: spec.replicas]
        loaded.update(w.id for w in chosen if not _has(w, spec.id))
        plan[spec.id] = [w.id for w in chosen]
    return plan


def replicas_of(spec: ModelSpec, live: Iterable[LiveWorker]) -> int:
    """Return how many workers have a model, or are loading it."""
    return sum(_has(worker, spec.id) for worker in live)


def claim(spec: ModelSpec, worker: str) -> bool:
    """Claim or keep a place for a worker that lives; return whether it has one.

    Raise redis' errors.
    """
    if spec.replicas is None:
        return True
    keys_and_values = (_key(spec.id), worker, spec.replicas, lease_key(""), _KEPT_S)
    return bool(site_client().eval(_CLAIM, 1, *keys_and_values))


def give_back(model: str, worker: str) -> None:
    """Give a place back, if the worker has one. Raise redis' errors."""
    site_client().zrem(_key(model), worker)


def _has(worker: LiveWorker, model: str) -> bool:
    served = worker.model(model)
    return served is not None and served.state in _HAVE


def _key(model: str) -> str:
    return f"replicas:{model}"
