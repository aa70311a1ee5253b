"""The event log: all frames of a stream, in a Redis Stream that outlives its readers.

One entry holds the frames of one tick. Its id is ``<number of its last frame + 1>-0``, so a reader
finds any frame by its number, and Redis refuses an append that is repeated after a lost reply. The
entry that ends a stream has the greatest possible id. It closes the log: a worker that was given up
as dead cannot append to it any more. Nor can one whose run was given to another: each attempt to
run a generation has a number, and when a later one has begun, appends of earlier ones are refused.

The log is the source of truth; messages over the channel layer are hints that arrive sooner.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack
import redis
import redis.asyncio
import redis.exceptions
from django.conf import settings

from inference_site.storage.full_redis import FIRST_WRITE, SET_WHEN_FULL
from inference_site.storage.redis_clients import client_for
from inference_site.streams.ending import Ending
from inference_site.streams.held import HELD, kept_ms
from inference_site.streams.shared_text import TextsUnknown, restore, shorten

_LAST_ID = b"18446744073709551615-0"
FIELD = b"b"
_AT_ONCE = 64
"""Entries that are read at once of a log that may be long."""
TEXTS_FIELD = b"t"
"""In the first entry of a log: the texts that its frames refer to (see ``shared_text``)."""
_LOST_FRAMES = 1_000_000
"""More frames than a stream can have had of which the log was lost."""


class LogState(IntEnum):
    """The state of a log, as an append returns it to the writer."""

    OPEN = 0
    CLOSED = 1  # The stream was ended, or given to another attempt; stop writing.
    CANCELLED = 2  # The cancel flag is set; stop the generation.


# KEYS: log, cancel flag, followers, request document, latest attempt of each stream.
# ARGV: time to live of an unfinished log, of a finished one, and of one that can be resumed (ms);
# then, for each stream, the id of the entry ("" to append nothing, the greatest id to end the
# stream), its payload, its attempt, and "1" if it ends the stream with a refusal.
_APPEND = (
    FIRST_WRITE
    + HELD
    + """
local replies = {}
for i = 1, #KEYS / 5 do
  local log, cancel, follow, document = KEYS[5*i-4], KEYS[5*i-3], KEYS[5*i-2], KEYS[5*i-1]
  local id, payload, latest = ARGV[4*i], ARGV[4*i+1], redis.call("GET", KEYS[5*i])
  local is_refusal = ARGV[4*i+3] == "1"
  local state, last = 0, id == "18446744073709551615-0"
  local followers = redis.call("SMEMBERS", follow)
  if redis.call("EXISTS", cancel) == 1 then state = 2 end
  if latest and tonumber(latest) > tonumber(ARGV[4*i+2]) then
    state = 1
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
_BEGIN_ATTEMPT = (
    FIRST_WRITE
    + """
if tonumber(redis.call("GET", KEYS[1]) or 0) < tonumber(ARGV[1]) then
  redis.call("SET", KEYS[1], ARGV[1], "EX", ARGV[2])
end
"""
)


