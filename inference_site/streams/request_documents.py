"""Request documents: what a worker needs to run a generation, kept in Redis under its id.

The content of a request lives here and nowhere else until its result is stored, so that a request
that must not be stored never reaches PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from django.conf import settings
from pydantic import TypeAdapter

from inference_site.domain.request import GenerationRequest
from inference_site.storage.redis_clients import client_for
from inference_site.streams.event_log import (
    FIELD,
    Batch,
    batches_of,
    cancel_key,
    document_key,
    followers_key,
    frames_of,
    log_key,
)


@dataclass(frozen=True, slots=True)
class Document:
    """A request document: what the engine is asked, what the assembler of the API app needs, and
    what is to be kept of the result. ``traceparent`` is of the trace it belongs to, if any."""

    request: GenerationRequest
    assembly: dict[str, Any]
    store: dict[str, Any] | None = None
    traceparent: str = ""


_adapter = TypeAdapter(Document)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What is known of a generation when a worker begins it.

    ``document`` is None when it has expired or its server lost it. ``frames`` were sent before: by
    who accepted the request, or by an earlier attempt.
    """

    document: Document | None
    is_cancelled: bool
    frames: list[bytes]


def save_document(
    generation_id: str, document: Document, follower: str | None, frames: Sequence[bytes] = ()
) -> None:
    """Keep the document until the generation ends; with it begins the log of its stream.

    ``follower`` is the channel of who follows the stream, ``frames`` what it begins with.
    """
    pipeline = client_for(generation_id).pipeline(transaction=False)
    pipeline.set(document_key(generation_id), orjson.dumps(document), ex=settings.RUN_TTL_S)
    if follower is not None:
        pipeline.sadd(followers_key(generation_id), follower)
        pipeline.expire(followers_key(generation_id), settings.RUN_TTL_S)
    if frames:
        batch = Batch(0, frames)
        pipeline.xadd(log_key(generation_id), {FIELD: batch.pack()}, id=batch.entry_id)
        pipeline.expire(log_key(generation_id), settings.RUN_TTL_S)
    pipeline.execute()


def drop_document(generation_id: str) -> None:
    """Forget the request of a generation that will never run."""
    keys = (document_key, followers_key, cancel_key, log_key)
    client_for(generation_id).delete(*(key(generation_id) for key in keys))


def load_document(generation_id: str) -> Loaded:
    """Return the document, whether somebody cancelled it meanwhile, and the frames sent so far."""
    pipeline = client_for(generation_id).pipeline(transaction=False)
    pipeline.get(document_key(generation_id))
    pipeline.exists(cancel_key(generation_id))
    pipeline.xrange(log_key(generation_id))
    data, cancelled, entries = pipeline.execute()
    document = None if data is None else _adapter.validate_json(data)
    return Loaded(document, bool(cancelled), frames_of(batches_of(entries)))
