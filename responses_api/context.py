"""The context of a request: the stored items that it builds on, and the items of its input.

A history is found by following ``previous``, and may have any number of items. It is read from its
newest item on, and only as far as the context of the model can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeVar

import orjson
from django.db.models import QuerySet, TextField
from django.db.models.functions import Cast

from inference_site.core.errors.api_errors import InvalidRequestError, NotFoundError
from inference_site.core.storage.postgresql import end_transaction_if_idle, execute_prepared
from inference_site.gateway.api.payload import places_of
from inference_site.gateway.submission.context_bound import ContextBound
from responses_api.items import (
    IdentifiedItem,
    ItemData,
    holds_context,
    is_instruction,
    new_items,
    size_of,
)
from responses_api.mcp_approvals import answers_in
from responses_api.models import ENDED, Conversation, Item, StoredResponse
from responses_api.prompt_items import CALLS, RESULTS
from responses_api.stored_responses import row_of
from responses_api.wire.input_items import InputItem, path_of
from responses_api.wire.requests import CompactRequest, ContextFields

T = TypeVar("T")
UnstoredHistories = Mapping[str, Sequence[IdentifiedItem]]
"""Histories of responses that only a WebSocket connection holds, by response id."""
EncodedItem = tuple[str, str]
"""The id of an item, and its data as JSON."""

# The limits make PostgreSQL use an index at each step, whatever its statistics of the tables say.
_NEWEST_FIRST = """
WITH RECURSIVE chain (id, previous_id, conversation_id, conversation_position, depth, seen) AS (
    SELECT id, previous_id, conversation_id, conversation_position, 0, 0::bigint
    FROM responses_api_storedresponse WHERE id = %(response)s
  UNION ALL
    SELECT parent.id, parent.previous_id, parent.conversation_id, parent.conversation_position,
           chain.depth + 1,
           CASE WHEN %(most)s::bigint IS NOT NULL THEN chain.seen + (
               SELECT count(*) FROM responses_api_item item WHERE item.response_id = parent.id
           ) END
    FROM chain CROSS JOIN LATERAL (
        SELECT * FROM responses_api_storedresponse WHERE id = chain.previous_id LIMIT 1
    ) parent
    WHERE %(most)s::bigint IS NULL OR chain.seen < %(most)s
), context AS (
    SELECT item.public_id, item.data, 1 AS part, -chain.depth AS turn, item.position AS place
    FROM chain CROSS JOIN LATERAL (
        SELECT * FROM responses_api_item item
        WHERE item.response_id = chain.id
              AND (%(with_output)s OR chain.depth > 0 OR NOT item.is_output)
        ORDER BY item.position DESC LIMIT %(most)s
    ) item
  UNION ALL
    SELECT item.public_id, item.data, 0, 0, item.conversation_position
    FROM chain CROSS JOIN LATERAL (
        SELECT * FROM responses_api_item item
        WHERE item.conversation_id = chain.conversation_id
              AND item.conversation_position < chain.conversation_position
        ORDER BY item.conversation_position DESC LIMIT %(most)s
    ) item
)
SELECT public_id, data FROM context ORDER BY part DESC, turn DESC, place DESC LIMIT %(most)s
"""
_ROOT = """
WITH RECURSIVE chain (id, previous_id, conversation_id) AS (
    SELECT id, previous_id, conversation_id
    FROM responses_api_storedresponse WHERE id = %(response)s
  UNION ALL
    SELECT parent.id, parent.previous_id, parent.conversation_id
    FROM chain CROSS JOIN LATERAL (
        SELECT * FROM responses_api_storedresponse WHERE id = chain.previous_id LIMIT 1
    ) parent
)
SELECT id, conversation_id FROM chain WHERE previous_id IS NULL
"""
_READ_STEPS = (64, 1024, 16_384)
"""How many of the newest items are read, step by step, until these are all or too many."""
_MAX_INSTRUCTIONS = 20
"""The most instructions that are kept at the beginning of a truncated history."""


@dataclass(frozen=True, slots=True)
class ContextItem:
    """An item of a context, and the request field that errors about it name."""

    data: ItemData
    param: str


@dataclass(frozen=True, slots=True)
class Context:
    """The stored items before a request (``before``), oldest first, and its own items (``new``).

    ``places`` are the positions that its own items had in what the client sent, where they differ.
    """

    new: list[IdentifiedItem]
    before: list[IdentifiedItem] = field(default_factory=list)
    previous: StoredResponse | None = None
    conversation: Conversation | None = None
    previous_response_id: str | None = None
    places: Sequence[int | None] = ()

    @property
    def is_unstored(self) -> bool:
        """Whether the previous response is not stored: a WebSocket connection holds its items."""
        return self.previous_response_id is not None and self.previous is None

    @property
    def continues(self) -> str:
        """The id of the response before; its worker may still have this prompt in its cache."""
        if self.conversation is None:
            return self.previous_response_id or ""
        return _newest_id(self.conversation.responses.all())

    @property
    def approvals(self) -> list[ItemData]:
        """The answers to approval requests that came with the request."""
        new = [item.data for item in self.new]
        return answers_in(new, [*(item.data for item in self.before), *new])

    def items(self) -> list[ContextItem]:
        """Return the items that the prompt is made of, oldest first.

        They begin with the newest compaction that holds the whole context before it; instructions
        at the beginning of the items stay before it.
        """
        field_ = "conversation" if self.conversation else "previous_response_id"
        items = [ContextItem(item.data, field_) for item in self.before]
        places = self.places or range(len(self.new))
        items += [
            ContextItem(item.data, path_of(place))
            for item, place in zip(self.new, places, strict=True)
        ]
        newest = max((i for i, item in enumerate(items) if holds_context(item.data)), default=0)
        first = takewhile(lambda item: is_instruction(item.data), items[:newest])
        return [*first, *items[newest:]]


def continued_response_id(project_id: int, body: ContextFields | CompactRequest) -> str:
    """Return ``Context.continues`` for a request whose context was not read yet."""
    if isinstance(body, ContextFields) and (conversation := body.conversation_id):
        found = StoredResponse.objects.filter(conversation__project_id=project_id)
        return _newest_id(found.filter(conversation__public_id=conversation))
    return body.previous_response_id or ""


def _newest_id(responses: QuerySet[StoredResponse]) -> str:
    return responses.order_by("-id").values_list("public_id", flat=True).first() or ""


@dataclass(frozen=True, slots=True)
class HistoryLimit:
    """How much of a history is read: no more than the context of the model can hold.

    A longer history is an error. With ``may_truncate`` its newest items are read instead, and the
    instructions at its beginning. A history begins with its newest compaction that holds the
    context before it.
    """

    bound: ContextBound
    may_truncate: bool = False

    def read(
        self,
        read_newest: Callable[[int], Sequence[T]],
        read_oldest: Callable[[int], Sequence[T]],
        decode: Callable[[T], IdentifiedItem],
    ) -> list[IdentifiedItem]:
        """Return the items that fit, oldest first.

        ``read_newest(n)`` returns the n newest items, newest first; ``read_oldest(n)`` the n
        oldest, oldest first; ``decode`` converts one of these. Raise ContextLengthExceeded if the
        history is too long and may not be truncated.
        """
        most, is_whole, size = self.bound.items, False, 0
        newest: list[IdentifiedItem] = []
        for step in (*(step for step in _READ_STEPS if step < most), most):
            found = read_newest(step + 1)
            newest += map(decode, found[len(newest) : step])
            is_whole = len(found) <= step
            compacted = (i for i, item in enumerate(newest) if holds_context(item.data))
            if (start := next(compacted, None)) is not None:
                newest, is_whole = newest[: start + 1], True
            size = sum(size_of(item.data) for item in newest)
            if is_whole or size > self.bound.size:
                break
        if is_whole and (self.may_truncate or size <= self.bound.size):
            return newest[::-1]  # The prompt is truncated when it is rendered.
        if not self.may_truncate:
            raise self.bound.exceeded(size, len(newest) + (not is_whole), "input")
        oldest = map(decode, read_oldest(_MAX_INSTRUCTIONS))
        instructions = takewhile(lambda item: is_instruction(item.data), oldest)
        return [*instructions, *_from_first_user_message(newest[::-1])]


def _from_first_user_message(items: list[IdentifiedItem]) -> list[IdentifiedItem]:
    """Return the items from the first user message on.

    Without a user message, return all items but outputs of calls that are missing: those would be
    an error.
    """
    for position, item in enumerate(items):
        if item.data.get("role") == "user":
            return items[position:]
    calls = {item.data.get("call_id") for item in items if item.data["type"] in CALLS}
    return [i for i in items if i.data["type"] not in RESULTS or i.data.get("call_id") in calls]


def resolve(
    project_id: int,
    given: Sequence[InputItem] | None,
    previous_response_id: str | None,
    conversation_id: str | None,
    limit: HistoryLimit,
    unstored: UnstoredHistories | None = None,
) -> Context:
    """Read the context of a request.

    Raise InvalidRequestError or NotFoundError for missing objects, ContextLengthExceeded if the
    history or the input is too long.
    """
    if previous_response_id is not None and conversation_id is not None:
        raise InvalidRequestError(
            "Mutually exclusive parameters: 'previous_response_id' and 'conversation'.",
            param="previous_response_id",
            code="mutually_exclusive_parameters",
        )
    if len(given or ()) > limit.bound.items and not limit.may_truncate:
        raise limit.bound.exceeded(0, len(given or ()), "input")
    new, places = new_items(project_id, given or ()), places_of(given or ())
    if not new and previous_response_id is None and conversation_id is None:
        raise InvalidRequestError(
            "Missing required parameter: 'input'.", param="input", code="missing_required_parameter"
        )
    if conversation_id is not None:
        conversation = find_conversation(project_id, conversation_id, "conversation")
        before = conversation_items(conversation, limit)
        return Context(new, before, conversation=conversation, places=places)
    if previous_response_id is None:
        return Context(new, places=places)
    if unstored is not None and previous_response_id in unstored:
        items = unstored[previous_response_id]
        before = limit.read(lambda n: items[: -n - 1 : -1], lambda n: items[:n], lambda item: item)
        return Context(new, before, previous_response_id=previous_response_id, places=places)
    previous = _find_previous(project_id, previous_response_id)
    before = history_of(previous, limit)
    return Context(new, before, previous, previous_response_id=previous_response_id, places=places)


def find_conversation(
    project_id: int, public_id: str, param: str | None = None, *, lock: bool = False
) -> Conversation:
    """Return a conversation of the project. ``lock`` locks its row.

    Raise NotFoundError, or InvalidRequestError if the id has another prefix.
    """
    if not public_id.startswith("conv_"):
        raise InvalidRequestError(
            f"Invalid '{param or 'conversation_id'}': {public_id[:100]!r}. Expected an ID that "
            "begins with 'conv'.",
            param=param or "conversation_id",
            code="invalid_value",
        )
    if lock:
        end_transaction_if_idle()
    rows = Conversation.objects.select_for_update() if lock else Conversation.objects
    found = rows.filter(project_id=project_id, public_id=public_id, deleted_at=None).first()
    if found is None:
        raise conversation_not_found(public_id, param)
    return found


def conversation_not_found(public_id: str, param: str | None = None) -> NotFoundError:
    """Return the error for a conversation that does not exist or was deleted."""
    return NotFoundError(f"Conversation with id '{public_id[:100]}' not found.", param=param)


def previous_not_found(public_id: str) -> InvalidRequestError:
    """Return the error for a previous response that does not exist or was deleted."""
    return InvalidRequestError(
        f"Previous response with id '{public_id[:100]}' not found.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def _find_previous(project_id: int, public_id: str) -> StoredResponse:
    if not public_id.startswith("resp_"):
        raise InvalidRequestError(
            f"Invalid 'previous_response_id': {public_id[:100]!r}. Expected an ID that begins with "
            "'resp'.",
            param="previous_response_id",
            code="invalid_value",
        )
    found = row_of(project_id, public_id)
    if found is None:
        raise previous_not_found(public_id)
    if found.status not in ENDED:
        raise InvalidRequestError(
            f"Previous response with id '{public_id[:100]}' has not ended yet.",
            param="previous_response_id",
            code="previous_response_in_progress",
        )
    return found


def history_of(response: StoredResponse, limit: HistoryLimit) -> list[IdentifiedItem]:
    """Return the items of a response and of all responses before it, oldest first.

    Raise ContextLengthExceeded.
    """

    def read_oldest(most: int) -> Sequence[EncodedItem]:
        root, conversation = execute_prepared(_ROOT, {"response": response.pk}).fetchone() or (0, 0)
        if conversation:
            rows, position = Item.objects.filter(conversation=conversation), "conversation_position"
        else:
            rows, position = Item.objects.filter(response=root), "position"
        return _encoded(rows, position, most)

    def read_newest(most: int) -> Sequence[EncodedItem]:
        return _read_chain(response, with_output=True, most=most)

    return limit.read(read_newest, read_oldest, decode_item)


def input_of(response: StoredResponse) -> list[IdentifiedItem]:
    """Return all items that a response was given, its history and its input, oldest first."""
    return [decode_item(item) for item in reversed(newest_input_of(response))]


def newest_input_of(response: StoredResponse, most: int | None = None) -> list[EncodedItem]:
    """Return the items of ``input_of``, newest first; at most ``most`` of them are read."""
    return _read_chain(response, with_output=False, most=most)


def decode_item(item: EncodedItem) -> IdentifiedItem:
    """Return an item with its data decoded."""
    public_id, data = item
    return IdentifiedItem(public_id, orjson.loads(data))


def _read_chain(
    response: StoredResponse, *, with_output: bool, most: int | None = None
) -> list[EncodedItem]:
    parameters = {"response": response.pk, "with_output": with_output, "most": most}
    return execute_prepared(_NEWEST_FIRST, parameters).fetchall()


def conversation_items(conversation: Conversation, limit: HistoryLimit) -> list[IdentifiedItem]:
    """Return the items of a conversation, oldest first. Raise ContextLengthExceeded."""
    return _read_conversation(Item.objects.filter(conversation=conversation), limit)


def conversation_items_before(
    response: StoredResponse, limit: HistoryLimit
) -> list[IdentifiedItem]:
    """Return the items that the conversation of a response had when it was accepted, oldest first.

    Raise ContextLengthExceeded.
    """
    if response.conversation_id is None:
        return []
    rows = Item.objects.filter(
        conversation=response.conversation_id,
        conversation_position__lt=response.conversation_position,
    )
    return _read_conversation(rows, limit)


def _read_conversation(rows: QuerySet[Item], limit: HistoryLimit) -> list[IdentifiedItem]:
    return limit.read(
        lambda most: _encoded(rows, "-conversation_position", most),
        lambda most: _encoded(rows, "conversation_position", most),
        decode_item,
    )


def _encoded(rows: QuerySet[Item], order: str, most: int) -> Sequence[EncodedItem]:
    as_text = Cast("data", TextField())
    return list(rows.order_by(order).values_list("public_id", as_text)[:most])
