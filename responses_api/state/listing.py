"""Lists of responses and of items, by keyset."""

from __future__ import annotations

import datetime as dt
from contextlib import nullcontext

from django.db.models import Exists, OuterRef, Q, QuerySet
from django.http import QueryDict
from rest_framework.request import Request
from rest_framework.response import Response

from inference_site.api.authentication import caller_of
from inference_site.api.paging import Page, list_object, parse_metadata, parse_page
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.generations.models import Generation, Status
from responses_api.models import Item, ResponseStatus, StoredResponse, StoredResponseQuerySet
from responses_api.search import SearchTooBroad, search_time
from responses_api.state.context import find_response
from responses_api.state.history import EncodedItem, decoded, newest_before
from responses_api.state.reading import current_responses
from responses_api.state.rows import rows_of
from responses_api.wire.queries import MOST_SEARCHED


def list_responses(request: Request) -> Response:
    """Answer ``GET /v1/responses``: the project's own, by the filters of the query."""
    query, project_id = request._request.GET, caller_of(request).project_id
    page = parse_page(query, "desc")
    rows = StoredResponse.objects.filter(project_id=project_id, deleted_at=None)
    rows = _filtered(rows, query)
    if page.after is not None:
        rows = _beyond(rows, find_response(project_id, page.after), page)
    ids = _page_of(rows, _words(query), project_id, page)
    found = {row.public_id: row for row in rows_of(project_id, ids)}
    shown = current_responses([found[id_] for id_ in ids if id_ in found])
    entries = [response.model_dump() for response in shown]
    return Response(list_object(entries, page, lambda entry: str(entry["id"])))


def _beyond(
    rows: StoredResponseQuerySet, last: StoredResponse, page: Page
) -> StoredResponseQuerySet:
    """Return those that come after this one in the list."""
    side = "gt" if page.order == "asc" else "lt"
    later = Q(**{f"created_at__{side}": last.created_at})
    same_time = Q(**{"created_at": last.created_at, f"pk__{side}": last.pk})
    # The first condition says no more than the second; the index can begin with it.
    return rows.filter(Q(**{f"created_at__{side}e": last.created_at}), later | same_time)


def _page_of(rows: StoredResponseQuerySet, text: str, project_id: int, page: Page) -> list[str]:
    """Return the ids of the responses of the page, and of one more if there is one."""
    order = ("created_at", "pk") if page.order == "asc" else ("-created_at", "-pk")
    try:
        with search_time() if text else nullcontext():
            found = rows.mentioning(text, project_id) if text else rows
            ids = found.order_by(*order).values_list("public_id", flat=True)
            return list(ids[: page.limit + 1])
    except SearchTooBroad:
        raise InvalidRequestError(
            "Too many responses would have to be searched for 'q'. Please narrow it: with more "
            "words, or with 'created_after', 'created_before' or 'model'.",
            param="q",
            code="search_too_broad",
        ) from None


def _filtered(rows: StoredResponseQuerySet, query: QueryDict) -> StoredResponseQuerySet:
    if model := query.get("model"):
        rows = rows.filter(model=model)
    if status := query.get("status"):
        if status not in ResponseStatus.values:
            raise InvalidRequestError(
                f"Invalid value: {status[:100]!r}. Supported values are: "
                f"{', '.join(map(repr, ResponseStatus.values))}.",
                param="status",
                code="invalid_value",
            )
        rows = _in_status(rows, status)
    if metadata := parse_metadata(query):
        rows = rows.filter(metadata__contains=metadata)
    if previous := query.get("previous_response_id"):
        rows = rows.filter(previous__public_id=previous)
    if conversation := query.get("conversation"):
        rows = rows.filter(conversation__public_id=conversation)
    if since := _moment(query, "created_after"):
        rows = rows.filter(created_at__gt=since)
    if until := _moment(query, "created_before"):
        rows = rows.filter(created_at__lt=until)
    return rows


def _in_status(rows: StoredResponseQuerySet, status: str) -> StoredResponseQuerySet:
    """Return those that are shown in this status (see ``ResponseStatus``)."""
    waits = Exists(Generation.objects.filter(public_id=OuterRef("public_id"), status=Status.QUEUED))
    match status:
        case ResponseStatus.QUEUED:
            return rows.filter(waits, status=ResponseStatus.QUEUED)
        case ResponseStatus.IN_PROGRESS:
            runs = Q(status=ResponseStatus.QUEUED) & ~Q(waits)
            return rows.filter(Q(status=ResponseStatus.IN_PROGRESS) | runs)
        case _:
            return rows.filter(status=status)


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
