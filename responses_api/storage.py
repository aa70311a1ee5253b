"""Writes responses to the database, when they are accepted and when they end."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import orjson
from django.conf import settings

from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.core.storage.fields import replace_nul
from inference_site.core.storage.postgresql import end_transaction_if_idle, execute_prepared
from inference_site.gateway.handoff import Wait
from inference_site.outbox.models import publish
from inference_site.runs.kinds import Assembler
from inference_site.runs.models import TERMINAL, Generation
from inference_site.runs.streams.request_documents import ToStore
from responses_api.assembler import ResponseAssembler
from responses_api.context import Context, conversation_not_found, previous_not_found
from responses_api.items import IdentifiedItem, from_wire
from responses_api.mcp_approvals import publish_questions, questions_in, record_questions
from responses_api.models import Conversation, Item, ResponseStatus
from responses_api.wire.requests import ResponseRequest

_NOT_IN_REQUEST = {"input", "metadata", "previous_response_id", "conversation"}
"""Fields that the column ``request`` does not hold, because items and other columns do."""
_ACCEPT = """
WITH previous AS (  -- Held, so that it is not deleted before this response is written.
    SELECT id FROM responses_api_storedresponse
    WHERE id = %(previous)s AND deleted_at IS NULL FOR KEY SHARE
), kept AS (
    INSERT INTO responses_api_storedresponse (
        public_id, project_id, model, status, background, previous_id, conversation_id,
        conversation_position, metadata, request, incomplete_reason, created_at
    )
    SELECT %(public_id)s, %(project)s, %(model)s, %(status)s, %(background)s, %(previous)s::bigint,
           %(conversation)s::bigint, %(position)s::integer, %(metadata)s::jsonb,
           %(request)s::jsonb, '', %(created_at)s
    WHERE %(previous)s IS NULL OR EXISTS (SELECT FROM previous)
    RETURNING id, project_id
), given AS (
    INSERT INTO responses_api_item (public_id, project_id, response_id, position, is_output, data)
    SELECT item.public_id, kept.project_id, kept.id, item.place - 1, false, item.data::jsonb
    FROM kept,
         unnest(%(ids)b::text[], %(data)b::text[]) WITH ORDINALITY item (public_id, data, place)
)
SELECT id FROM kept
"""
_END = """
WITH ended AS (
    UPDATE responses_api_storedresponse
    SET status = %(status)s, usage = %(usage)s::jsonb, error = %(error)s::jsonb,
        deltas = %(deltas)s::jsonb, moderation = %(moderation)s::jsonb,
        incomplete_reason = %(reason)s, completed_at = %(completed_at)s
    WHERE public_id = %(public_id)s
    RETURNING id, project_id, conversation_id
), output AS (
    INSERT INTO responses_api_item (public_id, project_id, response_id, position, is_output, data)
    SELECT item.public_id, ended.project_id, ended.id, item.place - 1 + (
               SELECT count(*) FROM responses_api_item given WHERE given.response_id = ended.id
           ), true, item.data::jsonb
    FROM ended,
         unnest(%(ids)b::text[], %(data)b::text[]) WITH ORDINALITY item (public_id, data, place)
)
SELECT id, conversation_id, project_id FROM ended
"""


class ConversationLocked(InvalidRequestError):
    """Another response runs on the conversation, or has added items to it meanwhile.

    ``holder_id`` is the id of the running response, or empty.
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
        """What the request waits for before it is tried again."""
        at_most_s: float = settings.CONVERSATION_LOCK_WAIT_S
        return Wait(self.holder_id, self.conversation_id, at_most_s)


