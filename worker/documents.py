"""Request documents: what a worker needs to run a generation, kept in Redis under its id.

The content of a request lives here and nowhere else until its result is stored, so that a request
that must not be stored never reaches PostgreSQL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from django.conf import settings
from pydantic import TypeAdapter

from worker.event_log import cancel_key, document_key, followers_key
from worker.generation import GenerationRequest
from worker.redis_clients import client_for


@dataclass(frozen=True, slots=True)
class Document:
    """What the engine is asked, what the assembler of the API app needs, and what it is to keep."""

    request: GenerationRequest
    assembly: dict[str, Any]
    store: dict[str, Any] | None = None


_adapter = TypeAdapter(Document)


def save_document(generation_id: str, document: Document, follower: str) -> None:
    """Keep the document until the generation ends, and register who follows its stream."""
    pipeline = client_for(generation_id).pipeline(transaction=False)
    pipeline.set(document_key(generation_id), orjson.dumps(document), ex=settings.RUN_TTL_S)
    pipeline.sadd(followers_key(generation_id), follower)
    pipeline.expire(followers_key(generation_id), settings.RUN_TTL_S)
    pipeline.execute()


def drop_document(generation_id: str) -> None:
    """Forget the request of a generation that will never run."""
    keys = (document_key, followers_key, cancel_key)
    client_for(generation_id).delete(*(key(generation_id) for key in keys))


def load_document(generation_id: str) -> tuple[Document | None, bool]:
    """Return the document and whether the generation was cancelled while it waited.

    The document is None when it has expired or its server lost it.
    """
    pipeline = client_for(generation_id).pipeline(transaction=False)
    pipeline.get(document_key(generation_id))
    pipeline.exists(cancel_key(generation_id))
    data, cancelled = pipeline.execute()
    return None if data is None else _adapter.validate_json(data), bool(cancelled)
