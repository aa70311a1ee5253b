"""Request documents: what a worker needs to run a generation, kept in Redis under its id.

Until the result is stored, the content of a request is nowhere else. So a request that must not be
stored never reaches PostgreSQL.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgpack
import orjson
import redis.exceptions
from django.conf import settings
from pydantic import TypeAdapter

from inference_site.core.domain.errors import ProjectQuotaReached, RedisFull, RequestTooLarge
from inference_site.core.domain.request import GenerationRequest
from inference_site.core.storage.redis import client_for
from inference_site.runs.streams.batches import (
    Batch,
    Sent,
    SharedTextsMissing,
    decode_log,
    restore,
    sent_so_far,
    shorten,
    texts_of,
)
from inference_site.runs.streams.event_log import (
    add_attempt,
    cancel_key,
    document_key,
    followers_key,
    log_key,
)
from inference_site.runs.streams.redis_memory import HELD_LUA, require_room

# KEYS: request document, followers and log of a stream; a list whose length is returned, if any.
# ARGV: id; project; whether the stream can be resumed; the most bytes that the project may hold;
# time to live (ms); document; follower or ""; id, batch and texts of the first entry of the log, or
# "" for each. Returns 0 and the length; 1 if the project holds too much; 2 if it has room only now.
_SAVE = (
    HELD_LUA
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
_SAVED, _RETRY = 0, 2
_DROP = HELD_LUA + 'redis.call("DEL", unpack(KEYS)) release(ARGV[1])'


@dataclass(frozen=True)
class Assembly:
    """The input of the assembler of one kind of generation. Each kind has a subclass.

    ``site_tools`` are the options of the tools that the site runs for it (see ``worker.tools``).
    """

    site_tools: list[dict[str, Any]] = field(default_factory=list, kw_only=True)

    @property
    def is_stored(self) -> bool:
        """Whether the result is stored even without a ``ToStore``."""
        return False


AssemblyT = TypeVar("AssemblyT", bound=Assembly)


@dataclass(frozen=True)
class ToStore:
    """The stored parts of a chat completion beside its answer; messages as the client sent them."""

    project_id: int
    metadata: dict[str, str] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)  # Without slots it is encoded faster.
class Document(Generic[AssemblyT]):
    """A request document: what the engine is asked, how the answer is written, what is stored.

    ``traceparent`` is that of its trace, if any. The whole answer of one that ``is_delivered`` is
    kept by an app (``runs.kinds.Delivery``). During an upgrade, workers of the release before
    and of the release after read it too. So a new field here, or in anything that this contains,
    has a default; a field whose meaning changes gets a new name; and unknown fields are ignored.
    """

    request: GenerationRequest
    assembly: AssemblyT
    store: ToStore | None = None
    traceparent: str = ""
    is_delivered: bool = False


_readers: dict[type[Assembly], TypeAdapter[Document[Any]]] = {}


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a stream. ``texts`` are long texts that its frames and document repeat.

    ``is_resumable``: the log is kept for clients that come some time after the end.
    """

    frames: Sequence[bytes] = ()
    texts: Sequence[bytes] = ()
    is_resumable: bool = False


NOTHING = Opening()


@dataclass(frozen=True, slots=True)
class Loaded(Generic[AssemblyT]):
    """A request as Redis has it. ``document`` is None when it has expired or Redis lost it.

    ``sent`` are the frames of the web process that accepted the request, and of earlier attempts;
    ``texts`` are the shared texts of the log.
    """

    document: Document[AssemblyT] | None
    is_cancelled: bool
    sent: Sent
    texts: Sequence[bytes] = ()


def reader_of(assembly: type[AssemblyT]) -> TypeAdapter[Document[AssemblyT]]:
    """Return the decoder of documents with this assembly. Making it takes 15 ms, once."""
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
    """Keep the document until the generation ends, and begin the log of its stream.

    ``follower`` is the channel of the web process that follows the stream. Return the length of the
    list ``counted``, which is on the same server. Raise ProjectQuotaReached when the project holds
    too much already, RequestTooLarge when this document alone is too much, and RedisFull.
    """
    texts = opening.texts if opening.frames else ()
    shortened = shorten(orjson.dumps(document), texts)
    data: bytes = shortened if isinstance(shortened, bytes) else msgpack.packb(shortened)
    entry = (b"", b"", b"")
    if opening.frames:
        batch = Batch(0, opening.frames)
        entry = batch.entry_id, batch.pack(texts), msgpack.packb(texts) if texts else b""
    size = len(data) + sum(map(len, entry))
    most = settings.PROJECT_REDIS_BYTES
    if size > most:
        raise RequestTooLarge(most)
    require_room(generation_id, size)
    keys = [key(generation_id) for key in (document_key, followers_key, log_key)]
    keys += [counted] if counted else []
    limits = (int(opening.is_resumable), most, settings.RUN_TTL_S * 1000)
    arguments = (generation_id, project_id, *limits, data, follower or "", *entry)
    client: Any = client_for(generation_id)
    try:
        outcome, *length = client.eval(_SAVE, len(keys), *keys, *arguments)
        if outcome == _RETRY:
            outcome, *length = client.eval(_SAVE, len(keys), *keys, *arguments)
    except redis.exceptions.ResponseError as exc:
        if "OOM" in str(exc):  # Redis' code for a full server, anywhere in the message of a script.
            raise RedisFull from exc
        raise
    if outcome != _SAVED:
        raise ProjectQuotaReached
    return int(*length)


def drop_document(generation_id: str) -> None:
    """Delete document, flags and log of a generation that never runs or has ended without them."""
    drop_documents([generation_id])


def drop_documents(generation_ids: Iterable[str]) -> None:
    """Do as ``drop_document`` for many, with one round trip to each server."""
    by_client: dict[Any, list[str]] = defaultdict(list)
    for generation_id in generation_ids:
        by_client[client_for(generation_id)].append(generation_id)
    for client, ids in by_client.items():
        pipeline = client.pipeline(transaction=False)
        for generation_id in ids:
            keys = [
                key(generation_id) for key in (document_key, followers_key, cancel_key, log_key)
            ]
            pipeline.eval(_DROP, len(keys), *keys, generation_id)
        pipeline.execute()


def load_document(
    generation_id: str, assembly: type[AssemblyT], attempt: int = 1
) -> Loaded[AssemblyT]:
    """Begin an attempt: return the document, the cancel flag, and the frames sent so far.

    ``assembly`` is the type of the generation's kind. Appends of attempts before ``attempt`` are
    refused from now on. Raise pydantic's ValidationError when a field without a default is missing.
    """
    pipeline = client_for(generation_id).pipeline(transaction=False)
    if attempt > 1:
        add_attempt(pipeline, generation_id, attempt)
    pipeline.get(document_key(generation_id))
    pipeline.exists(cancel_key(generation_id))
    pipeline.xrange(log_key(generation_id))
    data, cancelled, entries = pipeline.execute()[-3:]
    texts = texts_of(entries)
    document = None
    if data is not None:
        # JSON begins with a brace; other documents refer to texts of the log, which may be lost.
        with suppress(SharedTextsMissing):
            json = data if data.startswith(b"{") else restore(msgpack.unpackb(data), texts)
            document = reader_of(assembly).validate_json(json)
    return Loaded(document, bool(cancelled), sent_so_far(decode_log(entries)), texts)
