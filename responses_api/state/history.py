"""What a response builds on: the items before it, found by following ``previous``."""

from __future__ import annotations

import orjson

from inference_site.storage.prepared import execute_prepared
from responses_api.models import Conversation, Item, StoredResponse
from responses_api.state.items import IdentifiedItem

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


def history_of(response: StoredResponse) -> list[IdentifiedItem]:
    """Return the items of a response and of all before it, oldest first."""
    return [decoded(item) for item in reversed(_read(response, with_output=True))]


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


def items_of(conversation: Conversation) -> list[IdentifiedItem]:
    """Return the items of a conversation, oldest first."""
    rows = Item.objects.filter(conversation=conversation).order_by("conversation_position")
    return [IdentifiedItem(item.public_id, item.data) for item in rows]


def items_before(response: StoredResponse) -> list[IdentifiedItem]:
    """Return the items of its conversation that a response was given, oldest first."""
    if response.conversation_id is None:
        return []
    rows = Item.objects.filter(
        conversation=response.conversation_id,
        conversation_position__lt=response.conversation_position,
    ).order_by("conversation_position")
    return [IdentifiedItem(item.public_id, item.data) for item in rows]
