"""The event log: all frames of a stream, in a Redis Stream that outlives its readers.

One entry holds the frames of one tick. Its id is ``<number of its last frame + 1>-0``, so a reader
finds any frame by its number, and Redis refuses an append that is repeated after a lost reply. The
entry that ends a stream has the greatest possible id. It closes the log: a worker that was given up
as dead cannot append to it any more. Nor can one whose run was given to another: each attempt to
run a generation has a number, and when a later one has begun, appends of earlier ones are refused.

The log is the source of truth; messages over the channel layer are hints that arrive sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import redis
import redis.asyncio
import redis.exceptions
from django.conf import settings

from inference_site.storage.redis import SET_WHEN_FULL, client_for
from inference_site.streams.batches import (
    LAST_ID,
    Batch,
    Entries,
    Sent,
    batches_of,
    decoded,
    sent_so_far,
    span_of,
    texts_of,
)
from inference_site.streams.ending import Ending
from inference_site.streams.held import kept_ms
from inference_site.streams.log_scripts import (
    APPEND,
    BEGIN_ATTEMPT,
    CLOSE,
    FOLLOW,
    LOOK,
    READ,
    Appended,
    LogState,
    Write,
    append_arguments,
    attempt_key,
    cancel_key,
    document_key,
    followers_key,
    log_key,
    parse_appended,
)
from inference_site.streams.shared_text import TextsUnknown

MOST_READ = 64
"""Entries of a log that are read at once,"""
ENOUGH_BYTES = 256 * 1024
"""and bytes after which no more of them are."""
_UNKNOWN_FOLLOWED_S = 60


_NEVER = 2**62


class AsyncEventLog:
    """The event logs of one Redis server, for asyncio code.

    ``tells_followers``: an append also sends its frames to who follows the stream.
    """

    def __init__(self, client: redis.asyncio.Redis, *, tells_followers: bool = False) -> None:
        self._client, self.tells_followers = client, tells_followers
        self._append = client.register_script(APPEND)
        self._read = client.register_script(READ)

    async def append(self, writes: Sequence[Write]) -> list[Appended]:
        """Append each of these; return what became of them, in order."""
        count, arguments = append_arguments(writes, tells_followers=self.tells_followers)
        reply = await self._append(keys=arguments[:count], args=arguments[count:])
        return parse_appended(reply)

    async def read_many(self, wanted: Sequence[tuple[str, int]]) -> list[list[Batch]]:
        """Return the next batches from the frame number on, for each (generation id, frame number).

        Of a long log these are not all (see ``is_part``).
        """
        async with self._client.pipeline(transaction=False) as pipeline:
            for generation_id, number in wanted:
                arguments = (f"{number + 1}-0", MOST_READ, ENOUGH_BYTES)
                await self._read([log_key(generation_id)], arguments, client=pipeline)
            found = zip(wanted, await pipeline.execute(), strict=True)
        return [await self._batches(id_, _entries(reply)) for (id_, _), reply in found]

    async def _batches(self, generation_id: str, entries: Entries) -> list[Batch]:
        """Decode entries. If they refer to texts that are lost, no frame is the next for anyone."""
        try:
            return decoded(entries)
        except TextsUnknown:
            first = await self._client.xrange(log_key(generation_id), count=1)
        try:
            return decoded(entries, texts_of(first))
        except TextsUnknown:
            return [Batch(_NEVER, ())]

    async def follow(self, generation_id: str, channel: str) -> None:
        """Have the writer send this stream's frames to the channel as well."""
        await self._client.eval(*_follow(generation_id, channel))

    async def request_cancel(self, generation_ids: Sequence[str]) -> None:
        """Set the cancel flags; workers see them at their next append or poll."""
        async with self._client.pipeline(transaction=False) as pipeline:
            for generation_id in generation_ids:
                pipeline.eval(*_set_flag(generation_id))
            await pipeline.execute()


def is_part(batches: Sequence[Batch]) -> bool:
    """Whether there may be more in the log than these batches, which were read at once."""
    if not batches or batches[-1].ending:
        return False
    size = sum(len(frame) for batch in batches for frame in batch.frames)
    return len(batches) == MOST_READ or size > ENOUGH_BYTES // 2  # In the log it is more.


def _entries(reply: Sequence[tuple[bytes, Sequence[bytes]]]) -> Entries:
    """Return the entries that a script returns, whose fields are a list."""
    return [(id_, dict(zip(*[iter(fields)] * 2, strict=True))) for id_, fields in reply]


