"""Clients of the Redis servers that hold request documents, event logs, leases and wake-ups.

``EVENT_LOG_URLS`` may name several servers. The id of a generation selects the one server that
holds all its keys. Leases and other keys of the whole site are on the first server.
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


def client_options(timeout_s: float | None = None) -> dict[str, Any]:
    """Return options with which a client fails early; the default is ``REDIS_TIMEOUT_S``.

    The caller answers 503, or decides itself whether to retry.
    """
    limit_s = settings.REDIS_TIMEOUT_S if timeout_s is None else timeout_s
    return {
        "socket_timeout": limit_s,
        "socket_connect_timeout": limit_s,
        "retry": Retry(NoBackoff(), 0),
    }


def shard_of(generation_id: str) -> int:
    """Return the index of the event log server that holds this generation."""
    return zlib.crc32(generation_id.encode()) % len(settings.EVENT_LOG_URLS)


@cache
def _client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, **client_options())


def client_for(generation_id: str) -> redis.Redis:
    """Return this process's thread-safe client of the server that holds this generation."""
    return _client(settings.EVENT_LOG_URLS[shard_of(generation_id)])


def all_clients() -> list[redis.Redis]:
    """Return this process's thread-safe clients of all event log servers."""
    return [_client(url) for url in settings.EVENT_LOG_URLS]


def memory_of(client: redis.Redis) -> tuple[int, int]:
    """Return how many bytes a server uses and may use; 0 for no bound."""
    memory: Any = client.info("memory")
    return int(memory["used_memory"]), int(memory.get("maxmemory", 0))


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


# The module's text:
# """Writes that a Redis which is full must not refuse, because running generations depend on them.
#
# At ``maxmemory`` Redis refuses each command that may use memory, unless the same script has written
# before it: a script is not stopped half-way. New requests are refused while there is still room
# (``streams.room``), and the writes of this kind are small.
# """


FIRST_WRITE = 'redis.call("HDEL", "held", "")\n'
"""Opens a script whose writes are not refused. It changes nothing."""

SET_WHEN_FULL = FIRST_WRITE + 'redis.call("SET", KEYS[1], ARGV[1], "EX", ARGV[2])'
"""Script: set a key to a value for so many seconds."""


# The module's text:
# """Deadlines of ids, kept in Redis: a sorted set by the time at which each of them passes.
#
# The times are those of Redis; the hosts' clocks may differ. If its clock is set ahead, none passes
# for a moment: what is pushed on again and again has not been left.
# """


# KEYS: the sorted set. ARGV: an option of ZADD; then for each id the seconds from now on, and it.
_PUSH = (
    FIRST_WRITE
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
"""A clock that is set ahead by so much lets no time pass for so long: whoever pushes the deadlines
on does so meanwhile."""

Which = Literal["NX", "XX", "GT"]
"""Whose deadline is set: of ids that have none, of those that have one, or, as the later one, of
all."""


class Deadlines:
    """The deadlines under one key."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._offset: float | None = None
        self._settled_at = 0.0

    def push(self, id_: str, after_s: float, which: Which = "GT") -> None:
        """Let the time of one pass so many seconds from now on."""
        site_client().eval(_PUSH, 1, self.key, which, after_s, id_)

    async def push_known(self, client: redis.asyncio.Redis, after_s: Mapping[str, float]) -> None:
        """Set those of these that have a deadline, each to so many seconds from now on."""
        arguments = [part for id_, seconds in after_s.items() for part in (seconds, id_)]
        if arguments:
            await client.eval(_PUSH, 1, self.key, "XX", *arguments)

    def passed(self) -> list[str]:
        """Return the ids whose time has passed."""
        now, found = cast("Any", site_client().eval(_PASSED, 1, self.key))
        return [] if self._has_jumped(float(now)) else [id_.decode() for id_ in found]

    def _has_jumped(self, now: float) -> bool:
        """Whether the clock of Redis has just gone on by more than time has."""
        passed = time.monotonic()
        before, self._offset = self._offset, now - passed
        if before is not None and self._offset - before > _JUMP_S:
            self._settled_at = passed + _SETTLE_S
        return passed < self._settled_at

    def forget(self, ids: Collection[str]) -> None:
        """Drop the deadlines of these."""
        if ids:
            site_client().zrem(self.key, *ids)