def accept(
    project_id: int, response: dict[str, Any], body: ResponseRequest, context: Context
) -> None:
    """Write a response and its input, in the transaction that writes the generation's row.

    Raise ConversationLocked; NotFoundError or InvalidRequestError if the conversation or the
    previous response was deleted meanwhile.
    """
    conversation, previous = context.conversation, context.previous
    if conversation is not None:
        _lock(conversation, response["id"])
    parameters = {
        "public_id": response["id"],
        "project": project_id,
        "model": response["model"],
        "status": ResponseStatus.QUEUED if body.background else ResponseStatus.IN_PROGRESS,
        "background": bool(body.background),
        "previous": previous and previous.pk,
        "conversation": conversation and conversation.pk,
        # The lock ensures that no item was added since the items of the context were read.
        "position": conversation and conversation.next_position,
        "metadata": _json(body.metadata or {}),
        "request": _json(
            body.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude=_NOT_IN_REQUEST)
        ),
        "created_at": dt.datetime.fromtimestamp(response["created_at"], dt.UTC),
        **_item_parameters(context.new),
    }
    if execute_prepared(_ACCEPT, parameters).fetchone() is None:
        assert previous is not None
        raise previous_not_found(previous.public_id)


def _lock(conversation: Conversation, response_id: str) -> None:
    """Lock the conversation until the generation of the response has ended."""
    # Two statements, because each sees what was committed before it began. One statement that waits
    # for the row would read the generations as they were before the wait.
    rows = Conversation.objects.filter(pk=conversation.pk, deleted_at=None)
    end_transaction_if_idle()
    found = rows.select_for_update().first()
    if found is None:
        raise conversation_not_found(conversation.public_id, "conversation")
    running = Generation.objects.filter(public_id=found.locked_by).exclude(status__in=TERMINAL)
    is_held = bool(found.locked_by) and running.exists()
    # The context of this response lacks items that were added after it was read.
    if is_held or found.next_position != conversation.next_position:
        raise ConversationLocked(conversation.public_id, found.locked_by if is_held else "")
    rows.update(locked_by=response_id)


def store_result(
    generation_id: str, status: str, assembler: Assembler, store: ToStore | None
) -> None:
    """Write the end of a response, if it is stored.

    See ``inference_site.runs.kinds.StoreResult``.
    """
    assert isinstance(assembler, ResponseAssembler)
    final, completed_at = assembler.response, None
    if final.completed_at is not None:
        completed_at = dt.datetime.fromtimestamp(final.completed_at, dt.UTC)
    parameters = {
        "public_id": generation_id,
        "status": final.status,
        "usage": final.usage and _json(final.usage.model_dump()),
        "error": assembler.error and _json(assembler.error),
        "deltas": assembler.deltas and _json(assembler.deltas),
        "moderation": final.moderation and _json(final.moderation.model_dump()),
        "reason": final.incomplete_details.reason if final.incomplete_details else "",
        "completed_at": completed_at,
        **_item_parameters([from_wire(item.model_dump()) for item in final.output]),
    }
    questions = questions_in(final.output)
    for pk, conversation_pk, project_id in list(execute_prepared(_END, parameters)):
        if final.background:
            publish(project_id, f"response.{final.status}", generation_id, {"id": generation_id})
        if questions:
            record_questions(questions)
            publish_questions(
                questions,
                project_id=project_id,
                response_pk=pk,
                response_id=generation_id,
                tools=final.tools,
            )
        if conversation_pk is None:
            continue
        conversation = Conversation.objects.select_for_update().get(pk=conversation_pk)
        # A response that failed or was cancelled adds nothing to its conversation.
        if final.status in (ResponseStatus.COMPLETED, ResponseStatus.INCOMPLETE):
            append(conversation, list(Item.objects.filter(response=pk).order_by("position")))
        if conversation.locked_by == generation_id:
            conversation.locked_by = ""
        conversation.save(update_fields=["locked_by", "next_position"])


def append(conversation: Conversation, items: Sequence[Item]) -> None:
    """Add items to a conversation. The caller has locked its row, and saves it."""
    for item in items:
        item.conversation = conversation
        item.conversation_position = conversation.next_position
        conversation.next_position += 1
    Item.objects.bulk_update(items, ["conversation", "conversation_position"])


def _item_parameters(items: Sequence[IdentifiedItem]) -> dict[str, list[str]]:
    return {"ids": [item.id for item in items], "data": [_json(item.data) for item in items]}


def _json(content: Any) -> str:
    return orjson.dumps(replace_nul(content)).decode()