@dataclass(frozen=True, slots=True)
class Look:
    """What a log has for a reader: whether anything, and its end.

    ``first`` is the number of the first frame of what comes next, and ``next`` that of the frame
    after it; both are None when there is nothing yet.
    """

    is_empty: bool
    has_ended: bool
    first: int | None = None
    next: int | None = None


def look(generation_id: str, number: int) -> Look:
    """Look what there is of the log from this frame on, without reading it."""
    key = log_key(generation_id)
    found: Any = client_for(generation_id).eval(LOOK, 1, key, f"{number + 1}-0")
    span = span_of(found[2]) if len(found) > 2 else (None, None)
    return Look(not found, found[:1] == [LAST_ID], *span)


def follow(generation_id: str, channel: str) -> None:
    """Register a channel to which the writer sends this stream's frames, unless it has ended."""
    client_for(generation_id).eval(*_follow(generation_id, channel))


def _follow(generation_id: str, channel: str) -> tuple[Any, ...]:
    keys = [key(generation_id) for key in (log_key, followers_key, document_key)]
    return FOLLOW, 3, *keys, channel, settings.RUN_TTL_S, _UNKNOWN_FOLLOWED_S


def _set_flag(generation_id: str) -> tuple[Any, ...]:
    return SET_WHEN_FULL, 1, cancel_key(generation_id), 1, settings.RUN_TTL_S


def request_cancel(generation_id: str) -> None:
    """Set the cancel flag; the worker sees it at its next append or poll."""
    client_for(generation_id).eval(*_set_flag(generation_id))


def is_cancel_requested(generation_id: str) -> bool:
    """Whether somebody wants a generation stopped, and nobody has seen that yet."""
    return bool(client_for(generation_id).exists(cancel_key(generation_id)))


def drop_cancel_flag(generation_id: str) -> None:
    """Take back a request to stop a generation that has ended."""
    client_for(generation_id).delete(cancel_key(generation_id))


def add_attempt(pipeline: Any, generation_id: str, attempt: int) -> None:
    """Add to a pipeline what has the appends of earlier attempts refused from now on."""
    key = attempt_key(generation_id)
    pipeline.eval(BEGIN_ATTEMPT, 1, key, attempt, settings.RUN_TTL_S)


def read_log(generation_id: str) -> list[Batch]:
    """Return all batches of the log."""
    entries: Any = client_for(generation_id).xrange(log_key(generation_id))
    return batches_of(entries)


def take_log(generation_id: str, attempt: int) -> Sent:
    """Refuse what attempts before this one append, then return what they have sent."""
    pipeline = client_for(generation_id).pipeline(transaction=False)
    if attempt > 1:
        add_attempt(pipeline, generation_id, attempt)
    pipeline.xrange(log_key(generation_id))
    return sent_so_far(batches_of(pipeline.execute()[-1]))


def close_log(generation_id: str, ending: Ending, first: int | None = None) -> Appended | None:
    """End a stream in place of its worker; return the followers. An ended stream is not changed.

    If the ending depends on the frames sent before, ``first`` is the number of its first frame. If
    other frames were appended meanwhile, do nothing and return None.
    """
    client = client_for(generation_id)
    number = first or 0
    keys = [key(generation_id) for key in (log_key, cancel_key, followers_key, document_key)]
    opening: Any = client.xrange(log_key(generation_id), count=1)
    while True:
        entries: Any = client.xrevrange(log_key(generation_id), count=1)
        known = entries[0][0] if entries else b""
        # The id of an entry is the number of the frame after it.
        if known not in (b"", LAST_ID) and known != b"%d-0" % number:
            if first is not None:
                return None
            number = int(known.removesuffix(b"-0"))
        batch = Batch(number, ending.frames, replace(ending, begins_log=not entries))
        reply: Any = client.eval(CLOSE, 4, *keys, *kept_ms(), known, batch.pack(texts_of(opening)))
        if reply is not None:
            return Appended(LogState.OPEN, [channel.decode() for channel in reply])


MESSAGE_TYPE = "stream.frames"


def channel_message(streams: Sequence[tuple[str, bytes]]) -> dict[str, Any]:
    """Return the channel layer message with these pairs of generation id and payload."""
    return {"type": MESSAGE_TYPE, "streams": streams}
