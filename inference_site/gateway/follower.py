"""Followers: the readers of streams inside this process, and the batches that they share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from weakref import WeakValueDictionary

from inference_site.runs.streams.batches import Batch, StoredStream, trim

_MOST_HELD = 256 * 1024
"""Bytes of unread frames that a follower holds in memory, beside one more batch."""
ENDING_ONLY = 2**62
"""A frame number that no stream reaches: a follower from there on gets the ending only."""


class Follower:
    """One reader's position in one stream.

    It holds what its client has not read, up to a bound. Then ``is_behind`` is set and it takes
    nothing more; once its batches are taken, the hub reads on in the event log. ``grace_s`` is how
    long the generation goes on after its last reader left (see ``runs.cancellation``). It
    ``has_begun`` if it reads for the request that made the generation. ``is_stored``: the result
    was stored when it began to read, and may be deleted meanwhile. ``stored`` is the stream to
    rebuild from the database before anything is delivered.
    """

    __slots__ = (
        "_batches",
        "_held",
        "_waiter",
        "checked_at",
        "generation_id",
        "grace_s",
        "has_begun",
        "has_ended",
        "is_behind",
        "is_stored",
        "next_number",
        "received_at",
        "stored",
        "waits_for_end",
    )

    def __init__(self, generation_id: str, after: int = -1, grace_s: int = 0) -> None:
        self.generation_id = generation_id
        self.grace_s = grace_s
        self.next_number = after + 1
        self.received_at = self.checked_at = time.monotonic()
        self.stored: StoredStream | None = None
        self._batches: list[Batch] = []
        self._held = 0
        self.has_begun = self.has_ended = False
        self.is_behind = self.is_stored = False
        self.waits_for_end = False
        """Frames that it needs are lost, but will be stored when the stream ends."""
        self._waiter: asyncio.Future[None] | None = None

    def offer(self, batch: Batch) -> bool:
        """Take a batch without the frames that are known already; ignore it after the ending.

        Return False when frames before it are missing, so the log must be read now.
        """
        if self.has_ended:
            return True
        if self.is_full:
            self.is_behind = True
        if batch.first > self.next_number or self.is_full:
            return self.is_behind
        self.received_at = time.monotonic()
        for rest in trim([batch], self.next_number):
            self._held += sum(map(len, rest.frames))
            self.next_number = rest.next
            self.has_ended = rest.ending is not None
            self._batches.append(rest)
            self.wake()
        return True

    @property
    def is_full(self) -> bool:
        """Whether it takes nothing more before its batches are taken."""
        return self._held > _MOST_HELD

    def wake(self) -> None:
        """End the current ``wait``."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> list[Batch]:
        """Return the batches that have come, in order, and hold them no longer."""
        batches, self._batches, self._held = self._batches, [], 0
        return batches

    async def wait(self, timeout_s: float) -> None:
        """Return when a batch has come, when woken, or after the timeout."""
        if self._batches:
            return
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, self.wake)  # Half the cost of asyncio.wait_for.
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None


class SharedBatches:
    """Batches read from the event log for one reader, for the other readers of its stream.

    A batch is kept as long as any reader holds it, so slow readers of one stream hold its frames
    once. For the event loop's thread only.
    """

    def __init__(self) -> None:
        self._batches: WeakValueDictionary[tuple[str, int], Batch] = WeakValueDictionary()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def lock(self, generation_id: str) -> asyncio.Lock:
        """Return the lock under which the readers of a stream read on in its log."""
        return self._locks.setdefault(generation_id, asyncio.Lock())

    def add(self, generation_id: str, batches: Iterable[Batch]) -> None:
        """Share batches that were read."""
        for batch in batches:
            self._batches[generation_id, batch.first] = batch

    def offer_to(self, follower: Follower) -> bool:
        """Offer the next batches that other readers hold; return whether there were any.

        If there were, the log may have more: the follower ``is_behind``.
        """
        began_at = follower.next_number
        while not (follower.is_full or follower.has_ended):
            batch = self._batches.get((follower.generation_id, follower.next_number))
            if batch is None or not (batch.frames or batch.ending):
                break
            follower.offer(batch)
        follower.is_behind = follower.next_number > began_at and not follower.has_ended
        return follower.next_number > began_at or follower.has_ended
