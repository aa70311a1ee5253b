"""Conversations on the wire. Source: API reference, "Conversations"."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from inference_site.api.payload import WireObject, WireRequest
from inference_site.request_fields.wire import Metadata
from responses_api.wire.chat_messages import InputItems


class ConversationRequest(WireRequest):
    """The body of ``POST /v1/conversations``, which may be empty."""

    items: Annotated[InputItems, Field(max_length=20)] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(WireRequest):
    """The body of ``POST /v1/conversations/{id}``."""

    metadata: Metadata


class ItemsRequest(WireRequest):
    """The body of ``POST /v1/conversations/{id}/items``."""

    items: Annotated[InputItems, Field(min_length=1, max_length=20)]


class Conversation(WireObject):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(WireObject):
    """What is left of a deleted conversation; its items are not deleted."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True
