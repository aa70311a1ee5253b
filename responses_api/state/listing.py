"""Lists of responses and of items, by keyset."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from django.db import connection
from django.db.models import QuerySet
from django.http import QueryDict
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.api.authentication import caller_of
from inference_site.api.paging import Page, list_object, parse_metadata, parse_page
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.storage.postgresql import execute_prepared
from responses_api.models import Item, ResponseStatus, StoredResponse
from responses_api.search import SearchTooBroad, mentioned, search_time
from responses_api.state.context import find_response
from responses_api.state.history import EncodedItem, decoded, newest_before
from responses_api.state.reading import current_responses
from responses_api.state.rows import rows_of
from responses_api.wire.queries import MOST_SEARCHED

Condition = tuple[str, dict[str, Any]]
"""A condition of SQL, and the values that it names."""

_IDS = """
SELECT public_id FROM responses_api_storedresponse WHERE {conditions}
ORDER BY created_at {order}, id {order} LIMIT {most}
"""
_LIMITS = (20, 100)
"""How many a statement reads at most: were that a value, PostgreSQL would plan it each time."""
_WAITS = """
EXISTS (SELECT FROM generations_generation run
        WHERE run.public_id = responses_api_storedresponse.public_id AND run.status = 'queued')
"""
_SHOWN_IN = {
    ResponseStatus.QUEUED: f"status = 'queued' AND {_WAITS}",
    ResponseStatus.IN_PROGRESS: f"(status = 'in_progress' OR status = 'queued' AND NOT {_WAITS})",
}
"""Where the status that is shown is not the one that is stored (see ``ResponseStatus``)."""
_SAME = {
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
    """Answer ``GET /v1/responses``: the project's own, by the filters of the query."""
    query, project_id = request._request.GET, caller_of(request).project_id
    page = parse_page(query, "desc")
    ids = ids_on(page, project_id, query)
    found = {row.public_id: row for row in rows_of(project_id, ids)}
    shown = current_responses([found[id_] for id_ in ids if id_ in found])
    entries = [response.model_dump() for response in shown]
    return Response(list_object(entries, page, lambda entry: str(entry["id"])))


def ids_on(page: Page, project_id: int, query: QueryDict) -> list[str]:
    """Return the ids of the responses of a page, and of one more if there is one."""
    words = _words(query)
    conditions = [
        ("project_id = %(project)s AND deleted_at IS NULL", {"project": project_id}),
        *_filters(query),
    ]
    if page.after is not None:
        conditions.append(_beyond(find_response(project_id, page.after), page))
    if words:
        ids = _searched(conditions, words, project_id, page)
    else:
        ids = [id_ for (id_,) in execute_prepared(*_statement(conditions, page))]
    return ids[: page.limit + 1]


def _searched(
    conditions: Sequence[Condition], words: str, project_id: int, page: Page
) -> list[str]:
    """Return the ids of those that have these words; PostgreSQL plans it for them."""
    try:
        with search_time():
            statement = _statement([*conditions, mentioned(words, project_id)], page)
            with connection.cursor() as cursor:
                cursor.execute(*statement)
                return [id_ for (id_,) in cursor]
    except SearchTooBroad:
        raise InvalidRequestError(
            "Too many responses would have to be searched for 'q'. Please narrow it: with more "
            "words, or with 'created_after', 'created_before' or 'model'.",
            param="q",
            code="search_too_broad",
        ) from None


def _statement(conditions: Sequence[Condition], page: Page) -> tuple[str, dict[str, Any]]:
    """Return the statement that reads the ids of a page, and its values. There are few texts."""
    values: dict[str, Any] = {}
    for _, named in conditions:
        values |= named
    statement = _IDS.format(
        conditions=" AND ".join(condition for condition, _ in conditions),
        order="ASC" if page.order == "asc" else "DESC",
        most=1 + min(limit for limit in _LIMITS if limit >= page.limit),
    )
    return statement, values


