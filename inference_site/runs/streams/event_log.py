"""The event log: all frames of a stream, in a Redis Stream that outlives its readers.

One entry holds the frames of one tick. Its id is ``<number of its last frame + 1>-0``, so a reader
finds any frame by its number, and Redis refuses an append that is repeated after a lost reply. The
entry that ends a stream has the greatest possible id: it closes the log, so a worker that was given
up as dead cannot append to it any more. Each attempt to run a generation has a number; once a later
attempt has begun, appends of earlier ones are refused.

The log is the source of truth. Messages over the channel layer are hints that arrive sooner: an
append returns the channels of the stream's followers, and its writer sends each of them a hint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import redis
import redis.asyncio
import redis.exceptions
from channels.layers import get_channel_layer
from django.conf import settings

from inference_site.core.storage.redis import ALLOW_WHEN_FULL, SET_WHEN_FULL, client_for
from inference_site.runs.streams.batches import (
    LAST_ID,
    Batch,
    Ending,
    Entries,
    Sent,
    SharedTextsMissing,
    decode_entries,
    decode_log,
    frame_span,
    sent_so_far,
    texts_of,
)
from inference_site.runs.streams.redis_memory import HELD_LUA, kept_ms

MOST_READ = 64
"""Entries of a log that are read at once, unless they have ``ENOUGH_BYTES`` before."""
ENOUGH_BYTES = 256 * 1024
_UNKNOWN_FOLLOWED_S = 60
_NEVER = 2**62
"""A frame number that no stream reaches."""


class LogState(IntEnum):
    """The state of a log, as an append returns it to the writer."""

    OPEN = 0
    CLOSED = 1  # The stream was ended, or given to another attempt; stop writing.
    CANCELLED = 2  # The cancel flag is set; stop the generation.
    LOST = 3  # Redis has lost the log; nothing was appended. Send all of it again.


# KEYS: log, cancel flag, followers, request document, latest attempt of each stream.
# ARGV: time to live of an unfinished log, of a finished one, and of one that can be resumed (ms);
# then, for each stream, the id of the entry ("" to append nothing, the greatest id to end the
# stream), its payload, its attempt, "1" if it ends the stream with a refusal, and "1" if the log is
# known to have frames.
APPEND = (
    ALLOW_WHEN_FULL
    + HELD_LUA
    + """
local replies = {}
for i = 1, #KEYS / 5 do
  local log, cancel, follow, document = KEYS[5*i-4], KEYS[5*i-3], KEYS[5*i-2], KEYS[5*i-1]
  local id, payload, latest = ARGV[5*i-1], ARGV[5*i], redis.call("GET", KEYS[5*i])
  local is_refusal, goes_on = ARGV[5*i+2] == "1", ARGV[5*i+3] == "1"
  local state, last = 0, id == "18446744073709551615-0"
  local followers = redis.call("SMEMBERS", follow)
  if redis.call("EXISTS", cancel) == 1 then state = 2 end
  if latest and tonumber(latest) > tonumber(ARGV[5*i+1]) then
    state = 1
  elseif goes_on and redis.call("EXISTS", log) == 0 then
    state = 3
  elseif id ~= "" then
    local added = redis.pcall("XADD", log, id, "b", payload)
    if type(added) == "table" and added.err then
      if not string.find(added.err, "equal or smaller", 1, true) then return added end
      local tail = redis.call("XREVRANGE", log, "+", "-", "COUNT", 1)
      if tail[1] and tail[1][1] == "18446744073709551615-0" and not last then state = 1 end
    elseif last then
      keep_ended(log, is_refusal, ARGV[2], ARGV[3])
      redis.call("DEL", cancel, follow, document)
    elseif redis.call("XLEN", log) == 1 then
      redis.call("PEXPIRE", log, ARGV[1])
    end
  end
  replies[i] = {state, followers}
end
return replies
"""
)


# KEYS: latest attempt of one stream. ARGV: the attempt that begins, time to live (s).
BEGIN_ATTEMPT = (
    ALLOW_WHEN_FULL
    + """
if tonumber(redis.call("GET", KEYS[1]) or 0) < tonumber(ARGV[1]) then
  redis.call("SET", KEYS[1], ARGV[1], "EX", ARGV[2])
end
"""
)


# KEYS: log, cancel flag, followers, request document of one stream.
# ARGV: time to live of a finished log, and of one that can be resumed (ms); the last id the caller
# knows; payload of the ending.
CLOSE = (
    ALLOW_WHEN_FULL
    + HELD_LUA
    + """
