"""Request documents: what a worker needs to run a generation, kept in Redis under its id.

The content of a request lives here and nowhere else until its result is stored, so that a request
that must not be stored never reaches PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

import msgpack
import orjson
import redis.exceptions
from django.conf import settings
from pydantic import TypeAdapter

from inference_site.domain.errors import ProjectQuotaReached, RedisFull, RequestTooLarge
from inference_site.domain.request import GenerationRequest
from inference_site.storage.redis import client_for
from inference_site.streams.batches import Batch, Sent, batches_of, sent_so_far, texts_of
from inference_site.streams.event_log import add_attempt
from inference_site.streams.held import HELD
from inference_site.streams.log_scripts import cancel_key, document_key, followers_key, log_key
from inference_site.streams.room import require_room
from inference_site.streams.shared_text import TextsUnknown, restore, shorten

# KEYS: request document, followers, log of a stream; a list that is counted, if any. ARGV: id;
# project; whether its stream can be resumed; the most bytes that the project may hold; time to live
# (ms); document; follower or ""; id, batch and texts of the first entry of the log, or "" for each.
_SAVE = (
    HELD
    + """
local id, project, ttl = ARGV[1], ARGV[2], ARGV[5]
local bytes = #ARGV[6] + #ARGV[9] + #ARGV[10]
local held = tonumber(redis.call("HGET", "held-by-project", project) or 0)
if held + bytes > tonumber(ARGV[4]) then
  release_expired(1000)
  held = tonumber(redis.call("HGET", "held-by-project", project) or 0)
  return {held + bytes > tonumber(ARGV[4]) and 1 or 2}
end
-- First, because this is what a full Redis refuses.
redis.call("SET", KEYS[1], ARGV[6], "PX", ttl)
if ARGV[7] ~= "" then
  redis.call("SADD", KEYS[2], ARGV[7])
  redis.call("PEXPIRE", KEYS[2], ttl)
end
if ARGV[8] ~= "" then
  if ARGV[10] == "" then redis.call("XADD", KEYS[3], ARGV[8], "b", ARGV[9])
  else redis.call("XADD", KEYS[3], ARGV[8], "b", ARGV[9], "t", ARGV[10]) end
  redis.call("PEXPIRE", KEYS[3], ttl)
