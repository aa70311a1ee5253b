"""Disconnect grace: generations that wait for their client to come back, and until when.

A web process with a reader of such a generation pushes that time on. When none does it passes, and
maintenance stops the generation: whether the client left or its web process died.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import redis.asyncio

from inference_site.storage.redis import Deadlines

_graces = Deadlines("disconnect-grace")
_SLACK_S = 5
"""How much longer than the grace one waits that is read: a web process or Redis may be slow."""


def attend(generation_id: str, grace_s: int) -> None:
    """Have a generation stopped once nobody has read it for so long."""
    _graces.push(generation_id, grace_s + _SLACK_S)


async def tell_attended(
    client: redis.asyncio.Redis, read: Mapping[str, int], left: Mapping[str, int]
) -> None:
    """Push on those that are read, and let the time run for those that were left.

    Both are ids with their grace in seconds; another process may still read what was left here, and
    pushes it on again.
    """
    await _graces.push_known(client, left)
    pushed_on = {id_: grace_s + _SLACK_S for id_, grace_s in read.items()}
    await _graces.push_known(client, pushed_on)


def unattended() -> list[str]:
    """Return the generations whose time has passed, those among them that have ended too."""
    return _graces.passed()


def forget(generation_ids: Collection[str]) -> None:
    """Wait no longer for the clients of these."""
    _graces.forget(generation_ids)