local last = "18446744073709551615-0"
local tail = redis.call("XREVRANGE", KEYS[1], "+", "-", "COUNT", 1)
local id = tail[1] and tail[1][1] or ""
if id ~= ARGV[3] then return nil end
local followers = redis.call("SMEMBERS", KEYS[3])
if id ~= last then
  redis.call("XADD", KEYS[1], last, "b", ARGV[4])
  keep_ended(KEYS[1], false, ARGV[1], ARGV[2])
  redis.call("DEL", KEYS[2], KEYS[3], KEYS[4])
end
return followers
"""
)


# KEYS: log, followers, request document of one stream. ARGV: channel; time to live of the followers
# (s), and the shorter one if there is neither log nor document, so the stream may never end.
FOLLOW = (
    ALLOW_WHEN_FULL
    + """
local tail = redis.call("XREVRANGE", KEYS[1], "+", "-", "COUNT", 1)
if tail[1] and tail[1][1] == "18446744073709551615-0" then return end
local is_known = tail[1] or redis.call("EXISTS", KEYS[3]) == 1
redis.call("SADD", KEYS[2], ARGV[1])
redis.call("EXPIRE", KEYS[2], is_known and ARGV[2] or ARGV[3])
"""
)


# KEYS: log. ARGV: first id that a reader needs.
# Returns the id of the last entry, then the id and the first bytes of the payload of the entry that
# the reader gets next.
POSITION = """
local tail = redis.call("XREVRANGE", KEYS[1], "+", "-", "COUNT", 1)[1]
if not tail then return {} end
local first = redis.call("XRANGE", KEYS[1], ARGV[1], "+", "COUNT", 1)[1]
if not first then return {tail[1]} end
return {tail[1], first[1], string.sub(first[2][2], 1, 32)}
"""


# KEYS: log. ARGV: first id to read; most entries; bytes after which no more entries are read.
READ = """
local found, size, from = {}, 0, ARGV[1]
while #found < tonumber(ARGV[2]) and size < tonumber(ARGV[3]) do
  local entry = redis.call("XRANGE", KEYS[1], from, "+", "COUNT", 1)[1]
  if not entry then break end
  found[#found + 1], size, from = entry, size + #entry[2][2], "(" .. entry[1]
end
return found
"""


class Write(NamedTuple):
    """An append to one log by one attempt; an empty ``entry_id`` only reads the state.

    With ``is_refusal`` the log is not kept for later readers. With ``goes_on`` the log has frames
    already: if it is empty, Redis has lost it.
    """

    generation_id: str
    entry_id: bytes
    payload: bytes
    attempt: int = 1
    is_refusal: bool = False
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Appended:
    """The result of an append: the log's state, and the followers' channels to send hints to."""

    state: LogState
    followers: list[str]


def log_key(generation_id: str) -> str:
    return f"{{{generation_id}}}:log"


def cancel_key(generation_id: str) -> str:
    return f"{{{generation_id}}}:cancel"


def followers_key(generation_id: str) -> str:
    return f"{{{generation_id}}}:followers"


def document_key(generation_id: str) -> str:
    return f"{{{generation_id}}}:document"


def attempt_key(generation_id: str) -> str:
    return f"{{{generation_id}}}:attempt"


class AsyncEventLog:
    """The event logs of one Redis server, for asyncio code."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._append = client.register_script(APPEND)
        self._read = client.register_script(READ)

    async def append(self, writes: Sequence[Write]) -> list[Appended]:
        """Append each of these; return the results in order."""
        keys: list[Any] = []
        arguments: list[Any] = [settings.RUN_TTL_S * 1000, *kept_ms()]
        for generation_id, entry_id, payload, attempt, is_refusal, goes_on in writes:
            keys += (
                log_key(generation_id),
                cancel_key(generation_id),
                followers_key(generation_id),
                document_key(generation_id),
                attempt_key(generation_id),
            )
            arguments += (entry_id, payload, attempt, int(is_refusal), int(goes_on))
        reply: Any = await self._append(keys=keys, args=arguments)
        return [
            Appended(LogState(state), [channel.decode() for channel in followers])
            for state, followers in reply
        ]

    async def read_many(self, wanted: Sequence[tuple[str, int]]) -> list[list[Batch]]:
        """Return the next batches for each (generation id, first frame number).

        A long log may have more of them (see ``may_have_more``).
        """
        async with self._client.pipeline(transaction=False) as pipeline:
            for generation_id, number in wanted:
                arguments = (f"{number + 1}-0", MOST_READ, ENOUGH_BYTES)
                await self._read([log_key(generation_id)], arguments, client=pipeline)
            found = zip(wanted, await pipeline.execute(), strict=True)
        return [await self._decode(id_, reply) for (id_, _), reply in found]

    async def _decode(self, generation_id: str, reply: Any) -> list[Batch]:
        """Decode entries, whose fields a script returns as lists.

        If they refer to shared texts that are lost, return a batch that is no reader's next.
        """
        entries: Entries = [
            (id_, dict(zip(*[iter(fields)] * 2, strict=True))) for id_, fields in reply
        ]
        try:
            return decode_entries(entries)
        except SharedTextsMissing:
            first = await self._client.xrange(log_key(generation_id), count=1)
        try:
            return decode_entries(entries, texts_of(first))
        except SharedTextsMissing:
            return [Batch(_NEVER, ())]

    async def follow(self, generation_id: str, channel: str) -> None:
        """Have the frames of this stream sent to the channel as well."""
        await self._client.eval(*_follow(generation_id, channel))

    async def request_cancel(self, generation_ids: Sequence[str]) -> None:
        """Set the cancel flags; workers see them at their next append or poll."""
        async with self._client.pipeline(transaction=False) as pipeline:
            for generation_id in generation_ids:
                pipeline.eval(*_set_cancel_flag(generation_id))
            await pipeline.execute()


def may_have_more(batches: Sequence[Batch]) -> bool:
    """Whether the log may have more than these batches, which were read at once."""
    if not batches or batches[-1].ending:
        return False
    size = sum(len(frame) for batch in batches for frame in batch.frames)
    return len(batches) == MOST_READ or size > ENOUGH_BYTES // 2  # Entries are larger than frames.


@dataclass(frozen=True, slots=True)
class LogPosition:
    """The entries that a log has for a reader.

    ``first`` is the number of the first frame of the entry that the reader gets next, and ``next``
    that of the frame after the entry; both are None when there is no such entry yet.
    """

    is_empty: bool
    has_ended: bool
    first: int | None = None
    next: int | None = None


def log_position(generation_id: str, number: int) -> LogPosition:
    """Return the position of a reader of this frame in the log, without reading entries."""
    key = log_key(generation_id)
    found: Any = client_for(generation_id).eval(POSITION, 1, key, f"{number + 1}-0")
    span = frame_span(found[2]) if len(found) > 2 else (None, None)
    return LogPosition(not found, found[:1] == [LAST_ID], *span)


def follow(generation_id: str, channel: str) -> None:
    """Have the frames of this stream sent to the channel as well, unless it has ended."""
    client_for(generation_id).eval(*_follow(generation_id, channel))


def _follow(generation_id: str, channel: str) -> tuple[Any, ...]:
    keys = [key(generation_id) for key in (log_key, followers_key, document_key)]
    return FOLLOW, 3, *keys, channel, settings.RUN_TTL_S, _UNKNOWN_FOLLOWED_S


def request_cancel(generation_id: str) -> None:
    """Set the cancel flag; the worker sees it at its next append or poll."""
    client_for(generation_id).eval(*_set_cancel_flag(generation_id))


def _set_cancel_flag(generation_id: str) -> tuple[Any, ...]:
    return SET_WHEN_FULL, 1, cancel_key(generation_id), 1, settings.RUN_TTL_S


def is_cancel_requested(generation_id: str) -> bool:
    """Whether the cancel flag is set, and no worker has acted on it yet."""
    return bool(client_for(generation_id).exists(cancel_key(generation_id)))


def drop_cancel_flag(generation_id: str) -> None:
    """Delete the cancel flag of a generation that has ended."""
    client_for(generation_id).delete(cancel_key(generation_id))


def add_attempt(pipeline: Any, generation_id: str, attempt: int) -> None:
    """Add a command to a pipeline: from then on, appends of earlier attempts are refused."""
    key = attempt_key(generation_id)
    pipeline.eval(BEGIN_ATTEMPT, 1, key, attempt, settings.RUN_TTL_S)


def read_log(generation_id: str) -> list[Batch]:
    """Return all batches of the log."""
    entries: Any = client_for(generation_id).xrange(log_key(generation_id))
    return decode_log(entries)


def take_log(generation_id: str, attempt: int) -> Sent:
    """Begin an attempt: refuse appends of earlier ones, and return what these have sent."""
    pipeline = client_for(generation_id).pipeline(transaction=False)
    if attempt > 1:
        add_attempt(pipeline, generation_id, attempt)
    pipeline.xrange(log_key(generation_id))
    return sent_so_far(decode_log(pipeline.execute()[-1]))


def close_log(generation_id: str, ending: Ending, first: int | None = None) -> list[str] | None:
    """End a stream in place of its worker; return the channels of its followers.

    An ended stream is not changed.

    If the ending depends on the frames sent before, ``first`` is the number of its first frame: if
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
            return [channel.decode() for channel in reply]


async def send_hint(channel: str, streams: Sequence[tuple[str, bytes]]) -> None:
    """Send a follower pairs of generation id and packed batch; b"" only says that there is more."""
    await get_channel_layer().send(channel, {"type": "stream.frames", "streams": streams})
