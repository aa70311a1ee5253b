"""Stored chat completions on the wire. Source: API reference, "Chat completions" (stored)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from completions.wire.chat import ChatCompletion
from completions.wire.tools import RequestToolCall
from inference_site.api.paging import PageQuery
from inference_site.api.payload import WireObject
from inference_site.request_fields.wire import Metadata, Part


class StoredQuery(PageQuery):
    """The query of ``GET /v1/chat/completions``."""

    model: str | SkipJsonSchema[None] = None
    metadata: dict[str, str] | SkipJsonSchema[None] = Field(
        None, description="Pairs that a completion must have: `metadata[key]=value`."
    )


class StoredChatCompletion(ChatCompletion):
    """A chat completion that was kept."""

    metadata: Metadata


class StoredMessage(WireObject):
    """A message that a stored completion answered. ``content`` is the text of its parts."""

    id: str
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | None
    name: str | None
    content_parts: list[Part] | None
    refusal: str | None
    tool_calls: list[RequestToolCall] | None = None
    tool_call_id: str | None = None


class DeletedChatCompletion(WireObject):
    """The answer of ``DELETE /v1/chat/completions/{id}``."""

    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: Literal[True] = True
