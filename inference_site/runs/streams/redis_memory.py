"""The memory of the event log servers: what each project holds, and what is left for requests.

A project holds its requests that have not ended, and the logs that are kept of those that have. On
each server, ``held`` has for each generation its project, its bytes and whether its stream can be
resumed; ``held-by-project`` has the sums. ``held-open`` has the generations that have not ended, by
the time when they were last seen alive; ``held-ended`` has the others, by the time when their log
expires. Only scripts write these keys, so they are consistent with each other.

The last part of ``maxmemory`` is reserved for what runs: logs, leases and cancel flags.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import redis
import redis.exceptions
from django.conf import settings

from inference_site.core.domain.errors import RedisFull
from inference_site.core.storage.capacity import memory_of
from inference_site.core.storage.redis import ALLOW_WHEN_FULL, client_for, shard_of

HELD_LUA = """
local function milliseconds()
  local time = redis.call("TIME")
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function held_of(id)
  return string.match(redis.call("HGET", "held", id) or "", "^(%d+) (%d+) (%d)$")
end
local function hold(id, project, bytes, resumable)
  local _, before = held_of(id)
  redis.call("HSET", "held", id, project .. " " .. bytes .. " " .. resumable)
  redis.call("HINCRBY", "held-by-project", project, bytes - (before or 0))
end
local function release(id)
  local project, bytes = held_of(id)
  if project and redis.call("HINCRBY", "held-by-project", project, -bytes) <= 0 then
    redis.call("HDEL", "held-by-project", project)
  end
  redis.call("HDEL", "held", id)
  redis.call("ZREM", "held-open", id)
  redis.call("ZREM", "held-ended", id)
end
local function release_expired(most)
  local ids = redis.call("ZRANGEBYSCORE", "held-ended", "-inf", milliseconds(), "LIMIT", 0, most)
  for _, id in ipairs(ids) do release(id) end
end
-- Let a log that has ended expire: later if it can be resumed and is not of a refusal.
local function keep_ended(log, is_refusal, linger_ms, resumable_ms)
  local id = string.match(log, "^{(.+)}:log$")
  local project, _, resumable = held_of(id)
  local kept_ms = tonumber(linger_ms)
  if resumable == "1" and not is_refusal then kept_ms = tonumber(resumable_ms) end
  redis.call("PEXPIRE", log, kept_ms)
  if project then
    hold(id, project, redis.call("MEMORY", "USAGE", log, "SAMPLES", 0), resumable)
    redis.call("ZREM", "held-open", id)
    redis.call("ZADD", "held-ended", milliseconds() + kept_ms, id)
  end
end
"""
"""Functions for the scripts that begin and end a stream."""

_RELEASE_EXPIRED = (
    ALLOW_WHEN_FULL + HELD_LUA + 'release_expired(ARGV[1]) return redis.call("HLEN", "held")'
)
_OPEN_SINCE = (
    HELD_LUA
    + """
local before = milliseconds() - ARGV[1]
return redis.call("ZRANGEBYSCORE", "held-open", "-inf", before, "LIMIT", 0, ARGV[2])
"""
)
_MARK_ALIVE = (
    ALLOW_WHEN_FULL
    + HELD_LUA
    + """
for _, id in ipairs(ARGV) do redis.call("ZADD", "held-open", "XX", milliseconds(), id) end
"""
)
_MOST = 1000
"""Generations that one script handles."""
FOR_REQUESTS = 0.85
"""The part of ``maxmemory`` above which new requests are refused."""
_CACHED_S = 0.5

_free: dict[int, tuple[float, float]] = {}
"""For each server, when its memory was read, and the bytes that were left for requests."""


def kept_ms() -> tuple[int, int]:
    """Return how long an ended log is kept, in milliseconds: usually, and if it can be resumed."""
    return settings.EVENT_LOG_LINGER_S * 1000, settings.EVENT_LOG_TTL_S * 1000


def release_expired(client: Any) -> None:
    """Stop counting the logs that have expired on this server."""
    client.eval(_RELEASE_EXPIRED, 0, _MOST)


def open_since(client: Any, age_s: float) -> list[str]:
    """Return generations of this server that have not ended and were last seen before then."""
    return [id_.decode() for id_ in client.eval(_OPEN_SINCE, 0, int(age_s * 1000), _MOST)]


def mark_alive(client: Any, generation_ids: Sequence[str]) -> None:
    """Note that these generations were seen alive now."""
    if generation_ids:
        client.eval(_MARK_ALIVE, 0, *generation_ids)


def require_room(generation_id: str, size_bytes: int) -> None:
    """Raise RedisFull if the generation's server has no memory left for a request of this size."""
    shard, now = shard_of(generation_id), time.monotonic()
    read_at, left = _free.get(shard, (0.0, 0.0))
    if now - read_at > _CACHED_S:
        read_at, left = now, float("inf")
        with suppress(redis.exceptions.ResponseError):  # A server that does not allow the command.
            memory = memory_of(client_for(generation_id))
            if memory.limit_bytes:
                left = memory.limit_bytes * FOR_REQUESTS - memory.used_bytes
    _free[shard] = read_at, left - size_bytes  # An estimate until the memory is read again.
    if left < size_bytes:
        raise RedisFull
