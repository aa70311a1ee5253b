"""Redis: clients of its servers, writes that a full server accepts, and sets of deadlines.

``EVENT_LOG_URLS`` may name several servers. The id of a generation selects the server that holds
all its keys. Leases and other keys of the whole site are on the first server.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Literal, cast

import redis
import redis.asyncio
from django.conf import settings
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

REDIS_UNAVAILABLE = (redis.ConnectionError, redis.TimeoutError)
"""What redis-py raises when the server does not answer."""


def client_options(timeout_s: float | None = None) -> dict[str, Any]:
    """Return options of a client that fails early, by default after ``REDIS_TIMEOUT_S``.

    It does not retry: the caller answers 503, or retries itself.
    """
    limit_s = settings.REDIS_TIMEOUT_S if timeout_s is None else timeout_s
    return {
        "socket_timeout": limit_s,
        "socket_connect_timeout": limit_s,
        "retry": Retry(NoBackoff(), 0),
    }


@cache
def _client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, **client_options())


def shard_of(generation_id: str) -> int:
    """Return the index of the event log server that holds this generation."""
    return zlib.crc32(generation_id.encode()) % len(settings.EVENT_LOG_URLS)


def client_for(generation_id: str) -> redis.Redis:
    """Return this process's thread-safe client of the server that holds this generation."""
    return _client(settings.EVENT_LOG_URLS[shard_of(generation_id)])


def all_clients() -> list[redis.Redis]:
    """Return this process's thread-safe clients of all event log servers."""
    return [_client(url) for url in settings.EVENT_LOG_URLS]


def site_client() -> redis.Redis:
    """Return this process's thread-safe client for keys of the whole site."""
    return _client(settings.EVENT_LOG_URLS[0])


def broker_client() -> redis.Redis:
    """Return this process's thread-safe client of the server that holds the wake-ups."""
    return _client(settings.BROKER_URL)


def new_async_clients() -> list[redis.asyncio.Redis]:
    """Return one asyncio client for each event log server, for the running event loop."""
    options = {**client_options(), "retry": AsyncRetry(NoBackoff(), 0)}
    return [redis.asyncio.Redis.from_url(url, **options) for url in settings.EVENT_LOG_URLS]


ALLOW_WHEN_FULL = 'redis.call("HDEL", "held", "")\n'
"""First line of a script whose writes Redis accepts although it is full. It changes nothing.

At ``maxmemory`` Redis refuses each command that may use memory, unless the same script has written
before: Redis does not stop a script half-way. Running generations depend on such writes; they are
small, and new requests are refused while there is still room (``runs.streams.redis_memory``)."""

SET_WHEN_FULL = ALLOW_WHEN_FULL + 'redis.call("SET", KEYS[1], ARGV[1], "EX", ARGV[2])'
"""Script: set a key to a value for a number of seconds."""


def require_writes(client: redis.Redis) -> None:
    """Raise redis' error if a server takes no writes; one at ``maxmemory`` does."""
    client.eval(ALLOW_WHEN_FULL, 0)


def takes_writes(client: redis.Redis) -> bool:
    """Whether a server that answers also takes writes: not a replica, or one whose disk is full.

    Raise redis' error if it does not answer.
    """
    try:
        require_writes(client)
    except redis.exceptions.ResponseError:
        return False
    return True


# KEYS: the sorted set. ARGV: an option of ZADD; then for each id the seconds from now on, and it.
_PUSH = (
    ALLOW_WHEN_FULL
    + """
local now = redis.call("TIME")
for i = 2, #ARGV, 2 do
  local time = tonumber(now[1]) + tonumber(now[2]) / 1e6 + tonumber(ARGV[i])
  redis.call("ZADD", KEYS[1], ARGV[1], time, ARGV[i + 1])
end
"""
)
_PASSED = """
local time = redis.call("TIME")
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
return {tostring(now), redis.call("ZRANGEBYSCORE", KEYS[1], "-inf", now)}
"""
_JUMP_S, _SETTLE_S = 1.0, 3.0
"""After the clock of Redis jumps ahead by more than the first, no deadline passes for the second:
processes that extend deadlines do so within that time."""

Condition = Literal["NX", "XX", "GT"]
"""When ``push`` sets a deadline: if the id has none; if it has one; if the new one is later."""


class Deadlines:
    """Deadlines of ids under one key: a sorted set by the time at which each passes.

    The times are those of Redis, because the clocks of hosts may differ.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._offset: float | None = None
        self._settled_at = 0.0

    def push(self, id_: str, after_s: float, condition: Condition = "GT") -> None:
        """Set the deadline of an id, in seconds from now."""
        site_client().eval(_PUSH, 1, self.key, condition, after_s, id_)

    async def push_many(
        self, client: redis.asyncio.Redis, after_s: Mapping[str, float], condition: Condition
    ) -> None:
        """Set the deadlines of ids, each in seconds from now."""
        arguments = [part for id_, seconds in after_s.items() for part in (seconds, id_)]
        if arguments:
            await client.eval(_PUSH, 1, self.key, condition, *arguments)

    def passed(self) -> list[str]:
        """Return the ids whose deadline has passed; none just after the clock has jumped ahead."""
        found: Any = site_client().eval(_PASSED, 1, self.key)
        now_s, ids = float(found[0]), cast("list[bytes]", found[1])
        elapsed_s = time.monotonic()
        offset_before, self._offset = self._offset, now_s - elapsed_s
        if offset_before is not None and self._offset - offset_before > _JUMP_S:
            self._settled_at = elapsed_s + _SETTLE_S
        return [] if elapsed_s < self._settled_at else [id_.decode() for id_ in ids]

    def ids(self) -> list[str]:
        """Return all ids that have a deadline."""
        ids: Any = site_client().zrange(self.key, 0, -1)
        return [id_.decode() for id_ in ids]

    def forget(self, ids: Collection[str]) -> None:
        """Remove the deadlines of these ids."""
        if ids:
            site_client().zrem(self.key, *ids)
