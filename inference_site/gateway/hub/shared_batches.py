"""Batches that were read from the event log for one reader, shared with the others of its stream.

A batch is kept while any reader holds it. So what the readers of one stream hold, of which none
reads, is held once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from weakref import WeakValueDictionary

from inference_site.gateway.hub.follower import Follower
from inference_site.streams.batches import Batch


class SharedBatches:
    """What is held of the streams that are read here. For the event loop's thread only."""

    def __init__(self) -> None:
        self._batches: WeakValueDictionary[tuple[str, int], Batch] = WeakValueDictionary()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def turn(self, generation_id: str) -> asyncio.Lock:
        """Return what lets one reader of a stream after the other read on in its log."""
        return self._turns.setdefault(generation_id, asyncio.Lock())

    def note(self, generation_id: str, batches: Iterable[Batch]) -> None:
        """Remember what was read."""
        for batch in batches:
            self._batches[generation_id, batch.first] = batch

    def give(self, follower: Follower) -> bool:
        """Offer a reader what others hold of what comes next for it; return whether there was any.

        There may be more in the log then.
        """
        began_at = follower.next_number
        while not (follower.is_full or follower.has_ended):
            batch = self._batches.get((follower.generation_id, follower.next_number))
            if batch is None or not (batch.frames or batch.ending):
                break
            follower.offer(batch)
        follower.is_behind = follower.next_number > began_at and not follower.has_ended
        return follower.next_number > began_at or follower.has_ended
