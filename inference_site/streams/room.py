"""Whether an event log server has room for new requests.

The last part of ``maxmemory`` is reserved for what runs: its logs, leases and cancel flags.
"""

from __future__ import annotations

import time

import redis
import redis.exceptions

from inference_site.domain.errors import RedisFull
from inference_site.storage.redis import client_for, memory_of, shard_of

_FOR_REQUESTS = 0.85
"""The part of ``maxmemory`` above which new requests are refused."""
_CACHED_S = 0.5

_rooms: dict[int, tuple[float, float]] = {}
"""For each server the time of the last look, and how many bytes were left for requests."""


def require_room(generation_id: str, size_bytes: int) -> None:
    """Return if the generation's server has room for so many bytes. Raise RedisFull."""
    shard, now = shard_of(generation_id), time.monotonic()
    looked_at, left = _rooms.get(shard, (0.0, 0.0))
    if now - looked_at > _CACHED_S:
        looked_at, left = now, _left(client_for(generation_id))
    _rooms[shard] = looked_at, left - size_bytes  # Until the next look.
    if left < size_bytes:
        raise RedisFull


def _left(client: redis.Redis) -> float:
    """Return how many bytes are left for requests; infinity where nothing says so."""
    try:
        used, limit = memory_of(client)
    except redis.exceptions.ResponseError:  # A server that does not allow the command.
        return float("inf")
    return limit * _FOR_REQUESTS - used if limit else float("inf")
