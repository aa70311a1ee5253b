"""Search by the words of items: both ways, and their time limits."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction

from inference_site.accounts.models import Project
from inference_site.runs.queue import new_id
from responses_api import search
from responses_api.models import Item, StoredResponse
from responses_api.search import SearchTooBroad, search_timeout

pytestmark = pytest.mark.django_db

NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)


@pytest.fixture
def project() -> Project:
    return Project.objects.create(name="one")


@pytest.fixture(params=["index", "list", "list by statistics"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the two ways to search, and each of the two reasons for the second way."""
    if request.param == "list":
        monkeypatch.setattr(search, "_MOST_HITS", -1)
    elif request.param == "list by statistics":
        monkeypatch.setattr(search, "_MAX_ESTIMATE", -1)
    return str(request.param)


def message(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": kind, "text": text}]}


def store(project: Project, *items: dict[str, Any], minutes: int = 0) -> int:
    """Store a response with these items; return its key."""
    stored = StoredResponse.objects.create(
        public_id=new_id("resp_"),
        project=project,
        model="m",
        status="completed",
        created_at=NOON + dt.timedelta(minutes=minutes),
    )
    Item.objects.bulk_create(
        Item(
            public_id=new_id("msg_"),
            project=project,
            response=stored,
            position=position,
            data={"status": "completed", **data},
        )
        for position, data in enumerate(items)
    )
    return stored.pk


def found(text: str, project: Project | None = None) -> set[int]:
    with search_timeout():
        rows = StoredResponse.objects.mentioning(text, None if project is None else project.pk)
        return set(rows.values_list("pk", flat=True))


@pytest.mark.usefixtures("way")
def test_response_is_found_by_the_words_of_an_item(project: Project) -> None:
    fox = store(project, message("The quick brown fox\njumped\tover Łódź, C:\\new."))
    bear = store(project, message("Hello"), message("A brown bear slept.", "output_text"))
    assert found("fox", project) == {fox}
    assert found("FOX quick", project) == {fox}
    assert found("jumped over", project) == {fox}
    assert found("łódź", project) == {fox}
    assert found("brown", project) == {fox, bear}
    assert found('"brown bear"', project) == {bear}
    assert found('"quick bear" or slept', project) == {bear}
    assert found("brown -bear", project) == {fox}
    assert found("hello bear", project) == set()  # Of two items.
    assert found("brown cat", project) == set()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("text", ["' OR 1=1 --", "&|!():*<->", '"', "-", "''", " 1 ", "%", "\\"])
def test_whatever_is_searched_for_is_no_syntax(project: Project, text: str) -> None:
    store(project, message("brown"))
    assert found(text, project) == set()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "data",
    [
        {"type": "function_call", "name": "needle", "arguments": "{}"},
        {"type": "function_call", "name": "f", "arguments": '{"needle": 1}'},
        {"type": "function_call_output", "output": "a needle"},
        {"type": "function_call_output", "output": [{"type": "input_text", "text": "needle"}]},
        {"type": "custom_tool_call", "name": "f", "input": "needle"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "needle"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "needle"}]},
        {"type": "message", "content": [{"type": "refusal", "refusal": "no needle"}]},
    ],
)
def test_text_of_every_sort_of_item_is_searched(project: Project, data: dict[str, Any]) -> None:
    made = store(project, data)
    assert found("needle", project) == {made}
    assert found(data["type"], project) == set()  # Only texts are indexed.


def test_projects_are_apart_unless_all_are_searched(project: Project, way: str) -> None:
    other = Project.objects.create(name="other")
    ours, theirs = store(project, message("brown")), store(other, message("brown"))
    assert found("brown") == {ours, theirs}
    if way == "index":  # The list is always that of a project.
        assert found("brown", project) == {ours}
        assert found("brown", other) == {theirs}
    assert found(str(project.pk), project) == set()  # The project's word in the index is not found.


def test_large_item_is_stored_and_found_by_its_beginning(project: Project) -> None:
    large = store(project, message("needle " + " ".join(f"w{i}" for i in range(400_000)) + " pin"))
    assert found("needle w77", project) == {large}
    assert found("pin", project) == set()


@pytest.mark.parametrize("letter", ["\U00020000", "\u0561", "a"])
def test_item_of_as_many_words_as_can_be_is_stored(project: Project, letter: str) -> None:
    text = " ".join(chr(ord(letter) + i % 30_000) for i in range(60_000))
    assert store(project, message(text.replace("\0", " ")))


def test_search_of_a_project_is_one_look_into_the_index(project: Project) -> None:
    store(project, message("brown"))
    asked: dict[str, str | int] = {"text": "brown", "project": f"' {project.pk}'"}
    with transaction.atomic(), connection.cursor() as cursor:
        search._limit(1000)
        cursor.execute(f"EXPLAIN {search._HITS} LIMIT 2", asked)
        plan = "\n".join(line for (line,) in cursor)
    assert "item_words" in plan
    assert "Seq Scan" not in plan


def test_frequent_words_are_looked_for_in_the_order_of_the_list(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_MOST_HITS", 3)
    made = [store(project, message(f"brown {n}"), minutes=n) for n in range(6)]
    with search_timeout():
        rows = StoredResponse.objects.filter(project=project).mentioning("brown", project.pk)
        page = rows.order_by("-created_at", "-pk")[:2]
        assert [row.pk for row in page] == [made[5], made[4]]


def test_many_items_of_few_responses_are_many_hits(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_MOST_HITS", 6)
    made = {store(project, *[message("brown")] * 5) for _ in range(4)}
    assert found("brown", project) == made


def test_statistics_tell_what_is_frequent(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_MAX_ESTIMATE", 20)
    for n in range(60):
        store(project, message(f"brown w{n}"))
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE responses_api_item")
    with transaction.atomic():
        assert search._hits("brown", project.pk) is None
        assert len(search._hits("w7", project.pk) or ()) == 1
    assert len(found("brown", project)) == 60


def test_search_that_takes_too_long_is_told(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(project, message("brown"))
    with pytest.raises(SearchTooBroad), search_timeout(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(5)")
    monkeypatch.setattr(search, "_HITS", "SELECT pg_sleep(5), %(text)s, %(project)s")
    assert len(found("brown", project)) == 1  # The other way still works.


def test_other_errors_are_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OperationalError), search_timeout():
        raise OperationalError("the server is gone")
