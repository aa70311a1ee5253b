"""Pages of lists: responses, the input of a response, the items of a conversation."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import orjson
from django.db import connection
from django.http import QueryDict
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.core.storage.postgresql import execute_prepared
from inference_site.gateway.api.authentication import caller_of
from inference_site.gateway.api.paging import (
    Page,
    list_object,
    parse_metadata,
    parse_page,
)
from responses_api.context import decode_item, newest_input_of
from responses_api.models import Conversation, Item, ResponseStatus, StoredResponse
from responses_api.search import SearchTooBroad, contains_words_sql, search_timeout
from responses_api.stored_responses import current_responses, row_of, rows_of
from responses_api.wire.requests import MAX_SEARCH_LENGTH, check_include

Condition = tuple[str, dict[str, Any]]
"""A condition in SQL, and its parameters."""

PATH = "responses"
_IDS = """
SELECT public_id FROM responses_api_storedresponse WHERE {conditions}
ORDER BY created_at {order}, id {order} LIMIT {most}
"""
_LIMITS = (20, 100)
"""Limits of the statement. If the limit was a parameter, PostgreSQL would plan it each time."""
_WAITS = """
EXISTS (SELECT FROM generations_generation run
        WHERE run.public_id = responses_api_storedresponse.public_id AND run.status = 'queued')
"""
_STATUS_CONDITIONS = {
    ResponseStatus.QUEUED: f"status = 'queued' AND {_WAITS}",
    ResponseStatus.IN_PROGRESS: f"(status = 'in_progress' OR status = 'queued' AND NOT {_WAITS})",
}
"""Conditions for the statuses that the row does not show (see ``ResponseStatus``)."""
_EQUALS = {
    "model": "model = %(model)s",
    "previous_response_id": "previous_id = (SELECT id FROM responses_api_storedresponse "
    "WHERE public_id = %(previous_response_id)s)",
    "conversation": "conversation_id = (SELECT id FROM responses_api_conversation "
    "WHERE public_id = %(conversation)s)",
}
_TIMES = {
    "created_after": "created_at > %(created_after)s::timestamptz",
    "created_before": "created_at < %(created_before)s::timestamptz",
}


def list_responses(request: Request) -> Response:
    """Answer ``GET /v1/responses``."""
    query, project_id = request.query_params, caller_of(request).project_id
    page = parse_page(query, "desc")
    ids = ids_on(page, project_id, query)
    rows = {row.public_id: row for row in rows_of(project_id, ids)}
    responses = current_responses([rows[id_] for id_ in ids if id_ in rows])
    entries = [response.model_dump() for response in responses]
    return Response(list_object(entries, page))


def ids_on(page: Page, project_id: int, query: QueryDict) -> list[str]:
    """Return the ids of the responses of a page, and of the one after it."""
    words = query.get("q", "").strip()
    if len(words) > MAX_SEARCH_LENGTH:
        raise InvalidRequestError(
            f"Invalid 'q': too long. Expected at most {MAX_SEARCH_LENGTH} characters.", param="q"
        )
    conditions = [
        ("project_id = %(project)s AND deleted_at IS NULL", {"project": project_id}),
        *_filters(query),
    ]
    if page.after is not None:
        stored = row_of(project_id, page.after)
        last = position(stored) if stored else page.deleted_position("response", project_id, PATH)
        last_at, last_pk = last.split()
        side = ">" if page.order == "asc" else "<"
        beyond = f"(created_at, id) {side} (%(last_at)s::timestamptz, %(last)s)"
        conditions.append((beyond, {"last_at": last_at, "last": int(last_pk)}))
    if not words:
        rows = execute_prepared(*_statement(conditions, page))
        return [id_ for (id_,) in rows][: page.limit + 1]
    try:
        with search_timeout():
            statement = _statement([*conditions, contains_words_sql(words, project_id)], page)
            with connection.cursor() as cursor:
                cursor.execute(*statement)  # Not prepared: it is planned for these words.
                return [id_ for (id_,) in cursor][: page.limit + 1]
    except SearchTooBroad:
        raise InvalidRequestError(
            "Too many responses would have to be searched for 'q'. Please narrow it: with more "
            "words, or with 'created_after', 'created_before' or 'model'.",
            param="q",
            code="search_too_broad",
        ) from None


def position(stored: StoredResponse) -> str:
    """Return where a response is in the lists, for ``keep_position``."""
    return f"{stored.created_at.isoformat()} {stored.pk}"


def _statement(conditions: Sequence[Condition], page: Page) -> tuple[str, dict[str, Any]]:
    """Return the statement for the ids of a page, and its parameters."""
    parameters: dict[str, Any] = {}
    for _, named in conditions:
        parameters |= named
    statement = _IDS.format(
        conditions=" AND ".join(condition for condition, _ in conditions),
        order="ASC" if page.order == "asc" else "DESC",
        most=1 + min(limit for limit in _LIMITS if limit >= page.limit),
    )
    return statement, parameters


def _filters(query: QueryDict) -> Iterator[Condition]:
    for name, condition in _EQUALS.items():
        if value := query.get(name):
            yield condition, {name: value}
    if status := query.get("status"):
        if status not in ResponseStatus.values:
            raise InvalidRequestError(
                f"Invalid value: {status[:100]!r}. Supported values are: "
                f"{', '.join(map(repr, ResponseStatus.values))}.",
                param="status",
                code="invalid_value",
            )
        special = _STATUS_CONDITIONS.get(ResponseStatus(status))
        yield (special, {}) if special else ("status = %(status)s", {"status": status})
    if metadata := parse_metadata(query):
        yield "metadata @> %(metadata)s::jsonb", {"metadata": orjson.dumps(metadata).decode()}
    for name, condition in _TIMES.items():
        if seconds := query.get(name):
            if not seconds.isdecimal() or len(seconds) > 11:
                raise InvalidRequestError(f"Invalid '{name}': expected Unix seconds.", param=name)
            yield condition, {name: dt.datetime.fromtimestamp(int(seconds), dt.UTC)}


def page_of_input(request: Request, stored: StoredResponse) -> Response:
    """Answer ``GET /v1/responses/{id}/input_items``."""
    query = request.query_params
    check_include(query)
    page = parse_page(query, "desc", has_before=True)
    is_first_page = page.order == "desc" and page.after is None
    items = newest_input_of(stored, page.limit + 1 if is_first_page else None)
    if page.order == "asc":
        items.reverse()
    shown = page.entries_of(items, itemgetter(0), "item")
    entries = [decode_item(item).wire() for item in shown]
    return Response(list_object(entries, page))


def items_path(conversation: Conversation) -> str:
    """Return the path of a conversation's items, for ``keep_position``."""
    return f"conversations/{conversation.public_id}/items"


def page_of_conversation(request: Request, conversation: Conversation) -> Response:
    """Answer ``GET /v1/conversations/{id}/items``."""
    check_include(request.query_params)
    rows = Item.objects.filter(conversation=conversation)
    page = parse_page(request.query_params, "desc")
    owner, key = (conversation.project_id, items_path(conversation)), "conversation_position"
    shown = page.rows_of(rows, key, page.position(rows, "item", *owner, key=key))
    entries = [{"id": row.public_id, **row.data} for row in shown]
    return Response(list_object(entries, page))
