"""Deadlines of ids, kept in Redis: a sorted set by the time at which each of them passes.

The times are those of Redis; the hosts' clocks may differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import redis.asyncio

from inference_site.storage.full_redis import FIRST_WRITE
from inference_site.storage.redis_clients import site_client

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
local now = redis.call("TIME")
return redis.call("ZRANGEBYSCORE", KEYS[1], "-inf", tonumber(now[1]) + tonumber(now[2]) / 1e6)
"""

Which = Literal["NX", "XX", "GT"]
"""Whose deadline is set: of ids that have none, of those that have one, or, as the later one, of
all."""


class Deadlines:
    """The deadlines under one key."""

    def __init__(self, key: str) -> None:
        self.key = key

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
        found: Any = site_client().eval(_PASSED, 1, self.key)
        return [id_.decode() for id_ in found]

    def forget(self, ids: Collection[str]) -> None:
        """Drop the deadlines of these."""
        if ids:
            site_client().zrem(self.key, *ids)
