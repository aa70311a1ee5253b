"""Compactions as sealed content (see ``core.storage.cipher``).

A compaction that a response begins with holds the whole context (``SealedContext``): what comes
before it is not sent to the model any more. Its sealed content begins with ``_WHOLE``, so that it
is recognised without the key. One of ``POST /v1/responses/compact`` is a summary, which stands
beside the messages of the user.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from inference_site.core.domain.compaction import CompactedContext
from inference_site.core.storage.cipher import seal, unreadable, unseal

_WHOLE = "context."


@dataclass(frozen=True, slots=True)
class SealedContext:
    """A compacted context. ``items`` are those before it that gave the model tools."""

    context: CompactedContext
    items: list[dict[str, Any]] = field(default_factory=list)


_CONTEXT = TypeAdapter(SealedContext)


def holds_context(item: dict[str, Any]) -> bool:
    """Whether the data of an item is a compaction that holds the whole context before it."""
    is_compaction = item.get("type") == "compaction"
    return is_compaction and str(item["encrypted_content"]).startswith(_WHOLE)


def seal_context(sealed: SealedContext, project_id: int) -> str:
    """Return the context as sealed content for a project."""
    return _WHOLE + seal(_CONTEXT.dump_json(sealed).decode(), project_id)


def unseal_context(sealed: str, project_id: int, param: str) -> SealedContext:
    """Return the context. Raise InvalidRequestError as ``unseal`` does."""
    text = unseal(sealed.removeprefix(_WHOLE), project_id, param)
    try:
        return _CONTEXT.validate_json(text)
    except ValidationError as exc:
        raise unreadable(param) from exc


def split(sealed: str) -> tuple[str, str]:
    """Return the prefix of sealed content, which may be empty, and the rest, for ``unseal``."""
    prefix = _WHOLE if sealed.startswith(_WHOLE) else ""
    return prefix, sealed.removeprefix(prefix)
