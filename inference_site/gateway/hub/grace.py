"""The disconnect grace, as the process of the readers sees it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import redis.asyncio
import redis.exceptions

from inference_site.gateway.hub.follower import Follower
from inference_site.generations.cancellation import refresh_reader_deadlines

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.5


async def keep_from_cancelling(
    readers: Callable[[], Iterable[Follower]], client: redis.asyncio.Redis
) -> None:
    """Store again and again which generations with a grace are read, and which no longer are."""
    known: dict[str, int] = {}
    while True:
        await asyncio.sleep(_INTERVAL_S)
        read = {f.generation_id: f.grace_s for f in readers() if f.grace_s}
        left = {id_: grace_s for id_, grace_s in known.items() if id_ not in read}
        known |= read
        if not known:
            continue
        try:
            await refresh_reader_deadlines(client, read, left)
        except redis.exceptions.RedisError as exc:
            logger.warning("hub: cannot store who is read: %s", exc)
        else:
            known = read
