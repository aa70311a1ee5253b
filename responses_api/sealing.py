"""Sealed content: text that a client stores for this server, and can neither read nor change.

It is compressed, and encrypted with a key derived from ``SECRET_KEY`` and the project's id.

A compaction that a response begins with holds the whole context (``SealedContext``): what comes
before it is not sent to the model any more. Its sealed content begins with ``_WHOLE``, so that it
is recognised without the key. One of ``POST /v1/responses/compact`` is a summary, which stands
beside the messages of the user.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

from cryptography.fernet import Fernet, InvalidToken
from pydantic import TypeAdapter, ValidationError

from inference_site.core.domain.compaction import CompactedContext
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.core.storage.cipher import cipher_for

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
        raise _unreadable(param) from exc


def seal(text: str, project_id: int) -> str:
    """Return the text as sealed content for a project."""
    return _cipher(project_id).encrypt(zlib.compress(text.encode())).decode()


def split(sealed: str) -> tuple[str, str]:
    """Return the prefix of sealed content, which may be empty, and the rest, for ``unseal``."""
    prefix = _WHOLE if sealed.startswith(_WHOLE) else ""
    return prefix, sealed.removeprefix(prefix)


def unseal(sealed: str, project_id: int, param: str) -> str:
    """Return the text. Raise InvalidRequestError unless this server sealed it for the project."""
    try:
        return zlib.decompress(_cipher(project_id).decrypt(sealed.encode())).decode()
    except (InvalidToken, zlib.error, UnicodeError) as exc:
        raise _unreadable(param) from exc


def _unreadable(param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"Invalid '{param}': the encrypted content could not be read.",
        param=param,
        code="invalid_encrypted_content",
    )


def _cipher(project_id: int) -> Fernet:
    return cipher_for(f"sealed:{project_id}")