end
hold(id, project, bytes, ARGV[3])
redis.call("ZADD", "held-open", milliseconds(), id)
release_expired(20)
return {0, KEYS[4] and redis.call("LLEN", KEYS[4]) or 0}
"""
)
_SAVED, _HAS_ROOM_NOW = 0, 2
_DROP = HELD + 'redis.call("DEL", unpack(KEYS)) release(ARGV[1])'


@dataclass(frozen=True)
class Assembly:
    """What the assembler of one kind of generation needs; each kind has a subclass."""

    @property
    def is_stored(self) -> bool:
        """Whether the result is stored without a ``ToStore``."""
        return False


AssemblyT = TypeVar("AssemblyT", bound=Assembly)


@dataclass(frozen=True)
class ToStore:
    """What is kept of a chat completion beside its answer; the messages are as they were sent."""

    project_id: int
    metadata: dict[str, str] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)  # Without slots it is encoded faster.
class Document(Generic[AssemblyT]):
    """A request document: what the engine is asked, how the answer is written, what is kept.

    ``traceparent`` is of the trace it belongs to, if any. During an upgrade the release before and
    the release after read it too. So a new field here, or in anything that this contains, has a
    default; a field whose name or meaning changes gets a new name; and unknown fields are ignored.
    """

    request: GenerationRequest
    assembly: AssemblyT
    store: ToStore | None = None
    traceparent: str = ""


_readers: dict[type[Assembly], TypeAdapter[Document[Any]]] = {}


@dataclass(frozen=True, slots=True)
class Opening:
    """What a stream begins with. ``texts`` are long texts that its frames and its document repeat.

    ``is_resumable``: it may be read again some time after it has ended, and only from its log.
    """

    frames: Sequence[bytes] = ()
    texts: Sequence[bytes] = ()
    is_resumable: bool = False


NOTHING = Opening()


@dataclass(frozen=True, slots=True)
class Loaded(Generic[AssemblyT]):
    """What is kept of a request. ``document`` is None when it is lost.

    It has expired or its server lost it. ``sent`` was sent before: by who accepted the request, or
    by an earlier attempt; ``texts`` are those that the log has.
    """

    document: Document[AssemblyT] | None
    is_cancelled: bool
    sent: Sent
    texts: Sequence[bytes] = ()


def encode(document: Document[Any]) -> bytes:
    """Return the document as JSON."""
    return orjson.dumps(document)


def decode(data: bytes, assembly: type[AssemblyT]) -> Document[AssemblyT]:
    """Return the document of a kind whose assembler needs this. Raise pydantic's ValidationError
    when something without a default is missing."""
    return reader_of(assembly).validate_json(data)


def reader_of(assembly: type[AssemblyT]) -> TypeAdapter[Document[AssemblyT]]:
    """Return what reads such documents. The first time, that is made in some 15 ms."""
    reader = _readers.get(assembly)
    if reader is None:
        reader = _readers[assembly] = TypeAdapter(Document[assembly])  # type: ignore[valid-type]
    return reader


def save_document(
    generation_id: str,
    document: Document[Any],
    follower: str | None,
    opening: Opening = NOTHING,
    project_id: int = 0,
    counted: str = "",
) -> int:
    """Keep the document until the generation ends; with it begins the log of its stream.

    ``follower`` is the channel of who follows the stream. Return the length of the list ``counted``
    on the same server. Raise ProjectQuotaReached when the project holds too much already,
    RequestTooLarge when this alone is too much, and RedisFull.
    """
    texts = opening.texts if opening.frames else ()
    data, entry = _packed(encode(document), texts), _first_entry(opening.frames, texts)
    size = len(data) + sum(map(len, entry))
    most = settings.PROJECT_REDIS_BYTES
    if size > most:
        raise RequestTooLarge(most)
    require_room(generation_id, size)
    keys = [key(generation_id) for key in (document_key, followers_key, log_key)]
    keys += [counted] if counted else []
    limits = (int(opening.is_resumable), most, settings.RUN_TTL_S * 1000)
    arguments = (generation_id, project_id, *limits, data, follower or "", *entry)
    outcome, *length = _save(generation_id, keys, arguments)
    if outcome == _HAS_ROOM_NOW:
        outcome, *length = _save(generation_id, keys, arguments)
    if outcome != _SAVED:
        raise ProjectQuotaReached
    return int(*length)


def _save(generation_id: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
    try:
        return client_for(generation_id).eval(_SAVE, len(keys), *keys, *arguments)
    except redis.exceptions.ResponseError as exc:
        if "OOM" in str(exc):  # In the words of Redis' own refusal, whose place differs.
            raise RedisFull from exc
        raise


def _first_entry(frames: Sequence[bytes], texts: Sequence[bytes]) -> tuple[bytes, bytes, bytes]:
    """Return id, batch and texts of the first entry of a log; nothing if there are no frames."""
    if not frames:
        return b"", b"", b""
    batch = Batch(0, frames)
    return batch.entry_id, batch.pack(texts), msgpack.packb(texts) if texts else b""


def _packed(data: bytes, texts: Sequence[bytes]) -> bytes:
    stored = shorten(data, texts)
    packed: bytes = stored if isinstance(stored, bytes) else msgpack.packb(stored)
    return packed


def _unpacked(data: bytes, texts: Sequence[bytes]) -> bytes | None:
    """Return the document as JSON, which begins with a brace; None if its texts are lost."""
    try:
        return data if data.startswith(b"{") else restore(msgpack.unpackb(data), texts)
    except TextsUnknown:
        return None


def drop_document(generation_id: str) -> None:
    """Forget the request of a generation that will never run."""
    keys = [key(generation_id) for key in (document_key, followers_key, cancel_key, log_key)]
    client_for(generation_id).eval(_DROP, len(keys), *keys, generation_id)


@overload
def load_document(generation_id: str) -> Loaded[Assembly]: ...


@overload
def load_document(
    generation_id: str, assembly: type[AssemblyT], attempt: int = 1
) -> Loaded[AssemblyT]: ...


def load_document(
    generation_id: str, assembly: type[Any] = Assembly, attempt: int = 1
) -> Loaded[Any]:
    """Return the document, whether somebody cancelled it meanwhile, and the frames sent so far.

    ``assembly`` is the type of the generation's kind; without it that part is left out. From now on
    no attempt before ``attempt`` adds to those frames.
    """
    pipeline = client_for(generation_id).pipeline(transaction=False)
    if attempt > 1:
        add_attempt(pipeline, generation_id, attempt)
    pipeline.get(document_key(generation_id))
    pipeline.exists(cancel_key(generation_id))
    pipeline.xrange(log_key(generation_id))
    data, cancelled, entries = pipeline.execute()[-3:]
    texts = texts_of(entries)
    data = None if data is None else _unpacked(data, texts)
    document = None if data is None else decode(data, assembly)
    return Loaded(document, bool(cancelled), sent_so_far(batches_of(entries)), texts)
