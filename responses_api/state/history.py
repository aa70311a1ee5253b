"""What a response builds on: the items before it, found by following ``previous``.

A history may have any number of items, and a request is answered from those that its model can
read. So it is read from its newest item on, and no further than the model's context can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

import orjson
from django.db.models import QuerySet, TextField
from django.db.models.functions import Cast

from inference_site.storage.postgresql import execute_prepared
from inference_site.submission.context_bound import ContextBound
from responses_api.models import Conversation, Item, StoredResponse
from responses_api.state.items import IdentifiedItem, is_instruction, size_of

T = TypeVar("T")

_IN_CONVERSATION = "conversation_position"
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
# The limits have each step look into an index, however little PostgreSQL knows of the tables.


EncodedItem = tuple[str, str]
"""The id of an item, and its data as JSON."""


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
_STEPS = (64, 1024, 16_384)
"""How many of the newest items are read at once, until they are all or too many for the model."""
_MOST_INSTRUCTIONS = 20
"""At the beginning of a history that is cut."""


@dataclass(frozen=True, slots=True)
class Room:
    """How much of a history is read for a request: what its model can hold.

    If it ``may_cut``, the newest items are read of a longer one, and the instructions at its
    beginning; otherwise a longer one is an error.
    """

    bound: ContextBound
    may_cut: bool = False

    def fill(
        self,
        read: Callable[[int], Sequence[T]],
        read_oldest: Callable[[int], Sequence[T]],
        decode: Callable[[T], IdentifiedItem],
    ) -> list[IdentifiedItem]:
        """Return the items that fit, oldest first.

        ``read(n)`` returns the n newest items, newest first; ``read_oldest(n)`` the n oldest,
        oldest first; ``decode`` makes an item of what these return. Raise ContextLengthExceeded if
        not all of them fit and none may be left out.
        """
        most, is_whole, size = self.bound.items, False, 0
        newest: list[IdentifiedItem] = []
        for step in (*(step for step in _STEPS if step < most), most):
            found = read(step + 1)
            newest += map(decode, found[len(newest) : step])
            is_whole = len(found) <= step
            size = sum(size_of(item.data) for item in newest)
            if is_whole or size > self.bound.size:
                break
        if is_whole and (self.may_cut or size <= self.bound.size):
            return newest[::-1]  # What is too much of it is left out when it is a prompt.
        if not self.may_cut:
            raise self.bound.exceeded(size, len(newest) + (not is_whole), "input")
        oldest = map(decode, read_oldest(_MOST_INSTRUCTIONS))
        instructions = takewhile(lambda item: is_instruction(item.data), oldest)
        return [*instructions, *_from_a_turn(newest[::-1])]


def _from_a_turn(items: list[IdentifiedItem]) -> list[IdentifiedItem]:
    """Return the items from the first message of the user on; without it, those that can stand.

    The result of a call that is not among them would be an error.
    """
    for position, item in enumerate(items):
        if item.data.get("role") == "user":
            return items[position:]
    calls = {item.data["call_id"] for item in items if item.data["type"].endswith("_call")}
    results = "_call_output"
    return [i for i in items if not i.data["type"].endswith(results) or i.data["call_id"] in calls]


def history_of(response: StoredResponse, room: Room) -> list[IdentifiedItem]:
    """Return the items of a response and of all before it, oldest first.

    Raise ContextLengthExceeded if there is no room for them.
    """

    def read_oldest(most: int) -> Sequence[EncodedItem]:
        root, conversation = execute_prepared(_ROOT, {"response": response.pk}).fetchone() or (0, 0)
        if conversation:
            return _encoded(Item.objects.filter(conversation=conversation), _IN_CONVERSATION, most)
        return _encoded(Item.objects.filter(response=root), "position", most)

    return room.fill(
        lambda most: _read(response, with_output=True, most=most), read_oldest, decoded
    )


def before(response: StoredResponse) -> list[IdentifiedItem]:
    """Return the items that a response was given, its own input among them, oldest first."""
    return [decoded(item) for item in reversed(newest_before(response))]


def newest_before(response: StoredResponse, most: int | None = None) -> list[EncodedItem]:
    """Return the same, newest first; with ``most`` no more of a long history is read than that."""
    return _read(response, with_output=False, most=most)


def decoded(item: EncodedItem) -> IdentifiedItem:
    """Return an item with its data."""
    public_id, data = item
    return IdentifiedItem(public_id, orjson.loads(data))


def _read(
    response: StoredResponse, *, with_output: bool, most: int | None = None
) -> list[EncodedItem]:
    given = {"response": response.pk, "with_output": with_output, "most": most}
    return execute_prepared(_NEWEST_FIRST, given).fetchall()


def items_of(conversation: Conversation, room: Room) -> list[IdentifiedItem]:
    """Return the items of a conversation, oldest first.

    Raise ContextLengthExceeded if there is no room for them.
    """
    return _fill(Item.objects.filter(conversation=conversation), room)


def items_before(response: StoredResponse, room: Room) -> list[IdentifiedItem]:
    """Return the items of its conversation that a response was given; otherwise like
    ``items_of``."""
    if response.conversation_id is None:
        return []
    rows = Item.objects.filter(
        conversation=response.conversation_id,
        conversation_position__lt=response.conversation_position,
    )
    return _fill(rows, room)


def _fill(rows: QuerySet[Item], room: Room) -> list[IdentifiedItem]:
    return room.fill(
        lambda most: _encoded(rows, f"-{_IN_CONVERSATION}", most),
        lambda most: _encoded(rows, _IN_CONVERSATION, most),
        decoded,
    )


def _encoded(rows: QuerySet[Item], order: str, most: int) -> Sequence[EncodedItem]:
    as_text = Cast("data", TextField())
    return list(rows.order_by(order).values_list("public_id", as_text)[:most])