def _beyond(last: StoredResponse, page: Page) -> Condition:
    """Return the condition for those that come after this one in the list."""
    side = ">" if page.order == "asc" else "<"
    place = f"(created_at, id) {side} (%(last_at)s::timestamptz, %(last)s)"
    return place, {"last_at": last.created_at, "last": last.pk}


def _filters(query: QueryDict) -> Iterator[Condition]:
    for name, condition in _SAME.items():
        if given := query.get(name):
            yield condition, {name: given}
    if status := query.get("status"):
        yield _in_status(status)
    if metadata := parse_metadata(query):
        yield "metadata @> %(metadata)s::jsonb", {"metadata": orjson.dumps(metadata).decode()}
    for name, condition in _TIMES.items():
        if moment := _moment(query, name):
            yield condition, {name: moment}


def _in_status(status: str) -> Condition:
    """Return the condition for those that are shown in this status."""
    if status not in ResponseStatus.values:
        raise InvalidRequestError(
            f"Invalid value: {status[:100]!r}. Supported values are: "
            f"{', '.join(map(repr, ResponseStatus.values))}.",
            param="status",
            code="invalid_value",
        )
    shown = _SHOWN_IN.get(ResponseStatus(status))
    return (shown, {}) if shown else ("status = %(status)s", {"status": status})


def _words(query: QueryDict) -> str:
    """Return what is searched for; nothing when there is no search."""
    given = query.get("q", "").strip()
    if len(given) > MOST_SEARCHED:
        raise InvalidRequestError(
            f"Invalid 'q': too long. Expected at most {MOST_SEARCHED} characters.", param="q"
        )
    return given


def _moment(query: QueryDict, name: str) -> dt.datetime | None:
    """Return a time given in Unix seconds."""
    given = query.get(name)
    if not given:
        return None
    if not given.isdecimal() or len(given) > 11:
        raise InvalidRequestError(f"Invalid '{name}': expected Unix seconds.", param=name)
    return dt.datetime.fromtimestamp(int(given), dt.UTC)


def page_of_input(request: Request, stored: StoredResponse) -> Response:
    """Answer a list of the items that a response was given."""
    query = request._request.GET
    page, until = parse_page(query, "desc"), query.get("before")
    has_newest = page.order == "desc" and page.after is None and not until
    items = newest_before(stored, page.limit + 1 if has_newest else None)
    if page.order == "asc":
        items.reverse()
    rest = _between(items, page, until)
    entries = [decoded(item).wire() for item in rest[: page.limit + 1]]
    return Response(list_object(entries, page, lambda entry: str(entry["id"])))


def page_of_rows(request: Request, rows: QuerySet[Item]) -> Response:
    """Answer a list of a conversation's items, reading no more of them than are shown."""
    page = parse_page(request._request.GET, "desc")
    is_ascending = page.order == "asc"
    if page.after is not None:
        last = rows.filter(public_id=page.after).first()
        if last is None:
            raise InvalidRequestError("Invalid 'after': there is no such item.", param="after")
        place = last.conversation_position
        side = {"conversation_position__gt" if is_ascending else "conversation_position__lt": place}
        rows = rows.filter(**side)
    ordered = rows.order_by("conversation_position" if is_ascending else "-conversation_position")
    entries = [{"id": row.public_id, **row.data} for row in ordered[: page.limit + 1]]
    return Response(list_object(entries, page, lambda entry: str(entry["id"])))


def _between(items: list[EncodedItem], page: Page, until: str | None) -> list[EncodedItem]:
    ids = [id_ for id_, _ in items]
    if page.after is not None:
        items = items[_place(ids, page.after, "after") + 1 :]
    elif until:
        end = _place(ids, until, "before")
        items = items[max(0, end - page.limit) : end]
    return items


def _place(ids: list[str], wanted: str, name: str) -> int:
    if wanted not in ids:
        raise InvalidRequestError(f"Invalid '{name}': there is no such item.", param=name)
    return ids.index(wanted)