# KEYS: log, cancel flag, followers, request document of one stream.
# ARGV: time to live of a finished log, and of one that can be resumed (ms); the last id the caller
# knows; payload of the ending.
_CLOSE = (
    FIRST_WRITE
    + HELD
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

# KEYS: log, followers, request document of one stream. ARGV: channel; time to live of who follows a
# stream, and of who follows one of which there is nothing, so that nothing may ever end it (s).
_FOLLOW = (
    FIRST_WRITE
    + """
local tail = redis.call("XREVRANGE", KEYS[1], "+", "-", "COUNT", 1)
if tail[1] and tail[1][1] == "18446744073709551615-0" then return end
local is_known = tail[1] or redis.call("EXISTS", KEYS[3]) == 1
redis.call("SADD", KEYS[2], ARGV[1])
redis.call("EXPIRE", KEYS[2], is_known and ARGV[2] or ARGV[3])
"""
)
_UNKNOWN_FOLLOWED_S = 60


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive frames of one stream; ``first`` is the number of the first frame.

    ``ending`` is set on the batch that ends the stream, after its frames.
    """

    first: int
    frames: Sequence[bytes]
    ending: Ending | None = None

    @property
    def next(self) -> int:
        """The number of the frame after this batch."""
        return self.first + len(self.frames)

    def pack(self, texts: Sequence[bytes] = ()) -> bytes:
        """Encode the batch for the log and the channel layer, referring to the log's texts."""
        end = self.ending
        tail = None
        if end is not None:
            tail = {f.name: getattr(end, f.name) for f in fields(end) if f.name != "frames"}
            tail["body"] = shorten(end.body, texts)
        frames = [shorten(frame, texts) for frame in self.frames] if texts else self.frames
        packed: bytes = msgpack.packb((self.first, frames, tail))
        return packed

    @classmethod
    def unpack(cls, payload: bytes, texts: Sequence[bytes] = ()) -> Batch:
        """Decode the result of ``pack``. Raise TextsUnknown if it refers to texts, and has none."""
        first, frames, tail = msgpack.unpackb(payload)
        frames = [restore(frame, texts) for frame in frames]
        if tail is None:
            return cls(first, frames)
        tail["body"] = restore(tail["body"], texts)
        # Another release may send fields that this one does not know.
        known = {f.name: tail[f.name] for f in fields(Ending) if f.name in tail}
        return cls(first, frames, Ending(frames=(), **known))

    @property
    def entry_id(self) -> bytes:
        """The id of this batch's entry in the log."""
        return _LAST_ID if self.ending else b"%d-0" % self.next


@dataclass(frozen=True, slots=True)
class Sent:
    """What a stream has sent: all of its frames, and the number of the next.

    ``frames`` is empty when some of them are lost with their Redis.
    """

    frames: Sequence[bytes] = ()
    next: int = 0

    def beyond(self) -> Sent:
        """Return where to go on when frames are lost: at numbers that no reader expects next, so
        that all of them are told of the loss."""
        return Sent(next=self.next + _LOST_FRAMES)


class Write(NamedTuple):
    """An append to one log by one attempt; an empty ``entry_id`` only reads the state.

    A refusal ends a stream that nobody will want to read again.
    """

    generation_id: str
    entry_id: bytes
    payload: bytes
    attempt: int = 1
    is_refusal: bool = False


@dataclass(frozen=True, slots=True)
class Appended:
    """The result of an append: the log's state, and the channels of its followers."""

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


def append_arguments(writes: Iterable[Write]) -> tuple[int, list[Any]]:
    """Return the number of keys, then the keys and arguments, of the append script."""
    keys: list[Any] = []
    arguments: list[Any] = [settings.RUN_TTL_S * 1000, *kept_ms()]
    for generation_id, entry_id, payload, attempt, is_refusal in writes:
        keys += (
            log_key(generation_id),
            cancel_key(generation_id),
            followers_key(generation_id),
            document_key(generation_id),
            attempt_key(generation_id),
        )
        arguments += (entry_id, payload, attempt, int(is_refusal))
    return len(keys), keys + arguments


def parse_appended(reply: list[Any]) -> list[Appended]:
    """Decode the script's reply: one result for each write, in order."""
    return [
        Appended(LogState(state), [channel.decode() for channel in followers])
        for state, followers in reply
    ]


Entries = list[tuple[bytes, dict[bytes, bytes]]]
_NEVER = 2**62


class AsyncEventLog:
    """The event logs of one Redis server, for asyncio code."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._append = client.register_script(_APPEND)

    async def append(self, writes: Sequence[Write]) -> list[Appended]:
        """Append each of these; return what became of them, in order."""
        count, arguments = append_arguments(writes)
        reply = await self._append(keys=arguments[:count], args=arguments[count:])
        return parse_appended(reply)

    async def read_many(
        self, wanted: Sequence[tuple[str, int]], most: int | None = None
    ) -> list[list[Batch]]:
        """Return the batches from the frame number on, for each (generation id, frame number).

        No more than ``most`` batches of each.
        """
        pipeline = self._client.pipeline(transaction=False)
        for generation_id, number in wanted:
            pipeline.xrange(log_key(generation_id), min=f"{number + 1}-0", count=most)
        found = zip(wanted, await pipeline.execute(), strict=True)
        return [await self._batches(id_, entries) for (id_, _), entries in found]

    async def _batches(self, generation_id: str, entries: Entries) -> list[Batch]:
        """Decode entries. If they refer to texts that are lost, no frame is the next for anyone."""
        try:
            return _decoded(entries)
        except TextsUnknown:
            first = await self._client.xrange(log_key(generation_id), count=1)
        try:
            return _decoded(entries, texts_of(first))
        except TextsUnknown:
            return [Batch(_NEVER, ())]

    async def follow(self, generation_id: str, channel: str) -> None:
        """Have the writer send this stream's frames to the channel as well."""
        await self._client.eval(*_follow(generation_id, channel))

    async def request_cancel(self, generation_ids: Sequence[str]) -> None:
        """Set the cancel flags; workers see them at their next append or poll."""
        pipeline = self._client.pipeline(transaction=False)
        for generation_id in generation_ids:
            pipeline.eval(*_set_flag(generation_id))
        await pipeline.execute()


def follow(generation_id: str, channel: str) -> None:
    """Register a channel to which the writer sends this stream's frames, unless it has ended."""
    client_for(generation_id).eval(*_follow(generation_id, channel))


def _follow(generation_id: str, channel: str) -> tuple[Any, ...]:
    keys = [key(generation_id) for key in (log_key, followers_key, document_key)]
    return _FOLLOW, 3, *keys, channel, settings.RUN_TTL_S, _UNKNOWN_FOLLOWED_S


def _set_flag(generation_id: str) -> tuple[Any, ...]:
    return SET_WHEN_FULL, 1, cancel_key(generation_id), 1, settings.RUN_TTL_S


def request_cancel(generation_id: str) -> None:
    """Set the cancel flag; the worker sees it at its next append or poll."""
    client_for(generation_id).eval(*_set_flag(generation_id))


def drop_cancel_flag(generation_id: str) -> None:
    """Take back a request to stop a generation that has ended."""
    client_for(generation_id).delete(cancel_key(generation_id))


def add_attempt(pipeline: Any, generation_id: str, attempt: int) -> None:
    """Add to a pipeline what has the appends of earlier attempts refused from now on."""
    key = attempt_key(generation_id)
    pipeline.eval(_BEGIN_ATTEMPT, 1, key, attempt, settings.RUN_TTL_S)


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


def outline(generation_id: str) -> list[Batch]:
    """Return all batches of the log with empty frames, without holding what the frames are."""
    client: Any = client_for(generation_id)
    start, texts, found = "-", tuple[bytes, ...](), list[Batch]()
    while entries := client.xrange(log_key(generation_id), min=start, count=_AT_ONCE):
        texts = texts or texts_of(entries)
        try:
            batches = _decoded(entries, texts)
        except TextsUnknown:
            return []
        for batch in batches:
            found.append(Batch(batch.first, [b""] * len(batch.frames), batch.ending))
        start = f"({entries[-1][0].decode()}"
    return found


def close_log(generation_id: str, ending: Ending, first: int | None = None) -> Appended | None:
    """End a stream in place of its worker; return the followers. An ended stream is not changed.

    If the ending depends on the frames sent before, ``first`` is the number of its first frame. If
    other frames were appended meanwhile, do nothing and return None.
    """
    client = client_for(generation_id)
    batch = Batch(0 if first is None else first, ending.frames, ending)
    keys = [key(generation_id) for key in (log_key, cancel_key, followers_key, document_key)]
    opening: Any = client.xrange(log_key(generation_id), count=1)
    while True:
        entries: Any = client.xrevrange(log_key(generation_id), count=1)
        known = entries[0][0] if entries else b""
        # The id of an entry is the number of the frame after it.
        if known not in (b"", _LAST_ID) and known != b"%d-0" % batch.first:
            if first is not None:
                return None
            batch = Batch(int(known.removesuffix(b"-0")), ending.frames, ending)
        reply: Any = client.eval(_CLOSE, 4, *keys, *kept_ms(), known, batch.pack(texts_of(opening)))
        if reply is not None:
            return Appended(LogState.OPEN, [channel.decode() for channel in reply])


def frames_of(batches: Iterable[Batch]) -> list[bytes]:
    """Return the frames of consecutive batches."""
    return [frame for batch in batches for frame in batch.frames]


def batches_of(entries: Entries) -> list[Batch]:
    """Return the batches of a whole log; none if a part is lost that others refer to."""
    try:
        return _decoded(entries)
    except TextsUnknown:
        return []


def texts_of(entries: Any) -> tuple[bytes, ...]:
    """Return the texts that the frames of a log refer to, by its first entry."""
    packed = entries[0][1].get(TEXTS_FIELD) if entries else None
    return tuple(msgpack.unpackb(packed)) if packed else ()


def _decoded(entries: Entries, texts: Sequence[bytes] = ()) -> list[Batch]:
    texts = texts or texts_of(entries)
    return [Batch.unpack(entry[FIELD], texts) for _, entry in entries]


def hinted(payload: bytes) -> Batch | None:
    """Return the batch of a hint; None if it says only that there is something in the log."""
    try:
        return Batch.unpack(payload) if payload else None
    except TextsUnknown:
        return None


def is_whole(batches: Sequence[Batch]) -> bool:
    """Whether a log has all frames from the first on; one that lost all of them looks whole."""
    return all(batch.first == n for batch, n in zip(batches, _firsts(batches), strict=False))


def _firsts(batches: Sequence[Batch]) -> Iterable[int]:
    return itertools.accumulate((len(batch.frames) for batch in batches), initial=0)


def sent_so_far(batches: Sequence[Batch]) -> Sent:
    """Return what a stream has sent, by its log."""
    frames = tuple(frames_of(batches)) if is_whole(batches) else ()
    return Sent(frames, batches[-1].next if batches else 0)


def trim(batches: Iterable[Batch], number: int) -> list[Batch]:
    """Drop the frames below this number; keep an ending even if no frame is left in its batch."""
    kept = []
    for batch in batches:
        frames = list(itertools.islice(batch.frames, max(0, number - batch.first), None))
        if frames or batch.ending:
            kept.append(Batch(max(number, batch.first), frames, batch.ending))
    return kept


MESSAGE_TYPE = "stream.frames"
"""Type of the channel layer message; ``streams`` has pairs of generation id and payload."""
