"""Keeping, finding and changing stored chat completions; a project sees only its own."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from completions.assemblers.chat import ChatAssembler
from completions.models import StoredCompletion
from inference_site.errors.api_errors import NotFoundError
from inference_site.generations.kinds import Assembler
from inference_site.generations.models import Status
from inference_site.storage.fields import replace_nul
from inference_site.streams.request_documents import ToStore


def store_result(
    generation_id: str, status: str, assembler: Assembler, store: ToStore | None
) -> None:
    """Keep a completed chat completion, if asked for (see ``generations.kinds.StoreResult``)."""
    if store is None or status != Status.COMPLETED:
        return
    assert isinstance(assembler, ChatAssembler)
    completion = assembler.completion()
    StoredCompletion.objects.create(
        public_id=generation_id,
        project_id=store.project_id,
        model=completion["model"],
        metadata=store.metadata,
        messages=store.messages,
        completion=completion,
        streamed=assembler.as_streamed(),
    )


def replace_metadata(stored: StoredCompletion, metadata: dict[str, str]) -> None:
    """Change the metadata of a stored chat completion."""
    stored.metadata = replace_nul(metadata)
    stored.save(update_fields=["metadata"])


def completions_of(project_id: int) -> QuerySet[StoredCompletion]:
    """Return the project's stored completions."""
    return StoredCompletion.objects.filter(project_id=project_id)


def find(project_id: int, public_id: str) -> StoredCompletion:
    """Return one. Raise NotFoundError for an unknown one and for another project's."""
    found = completions_of(project_id).filter(public_id=public_id).first()
    if found is None:
        raise NotFoundError(f"Completion with id '{public_id[:100]}' not found.")
    return found


def wire_completion(stored: StoredCompletion) -> dict[str, Any]:
    """Return the object as the API shows it."""
    completion: dict[str, Any] = dict(stored.completion)
    return {**completion, "metadata": stored.metadata}


def wire_messages(stored: StoredCompletion) -> list[dict[str, Any]]:
    """Return the messages it answered, each with an id of its own."""
    return [
        _wire_message(f"{stored.public_id}-{number}", message)
        for number, message in enumerate(stored.messages)
    ]


def _wire_message(message_id: str, message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    if parts is not None:
        content = "".join(part.get("text") or part.get("refusal") or "" for part in parts)
    extra = ("tool_calls", "tool_call_id")
    return {
        "id": message_id,
        "role": message["role"],
        "content": content,
        "name": message.get("name"),
        "content_parts": parts,
        "refusal": message.get("refusal"),
        **{key: message[key] for key in extra if message.get(key) is not None},
    }
