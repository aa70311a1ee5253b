"""Followers: the readers of a stream, inside this process.

Batches that were read from the event log for one reader, shared with the others of its stream.

A batch is kept while any reader holds it. So what the readers of one stream hold, of which none
reads, is held once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from weakref import WeakValueDictionary

from inference_site.streams.batches import Batch, trim

_MOST_HELD = 256 * 1024
"""Bytes of frames that a reader may leave unread in memory, beside one batch."""
ENDING_ONLY = 2**62
"""Follows what comes after this frame, which no stream has: its ending."""


class Follower:
    """One reader's position in one stream.

    What its client does not read is held up to a bound; then it ``is_behind``, takes nothing more,
    and whoever takes what it holds has the hub read on in the log. With ``grace_s`` the generation
    goes on for so long when nobody reads it any more (see ``generations.disconnect_grace``).
    """

    __slots__ = (
        "_batches",
        "_ended",
        "_held",
        "_waiter",
        "checked_at",
        "generation_id",
        "grace_s",
        "is_behind",
        "next_number",
        "received_at",
        "waits_for_end",
    )

    def __init__(self, generation_id: str, after: int = -1, grace_s: int = 0) -> None:
        self.generation_id = generation_id
        self.grace_s = grace_s
        self.next_number = after + 1
        self.received_at = self.checked_at = time.monotonic()
        self._batches: list[Batch] = []
        self._held = 0
        self._ended = False
        self.is_behind = False
        self.waits_for_end = False
        """Whether frames before its next one are lost, but will be stored when the stream ends."""
        self._waiter: asyncio.Future[None] | None = None

    def offer(self, batch: Batch) -> bool:
        """Take a batch; False when frames before it are missing and nobody is to read them yet.

        What is known already is cut; after the ending nothing is taken any more.
        """
        if self._ended:
            return True
        if self.is_full:
            self.is_behind = True
        if batch.first > self.next_number or self.is_full:
            return self.is_behind
        self.received_at = time.monotonic()
        for rest in trim([batch], self.next_number):
            self._held += sum(map(len, rest.frames))
            self.next_number = rest.next
            self._ended = rest.ending is not None
            self._batches.append(rest)
            self.wake()
        return True

    @property
    def has_ended(self) -> bool:
        """Whether the ending has come."""
        return self._ended

    @property
    def is_full(self) -> bool:
        """Whether it holds as much as it may."""
        return self._held > _MOST_HELD

    def wake(self) -> None:
        """End the current ``wait``."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> list[Batch]:
        """Return what has come, in order, and forget it."""
        batches, self._batches, self._held = self._batches, [], 0
        return batches

    async def wait(self, timeout_s: float) -> None:
        """Return when something has come, when woken, or after the timeout."""
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
