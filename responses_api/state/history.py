"""What a response builds on: the items before it, found by following ``previous``."""

from __future__ import annotations

import orjson
from django.db import connection

from responses_api.models import Conversation, Item, StoredResponse
from responses_api.state.items import IdentifiedItem

_CHAIN = """
WITH RECURSIVE chain (id, previous_id, conversation_id, conversation_position, depth) AS (
    SELECT id, previous_id, conversation_id, conversation_position, 0
    FROM responses_api_storedresponse WHERE id = %(response)s
  UNION ALL
    SELECT parent.id, parent.previous_id, parent.conversation_id, parent.conversation_position,
           chain.depth + 1
    FROM responses_api_storedresponse parent JOIN chain ON parent.id = chain.previous_id
), context AS (
    SELECT item.public_id, item.data, 1 AS part, -chain.depth AS turn, item.position AS place
    FROM chain JOIN responses_api_item item ON item.response_id = chain.id
  UNION ALL
    SELECT item.public_id, item.data, 0, 0, item.conversation_position
    FROM chain JOIN responses_api_item item ON item.conversation_id = chain.conversation_id
         AND item.conversation_position < chain.conversation_position
)
SELECT public_id, data::text FROM context ORDER BY part, turn, place
"""


def history_of(response: StoredResponse) -> list[IdentifiedItem]:
    """Return the items of a response and of all before it, oldest first."""
    with connection.cursor() as cursor:
        cursor.execute(_CHAIN, {"response": response.pk})
        return [IdentifiedItem(public_id, orjson.loads(data)) for public_id, data in cursor]


def before(response: StoredResponse) -> list[IdentifiedItem]:
    """Return the items that a response was given, its own input among them, oldest first."""
    made = {item.public_id for item in response.items.filter(is_output=True)}
    return [item for item in history_of(response) if item.id not in made]


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
