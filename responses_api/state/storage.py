"""Keeping responses: when they are accepted, and when they end."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.db import connection

from inference_site.errors.api_errors import InvalidRequestError
from inference_site.gateway.handoff import Wait
from inference_site.generations.kinds import Assembler
from inference_site.generations.models import TERMINAL, Generation
from inference_site.storage.connections import end_if_still
from inference_site.streams.request_documents import ToStore
from responses_api.models import Conversation, Item, ResponseStatus, StoredResponse
from responses_api.output.assembler import ResponseAssembler
from responses_api.state.context import Context, conversation_not_found, previous_not_found
from responses_api.state.items import IdentifiedItem, from_wire
from responses_api.wire.request import ResponseRequest

_NOT_KEPT = {"input", "metadata", "previous_response_id", "conversation"}
_HOLD = """
SELECT 1 FROM responses_api_storedresponse WHERE id = %s AND deleted_at IS NULL FOR KEY SHARE
"""


class ConversationLocked(InvalidRequestError):
    """Another response runs on the conversation, or has changed it meanwhile.

    ``holder_id`` is the one that runs; empty when none does any more.
    """

    def __init__(self, conversation_id: str, holder_id: str) -> None:
        self.conversation_id, self.holder_id = conversation_id, holder_id
        super().__init__(
            "Another process is currently operating on this conversation. Please retry in a few "
            "seconds.",
            param="conversation",
            code="conversation_locked",
        )

    @property
    def wait(self) -> Wait:
        """What a request waits for before it is tried again."""
        at_most_s: float = settings.CONVERSATION_LOCK_WAIT_S
        return Wait(self.holder_id, self.conversation_id, at_most_s)


def accept(
    project_id: int, response: dict[str, Any], body: ResponseRequest, context: Context
) -> None:
    """Write a response and its input. Raise ConversationLocked, and NotFoundError or
    InvalidRequestError when what it builds on was deleted meanwhile.

    Runs in the transaction of the generation's row.
    """
    conversation = context.conversation
    if conversation is not None:
        _lock(conversation, response["id"])
    if context.previous is not None:
        _hold(context.previous)
    stored = StoredResponse.objects.create(
        public_id=response["id"],
        project_id=project_id,
        model=response["model"],
        status=ResponseStatus.QUEUED if body.background else ResponseStatus.IN_PROGRESS,
        background=bool(body.background),
        previous=context.previous,
        conversation=conversation,
        # Holding it makes sure that no item was added since the others were read.
        conversation_position=conversation.next_position if conversation else None,
        metadata=body.metadata or {},
        request=body.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude=_NOT_KEPT),
        created_at=dt.datetime.fromtimestamp(response["created_at"], dt.UTC),
    )
    Item.objects.bulk_create(_rows(stored, context.new, 0, is_output=False))


def _lock(conversation: Conversation, response_id: str) -> None:
    """Hold the conversation while the response's generation has not ended."""
    # The row first, then the questions: each statement sees what was committed before it began, and
    # a statement that waits for a row asks all but that row as it was before the wait.
    rows = Conversation.objects.filter(pk=conversation.pk, deleted_at=None)
    end_if_still()
    found = rows.select_for_update().first()
    if found is None:
        raise conversation_not_found(conversation.public_id, "conversation")
    running = Generation.objects.filter(public_id=found.locked_by).exclude(status__in=TERMINAL)
    is_held = bool(found.locked_by) and running.exists()
    # What another added after its items were read would be missing in this one's context.
    if is_held or found.next_position != conversation.next_position:
        raise ConversationLocked(conversation.public_id, found.locked_by if is_held else "")
    rows.update(locked_by=response_id)


def _hold(previous: StoredResponse) -> None:
    """Keep a response from being deleted before another that builds on it is written."""
    with connection.cursor() as cursor:
        cursor.execute(_HOLD, [previous.pk])
        if cursor.fetchone() is None:
            raise previous_not_found(previous.public_id)


def _rows(
    stored: StoredResponse, items: Sequence[IdentifiedItem], first: int, *, is_output: bool
) -> list[Item]:
    return [
        Item(
            public_id=item.id,
            project_id=stored.project_id,
            response=stored,
            position=first + i,
            is_output=is_output,
            data=item.data,
        )
        for i, item in enumerate(items)
    ]


def store_result(
    generation_id: str, status: str, assembler: Assembler, store: ToStore | None
) -> None:
    """Keep the end of a response, if it is stored (see ``generations.kinds.StoreResult``)."""
    assert isinstance(assembler, ResponseAssembler)
    final = assembler.response
    stored = StoredResponse.objects.filter(public_id=generation_id).first()
    if stored is None:
        return
    output = [from_wire(item.model_dump()) for item in final.output]
    first = stored.items.count()
    Item.objects.bulk_create(_rows(stored, output, first, is_output=True))
    stored.status, stored.error = final.status, assembler.error
    stored.deltas = assembler.deltas
    stored.usage = final.usage.model_dump() if final.usage else None
    if final.completed_at is not None:
        stored.completed_at = dt.datetime.fromtimestamp(final.completed_at, dt.UTC)
    if final.incomplete_details:
        stored.incomplete_reason = final.incomplete_details.reason
    ended = ["status", "usage", "error", "completed_at", "incomplete_reason", "deltas"]
    stored.save(update_fields=ended)
    if stored.conversation_id is not None:
        _release(stored, stored.conversation_id)


def _release(stored: StoredResponse, conversation_pk: int) -> None:
    """Add a response to its conversation, if it came to an end of its own, and unlock that."""
    conversation = Conversation.objects.select_for_update().get(pk=conversation_pk)
    if stored.status in (ResponseStatus.COMPLETED, ResponseStatus.INCOMPLETE):
        append(conversation, list(stored.items.order_by("position")))
    if conversation.locked_by == stored.public_id:
        conversation.locked_by = ""
    conversation.save(update_fields=["locked_by", "next_position"])


def append(conversation: Conversation, items: Sequence[Item]) -> None:
    """Give items their places at the end of a conversation, which the caller holds and saves."""
    for item in items:
        item.conversation = conversation
        item.conversation_position = conversation.next_position
        conversation.next_position += 1
    Item.objects.bulk_update(items, ["conversation", "conversation_position"])
