"""Lists of responses: every filter, and the cost of a page in PostgreSQL."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from itertools import product
from typing import Literal

import pytest
from django.db import connection
from django.http import QueryDict
from django.test import Client
from django.test.utils import CaptureQueriesContext

from inference_site.accounts.models import ApiKey, Project
from inference_site.gateway.api.paging import Page
from responses_api.deletion import remove_item
from responses_api.listing import ids_on
from responses_api.models import Item, StoredResponse
from responses_api.views import conversations
from tests.statements import planned_each_time, prepared_runs, rows_fetched

pytestmark = pytest.mark.django_db
Order = Literal["asc", "desc"]
_BEGAN = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
_AT_A_TIME = 3
"""The number of responses with the same time of creation."""


@pytest.fixture
def responses(project: Project) -> list[StoredResponse]:
    """Responses of a project, oldest first; every second one has metadata and another model."""
    rows = [
        StoredResponse(
            public_id=f"resp_{number}",
            project=project,
            model="odd" if number % 2 else "even",
            status="completed",
            metadata={"is": "odd"} if number % 2 else {},
            created_at=_BEGAN + dt.timedelta(seconds=number // _AT_A_TIME),
        )
        for number in range(400)
    ]
    return StoredResponse.objects.bulk_create(rows)


def pages(project: Project, limit: int, order: Order, query: str) -> Iterator[list[str]]:
    """Go through a list, page by page."""
    after = None
    while True:
        ids = ids_on(Page(after, limit, order), project.pk, QueryDict(query))
        yield ids[:limit]
        if len(ids) <= limit:
            return
        after = ids[limit - 1]


ORDERS: tuple[Order, ...] = ("asc", "desc")


@pytest.mark.parametrize(
    "query", ["", "model=odd", "metadata[is]=odd", "created_after=1767225610", "status=completed"]
)
def test_all_pages_together_are_the_list(
    project: Project, responses: list[StoredResponse], query: str
) -> None:
    for order, limit in product(ORDERS, (1, 7, 20, 21, 100)):
        ordered = responses if order == "asc" else responses[::-1]
        wanted = [row for row in ordered if fits(row, query)][: 5 * limit]
        found: list[str] = []
        for _, page in zip(range(5), pages(project, limit, order, query), strict=False):
            found += page
        assert found == [row.public_id for row in wanted], (order, limit)


def fits(row: StoredResponse, query: str) -> bool:
    """Whether the response belongs to the list."""
    if query.startswith("created_after"):
        return row.created_at.timestamp() > float(query.partition("=")[2])
    return "odd" not in query or row.model == "odd"


def test_a_page_is_one_statement_planned_once_that_reads_no_more_than_it_shows(
    project: Project, responses: list[StoredResponse]
) -> None:
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE responses_api_storedresponse")
    for query in ("", "model=odd"):
        for _ in range(7):  # PostgreSQL plans the first five.
            ids_on(Page(None, 20, "desc"), project.pk, QueryDict(query))
    assert planned_each_time() == []
    table = StoredResponse._meta.db_table
    for query in ("", "model=odd", "created_before=1767225700&model=even"):
        fetched, runs = rows_fetched(table), prepared_runs()
        with CaptureQueriesContext(connection) as asked:
            ids_on(Page(None, 20, "desc"), project.pk, QueryDict(query))
        assert (len(asked), prepared_runs() - runs) == (0, 1)
        assert rows_fetched(table) - fetched < 50


@pytest.mark.redis
def test_a_page_may_begin_behind_an_item_in_the_moment_of_its_deletion(
    api_key: tuple[ApiKey, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a reader, it was gone before its position was kept."""
    client = Client(headers={"Authorization": f"Bearer {api_key[1]}"})
    said = [{"type": "message", "role": "user", "content": text} for text in "abc"]
    made = client.post("/v1/conversations", {"items": said}, "application/json").json()
    url = f"/v1/conversations/{made['id']}/items"
    ids = [item["id"] for item in client.get(url, {"order": "asc"}).json()["data"]]
    pages = []

    def remove_and_read(item: Item) -> None:
        remove_item(item)
        pages.append(client.get(url, {"order": "asc", "after": item.public_id}))

    monkeypatch.setattr(conversations, "remove_item", remove_and_read)
    assert client.delete(f"{url}/{ids[0]}").status_code == 200
    assert [item["id"] for item in pages[0].json()["data"]] == ids[1:]
