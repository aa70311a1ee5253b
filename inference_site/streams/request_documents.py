"""Request documents: what a worker needs to run a generation, kept in Redis under its id.

The content of a request lives here and nowhere else until its result is stored, so that a request
that must not be stored never reaches PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

import orjson
from django.conf import settings
from pydantic import TypeAdapter

from inference_site.domain.request import GenerationRequest
from inference_site.storage.redis_clients import client_for
from inference_site.streams.event_log import (
    FIELD,
    Batch,
    Sent,
    add_attempt,
    add_follower,
    batches_of,
    cancel_key,
    document_key,
    followers_key,
    log_key,
    sent_so_far,
)


@dataclass(frozen=True)
class Assembly:
    """What the assembler of one kind of generation needs; each kind has a subclass."""


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
class Loaded(Generic[AssemblyT]):
    """What is kept of a request. ``document`` is None when it is lost.

    It has expired or its server lost it. ``sent`` was sent before: by who accepted the request, or
    by an earlier attempt.
    """

    document: Document[AssemblyT] | None
    is_cancelled: bool
    sent: Sent


def encode(document: Document[Any]) -> bytes:
    """Return the document as JSON."""
    return orjson.dumps(document)


def decode(data: bytes, assembly: type[AssemblyT]) -> Document[AssemblyT]:
    """Return the document of a kind whose assembler needs this. Raise pydantic's ValidationError
    when something without a default is missing."""
    reader = _readers.get(assembly)
    if reader is None:
        reader = _readers[assembly] = TypeAdapter(Document[assembly])  # type: ignore[valid-type]
    return reader.validate_json(data)


def save_document(
    generation_id: str,
    document: Document[Any],
    follower: str | None,
    frames: Sequence[bytes] = (),
) -> None:
    """Keep the document until the generation ends; with it begins the log of its stream.

    ``follower`` is the channel of who follows the stream, ``frames`` what it begins with.
    """
    pipeline = client_for(generation_id).pipeline(transaction=False)
    pipeline.set(document_key(generation_id), encode(document), ex=settings.RUN_TTL_S)
    if follower is not None:
        add_follower(pipeline, generation_id, follower)
    if frames:
        batch = Batch(0, frames)
        pipeline.xadd(log_key(generation_id), {FIELD: batch.pack()}, id=batch.entry_id)
        pipeline.expire(log_key(generation_id), settings.RUN_TTL_S)
    pipeline.execute()


def drop_document(generation_id: str) -> None:
    """Forget the request of a generation that will never run."""
    keys = (document_key, followers_key, cancel_key, log_key)
    client_for(generation_id).delete(*(key(generation_id) for key in keys))


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
    document = None if data is None else decode(data, assembly)
    return Loaded(document, bool(cancelled), sent_so_far(batches_of(entries)))
