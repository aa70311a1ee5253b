"""Views of conversations: ``/v1/conversations`` and the paths below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import transaction
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.core.errors.api_errors import NotFoundError
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.paging import keep_position
from inference_site.gateway.api.payload import places_of
from inference_site.gateway.api.schema import ListObject, documented
from inference_site.gateway.api.views import ApiView
from inference_site.runs.queue import new_id
from responses_api.context import find_conversation
from responses_api.deletion import delete_conversation, remove_item
from responses_api.items import IdentifiedItem, new_items, require_readable
from responses_api.listing import items_path, page_of_conversation
from responses_api.models import Conversation, Item
from responses_api.storage import append
from responses_api.wire import objects, requests
from responses_api.wire.input_items import InputItem, path_of
from responses_api.wire.objects import ListedItem
from responses_api.wire.requests import ConversationItemsQuery, IncludeQuery, check_include


class ConversationsView(ApiView):
    """``POST /v1/conversations``."""

    counts_writes = True

    @documented(
        body=requests.ConversationRequest, answer=objects.Conversation, errors=(NotFoundError,)
    )
    def post(self, request: Request) -> Response:
        """Create a conversation, which may have items from the start."""
        given = {} if request.data is None else request.data
        body = self.parse(requests.ConversationRequest, given)
        project_id = caller_of(request).project_id
        with transaction.atomic():
            conversation = Conversation.objects.create(
                public_id=new_id("conv_"), project_id=project_id, metadata=body.metadata or {}
            )
            _append(conversation, body.items or ())
        return Response(_conversation_object(conversation))


class ConversationView(ApiView):
    """``/v1/conversations/{id}``."""

    counts_writes = True

    @documented(answer=objects.Conversation)
    def get(self, request: Request, conversation_id: str) -> Response:
        """Get a conversation."""
        return Response(_conversation_object(_find(request, conversation_id)))

    @documented(body=requests.ConversationUpdate, answer=objects.Conversation)
    def post(self, request: Request, conversation_id: str) -> Response:
        """Replace the metadata of a conversation."""
        metadata = self.parse(requests.ConversationUpdate, request.data).metadata
        with transaction.atomic():
            conversation = _find(request, conversation_id, lock=True)
            conversation.metadata = metadata or {}
            conversation.save(update_fields=["metadata"])
        return Response(_conversation_object(conversation))

    @documented(answer=objects.DeletedConversation)
    def delete(self, request: Request, conversation_id: str) -> Response:
        """Delete a conversation; its responses are not deleted."""
        delete_conversation(_find(request, conversation_id))
        return Response(objects.DeletedConversation(id=conversation_id).model_dump())


class ConversationItemsView(ApiView):
    """``/v1/conversations/{id}/items``."""

    counts_writes = True

    @documented(query=ConversationItemsQuery, answer=ListObject[ListedItem])
    def get(self, request: Request, conversation_id: str) -> Response:
        """List the items of a conversation."""
        return page_of_conversation(request, _find(request, conversation_id))

    @documented(query=IncludeQuery, body=requests.ItemsRequest, answer=ListObject[ListedItem])
    def post(self, request: Request, conversation_id: str) -> Response:
        """Add items to a conversation; return the added items."""
        check_include(request.query_params)
        body = self.parse(requests.ItemsRequest, request.data)
        with transaction.atomic():
            conversation = _find(request, conversation_id, lock=True)
            added = _append(conversation, body.items)
        data = [item.wire() for item in added]
        listed = {"first_id": added[0].id, "last_id": added[-1].id, "has_more": False}
        return Response({"object": "list", "data": data, **listed})


class ConversationItemView(ApiView):
    """``/v1/conversations/{id}/items/{item_id}``."""

    counts_writes = True

    @documented(query=IncludeQuery, answer=ListedItem)
    def get(self, request: Request, conversation_id: str, item_id: str) -> Response:
        """Get an item of a conversation."""
        check_include(request.query_params)
        item = _find_item(_find(request, conversation_id), item_id)
        return Response({"id": item.public_id, **item.data})

    @documented(answer=objects.Conversation)
    def delete(self, request: Request, conversation_id: str, item_id: str) -> Response:
        """Remove an item from the conversation; return the conversation."""
        conversation = _find(request, conversation_id)
        item = _find_item(conversation, item_id)
        # Before it is gone for a reader of the list, and before others wait for the conversation.
        position = item.conversation_position
        keep_position(conversation.project_id, items_path(conversation), item_id, position)
        with transaction.atomic():
            conversation = _find(request, conversation_id, lock=True)
            remove_item(_find_item(conversation, item_id))
        return Response(_conversation_object(conversation))


def _find(request: Request, conversation_id: str, *, lock: bool = False) -> Conversation:
    project_id = caller_of(request).project_id
    return find_conversation(project_id, conversation_id, lock=lock)


def _find_item(conversation: Conversation, item_id: str) -> Item:
    found = Item.objects.filter(conversation=conversation, public_id=item_id).first()
    if found is None:
        raise NotFoundError(f"Item with id '{item_id[:100]}' not found.")
    return found


def _append(conversation: Conversation, given: Sequence[InputItem]) -> list[IdentifiedItem]:
    """Add items to a conversation, whose row is locked or new."""
    items = new_items(conversation.project_id, given, "items")
    for item, place in zip(items, places_of(given), strict=True):
        require_readable(item.data, conversation.project_id, path_of(place, "items"))
    rows = Item.objects.bulk_create(
        Item(public_id=item.id, project_id=conversation.project_id, data=item.data)
        for item in items
    )
    append(conversation, rows)
    conversation.save(update_fields=["next_position"])
    return items


def _conversation_object(conversation: Conversation) -> dict[str, Any]:
    return objects.Conversation(
        id=conversation.public_id,
        created_at=int(conversation.created_at.timestamp()),
        metadata=conversation.metadata,
    ).model_dump()
