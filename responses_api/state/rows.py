"""Stored responses and their output, read by statements that PostgreSQL plans once.

To make and to plan what Django says instead takes several times as long as to run it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import orjson
from django.db import DEFAULT_DB_ALIAS
from django.db.models import JSONField

from inference_site.storage.postgresql import execute_prepared
from responses_api.models import Conversation, StoredResponse

_OUTPUT = """
SELECT response_id, public_id, data FROM responses_api_item
WHERE response_id = ANY((SELECT %(responses)s)::bigint[]) AND is_output
ORDER BY response_id, position
"""
# How short an array is that is selected, the planner does not see: else it would plan the statement
# each time, for one of that length.


def row_of(project_id: int, public_id: str) -> StoredResponse | None:
    """Return the response of a project with this id; None if there is none."""
    return next(iter(rows_of(project_id, [public_id])), None)


def rows_of(project_id: int, public_ids: Sequence[str]) -> list[StoredResponse]:
    """Return the responses of a project with these ids, in any order; deleted ones are left out.

    Of the response or conversation that one builds on only the ids are read.
    """
    given = {"project": project_id, "ids": list(public_ids)}
    return [_response(row) for row in execute_prepared(_reading(), given)]


def output_of(responses: Sequence[StoredResponse]) -> dict[int, list[dict[str, Any]]]:
    """Return the output items of responses, as the API shows them, by the response's key."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    keys = {"responses": [response.pk for response in responses]}
    for key, public_id, data in execute_prepared(_OUTPUT, keys):
        found[key].append({"id": public_id, **orjson.loads(data)})
    return found


@cache
def _reading() -> str:
    """Return the statement of ``rows_of``: all fields, then the ids of what each builds on."""
    columns = (f"response.{field.column}" for field in StoredResponse._meta.concrete_fields)
    return f"""
        SELECT {", ".join(columns)}, previous.public_id, conversation.public_id
        FROM responses_api_storedresponse response
        LEFT JOIN responses_api_storedresponse previous ON previous.id = response.previous_id
        LEFT JOIN responses_api_conversation conversation
             ON conversation.id = response.conversation_id
        WHERE response.public_id = ANY((SELECT %(ids)s)::text[])
              AND response.project_id = %(project)s AND response.deleted_at IS NULL
    """  # noqa: S608  # Names of fields.


def _response(row: Sequence[Any]) -> StoredResponse:
    *read, previous_id, conversation_id = row
    fields = StoredResponse._meta.concrete_fields
    response = StoredResponse.from_db(
        DEFAULT_DB_ALIAS,
        [field.attname for field in fields],
        [
            orjson.loads(value) if isinstance(field, JSONField) and value is not None else value
            for field, value in zip(fields, read, strict=True)
        ],
    )
    known = ("id", "public_id")  # Of another row; to ask for more of it asks the database.
    if previous_id is not None:
        its = (response.previous_id, previous_id)
        response.previous = StoredResponse.from_db(DEFAULT_DB_ALIAS, known, its)
    if conversation_id is not None:
        its = (response.conversation_id, conversation_id)
        response.conversation = Conversation.from_db(DEFAULT_DB_ALIAS, known, its)
    return response
