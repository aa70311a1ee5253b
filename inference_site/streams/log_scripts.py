"""The scripts that write event logs in Redis, and the names of the keys of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from django.conf import settings

from inference_site.storage.redis import ALLOW_WHEN_FULL
from inference_site.streams.held import HELD, kept_ms
from inference_site.streams.script_messages import SEND


class LogState(IntEnum):
    """The state of a log, as an append returns it to the writer."""

    OPEN = 0
    CLOSED = 1  # The stream was ended, or given to another attempt; stop writing.
    CANCELLED = 2  # The cancel flag is set; stop the generation.
    LOST = 3  # Redis has lost the log; nothing was appended. Send all of it again.


# KEYS: log, cancel flag, followers, request document, latest attempt of each stream.
# ARGV: "1" to tell the followers, which are not returned then; time to live of an unfinished log,
# of a finished one, and of one that can be resumed (ms); then, for each stream, the id of the entry
# ("" to append nothing, the greatest id to end the stream), its payload, its attempt, "1" if it
# ends the stream with a refusal, and "1" if the log is known to have frames.
APPEND = (
    ALLOW_WHEN_FULL
    + HELD
    + SEND
    + """
local replies = {}
for i = 1, #KEYS / 5 do
  local log, cancel, follow, document = KEYS[5*i-4], KEYS[5*i-3], KEYS[5*i-2], KEYS[5*i-1]
  local id, payload, latest = ARGV[5*i], ARGV[5*i+1], redis.call("GET", KEYS[5*i])
  local is_refusal, goes_on = ARGV[5*i+3] == "1", ARGV[5*i+4] == "1"
  local state, last = 0, id == "18446744073709551615-0"
  local followers = redis.call("SMEMBERS", follow)
  if redis.call("EXISTS", cancel) == 1 then state = 2 end
  if latest and tonumber(latest) > tonumber(ARGV[5*i+2]) then
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
      keep_ended(log, is_refusal, ARGV[3], ARGV[4])
      redis.call("DEL", cancel, follow, document)
    elseif redis.call("XLEN", log) == 1 then
      redis.call("PEXPIRE", log, ARGV[2])
    end
  end
  if ARGV[1] == "1" then
    for _, channel in ipairs(id ~= "" and state ~= 1 and state ~= 3 and followers or {}) do
      add_message(channel, string.sub(log, 2, -6), payload)
    end
    followers = {}
  end
  replies[i] = {state, followers}
end
send_messages()
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


# KEYS: log. ARGV: id from which on a reader reads.
# Returns the id of the last entry, then id and beginning of the payload of the first to be read.
LOOK = """
local tail = redis.call("XREVRANGE", KEYS[1], "+", "-", "COUNT", 1)[1]
if not tail then return {} end
local first = redis.call("XRANGE", KEYS[1], ARGV[1], "+", "COUNT", 1)[1]
if not first then return {tail[1]} end
return {tail[1], first[1], string.sub(first[2][2], 1, 32)}
"""


# KEYS: log. ARGV: id from which on it is read; the most entries; bytes after which no more is read.
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

    A refusal ends a stream that nobody will want to read again. With ``goes_on`` the log has frames
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
    """The result of an append: the log's state, and the channels of followers to be told of it."""

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


def append_arguments(writes: Iterable[Write], *, tells_followers: bool) -> tuple[int, list[Any]]:
    """Return the number of keys, then the keys and arguments, of the append script.

    ``tells_followers``: it sends them what it appends, and does not return them.
    """
    keys: list[Any] = []
    arguments: list[Any] = [int(tells_followers), settings.RUN_TTL_S * 1000, *kept_ms()]
    for generation_id, entry_id, payload, attempt, is_refusal, goes_on in writes:
        keys += (
            log_key(generation_id),
            cancel_key(generation_id),
            followers_key(generation_id),
            document_key(generation_id),
            attempt_key(generation_id),
        )
        arguments += (entry_id, payload, attempt, int(is_refusal), int(goes_on))
    return len(keys), keys + arguments


def parse_appended(reply: list[Any]) -> list[Appended]:
    """Decode the script's reply: one result for each write, in order."""
    return [
        Appended(LogState(state), [channel.decode() for channel in followers])
        for state, followers in reply
    ]
