"""Attendance: generations that wait for their client to come back, and until when.

Whoever reads such a generation pushes that time on. When nobody does it passes, and upkeep stops
the generation: it makes no difference whether the client left or its web process died.

The times are those of Redis; the hosts' clocks may differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import redis.asyncio

from worker.redis_clients import site_client

_KEY = "attended"
_SLACK_S = 5
"""How much longer than the grace one waits that is read: a web process or Redis may be slow."""

# KEYS: the sorted set. ARGV: an option of ZADD; then for each generation the seconds from now on,
# and its id.
_PUSH = """
local now = redis.call("TIME")
for i = 2, #ARGV, 2 do
  local time = tonumber(now[1]) + tonumber(now[2]) / 1e6 + tonumber(ARGV[i])
  redis.call("ZADD", KEYS[1], ARGV[1], time, ARGV[i + 1])
end
"""
_ADD, _ONLY_THERE = "GT", "XX"
_PASSED = """
local now = redis.call("TIME")
return redis.call("ZRANGEBYSCORE", KEYS[1], "-inf", tonumber(now[1]) + tonumber(now[2]) / 1e6)
"""


def attend(generation_id: str, grace_s: int) -> None:
    """Have a generation stopped once nobody has read it for so long."""
    site_client().eval(_PUSH, 1, _KEY, _ADD, grace_s + _SLACK_S, generation_id)


async def tell_attended(
    client: redis.asyncio.Redis, read: Mapping[str, int], left: Mapping[str, int]
) -> None:
    """Push on those that are read, and let the time run for those that were left.

    Both are ids with their grace in seconds; another process may still read what was left here, and
    pushes it on again.
    """
    for ids, slack_s in ((left, 0), (read, _SLACK_S)):
        arguments = [part for id_, grace_s in ids.items() for part in (grace_s + slack_s, id_)]
        if arguments:
            await client.eval(_PUSH, 1, _KEY, _ONLY_THERE, *arguments)


def unattended() -> list[str]:
    """Return the generations whose time has passed, those among them that have ended too."""
    found: Any = site_client().eval(_PASSED, 1, _KEY)
    return [generation_id.decode() for generation_id in found]


def forget(generation_ids: Collection[str]) -> None:
    """Wait no longer for the clients of these."""
    site_client().zrem(_KEY, *generation_ids)
