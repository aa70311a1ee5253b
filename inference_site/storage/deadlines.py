"""Deadlines of ids, kept in Redis: a sorted set by the time at which each of them passes.

The times are those of Redis; the hosts' clocks may differ. If its clock is set ahead, none passes
for a moment: what is pushed on again and again has not been left.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any, Literal, cast

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
