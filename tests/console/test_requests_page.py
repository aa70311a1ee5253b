"""The page of requests: its tabs, orders, filters and downloads, and what they leave to others."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from asgiref.sync import async_to_sync
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.http import QueryDict, StreamingHttpResponse
from django.test import Client, RequestFactory
from django.utils import timezone

from completions.models import StoredCompletion
from inference_site.accounts.models import ApiKey
from inference_site.console import downloads, sorted_requests
from inference_site.console.navigation import navigation
from inference_site.console.request_filters import LogFilters, filters_of
from inference_site.console.request_log_page import log_page
from inference_site.console.sorted_requests import sorted_page
from inference_site.core.site_settings import models as site_settings
from inference_site.core.site_settings.models import SiteSettings
from inference_site.runs.models import Generation, Status
from inference_site.runs.request_log.models import Refusal
from responses_api.models import Conversation, Item, StoredResponse
from tests.console.test_request_log import CONTENT, VIEW, accepted, ago, refused
from tests.generations.rows import create_generation

Key = tuple[ApiKey, str]
LOG = "/admin/requests/"
CONVERSATIONS = "/admin/responses_api/conversation/"
STORED = ("responses_api.view_storedresponse", "completions.view_storedcompletion")


def ended(key: Key, seconds: float, took_s: float, **fields: Any) -> Generation:
    """A generation with its age at the beginning, and how long it took; both in seconds."""
    times = {"created_at": ago(seconds), "finished_at": ago(seconds - took_s)}
    return create_generation(key[0], status=Status.COMPLETED, **(times | fields))


def test_every_column_sorts_both_ways_with_unknown_values_last(api_key: Key) -> None:
    values: list[dict[str, Any]] = [
        {"claimed_at": ago(99), "first_token_at": ago(97), "input_tokens": 5, "cost": 2},
        {"claimed_at": ago(96), "first_token_at": ago(98), "input_tokens": 9, "cost": 1},
    ]
    first, second = (ended(api_key, 100, 10 + n, **fields) for n, fields in enumerate(values))
    waits = accepted(api_key, 100)

    def order(sort: str) -> list[Generation]:
        return list(sorted_page(LogFilters(sort=sort), 9).shown)

    assert order("-duration") == [second, first, waits]
    assert order("duration") == [first, second, waits]
    assert order("-ttft") == [first, second, waits]
    assert order("-queue") == [second, first, waits]
    assert order("-tokens")[0] == second
    assert order("-cost")[0] == first
    assert order("time") == [first, second, waits]


def test_pages_of_an_order_have_each_request_once_though_new_ones_come(
    api_key: Key, admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorted_requests, "MAX_SORTED", 7)
    monkeypatch.setattr("inference_site.console.request_log_page.PAGE_SIZE", 3)
    rows = [ended(api_key, 100, n % 5) for n in range(10)]
    query, seen = "sort=-duration", list[str]()
    while query:
        page = admin.get(f"{LOG}?{query}").content.decode()
        seen += re.findall(r"/admin/requests/accepted/(\d+)/", page)
        links = dict(re.findall(r'<a(?: rel="\w+")? href="\?([^"]+)">(Next →|Sort older)', page))
        texts = {text: link for link, text in links.items()}
        query = texts.get("Next →") or texts.get("Sort older") or ""
        query = query.replace("&amp;", "&")
        ended(api_key, 1, 99)
    assert sorted(map(int, seen)) == sorted(row.pk for row in rows)


def test_refused_requests_are_sorted_by_how_long_they_took(api_key: Key) -> None:
    quick, slow = refused(9, duration_ms=2), refused(8, duration_ms=900, count=3)
    ended(api_key, 5, 1)
    page = sorted_page(LogFilters(status="refused", sort="-duration"), 9)
    assert list(page.shown) == [slow, quick]
    assert sum(row.requests for row in page.compared) == 4
    assert page.older is None
    # They have no tokens: the newest come first.
    assert list(sorted_page(LogFilters(status="429", sort="-tokens"), 9).shown) == [slow, quick]


def test_filters_by_endpoint_end_user_metadata_and_duration(api_key: Key) -> None:
    key = api_key[0]
    chat = ended(api_key, 50, 20, kind="chat.completion", end_user="ada")
    answer = ended(api_key, 40, 2, kind="response", public_id="resp_1", end_user="bob")
    hidden = ended(api_key, 39, 2, kind="response", public_id="resp_2")
    waits = accepted(api_key, 30, kind="embedding")
    refusal = refused(20, duration_ms=12_000)
    common = {"project_id": key.project_id, "model": "m", "metadata": {"team": "red=1"}}
    StoredCompletion.objects.create(public_id=chat.public_id, messages=[], completion={}, **common)
    StoredResponse.objects.create(public_id="resp_1", status="completed", **common)
    gone = {"public_id": hidden.public_id, "deleted_at": timezone.now()}
    StoredResponse.objects.create(status="completed", **gone, **common)

    def found(**chosen: Any) -> list[Any]:
        return list(log_page(LogFilters(**chosen)).shown)

    assert found(kind="embedding") == [waits]
    assert found(kind="response") == [refusal, hidden, answer]
    assert found(user="ada") == [chat]
    assert found(metadata="team=red=1") == [answer, chat]
    assert found(metadata="team=red") == []
    assert found(slower=10) == [refusal, waits, chat]
    assert found(slower=29, status="unfinished") == [waits]
    assert found(status="unfinished", slower=3_000) == []


@pytest.mark.parametrize(
    "query",
    [
        "sort=-password&kind=x&slower=1e9&page=-1&metadata=x&before=1",
        "sort=%2D²cost&slower=nan&page=٣&status=٤٠٤&user=²&kind=__class__",
        "slower=99999999999&page=99999&status=unfinishe&metadata=%3D%27%22--&sort=-cost",
        "q=²&metadata=a%3D²&user=%27%3B--&page=1000&sort=cost&since=1h&project=1&key=1",
        "status=429&sort=-queue&page=7&before=999999999999999999-999999999999999999",
    ],
)
def test_odd_queries_are_answered(admin: Client, api_key: Key, query: str) -> None:
    accepted(api_key, 1)
    assert admin.get(f"{LOG}?{query}").status_code == 200
    assert admin.get(f"{LOG}export/?format=csv&{query}", follow=True).status_code == 200


def test_tabs_keep_the_filters_and_drop_the_place_in_the_list(admin: Client) -> None:
    page = admin.get(f"{LOG}?project=1&before=5-5&status=failed&error=x").content.decode()
    tabs = page[page.index('class="tabs"') : page.index("</nav>", page.index('class="tabs"'))]
    links = re.findall(r'href="([^"]*)"( aria-current="page")?>(\w+)', tabs)
    assert [(link.replace("&amp;", "&"), title, bool(now)) for link, now, title in links] == [
        (f"{LOG}?project=1", "All", False),
        (f"{LOG}?project=1&status=failed", "Failed", True),
        (f"{LOG}?project=1&sort=-duration", "Slow", False),
        (f"{LOG}?project=1&status=unfinished", "Running", False),
        (f"{LOG}?project=1&status=refused", "Refused", False),
        (CONVERSATIONS, "Conversations", False),
    ]


def test_conversations_are_a_tab_with_their_latest_response(
    admin: Client, staff: Callable[..., Client], api_key: Key
) -> None:
    project = api_key[0].project
    talk = Conversation.objects.create(public_id="conv_1", project=project)
    for number in range(3):
        row = {"public_id": f"resp_{number}", "project": project, "conversation": talk}
        StoredResponse.objects.create(**row, model="demo", created_at=ago(60 * number))
    page = admin.get(CONVERSATIONS).content.decode()
    tabs = page[page.index('class="tabs"') : page.index("</nav>", page.index('class="tabs"'))]
    assert re.findall(r'aria-current="page">(\w+)', tabs) == ["Conversations"]
    assert f'href="{LOG}"' in tabs
    assert re.search(r"field-responses[^>]*>\s*3\s*<", page)
    assert "field-latest" in page
    only_these = staff("responses_api.view_conversation").get(CONVERSATIONS).content.decode()
    assert f'href="{LOG}"' not in only_these


def headings_of(page: str) -> list[str]:
    table = page[page.index('class="plain cards log"') :]
    return re.findall(
        r"<th scope=\"col\"[^>]*>(?:<a [^>]*>)?([^<]+)<", table[: table.index("</thead>")]
    )


def test_a_person_chooses_the_columns_and_keeps_them(admin: Client, api_key: Key) -> None:
    fields = {"end_user": "<b>ada", "tags": ["team=red", "a=b"], "admission_ms": 3.2}
    ended(api_key, 100, 10, **fields)
    refused(50, duration_ms=4)
    always = ["Time", "Status", "Endpoint, model"]
    before = headings_of(admin.get(LOG).content.decode())
    usual = ["Project, key", "Prompt, answer", "Duration", "First token", "Queue"]
    assert before == [*always, *usual, "Tokens in / out", "Cost"]
    chosen = {
        "column": ["user", "tags", "duration", "admission", "odd"],
        "query": "status=completed",
    }
    answer = admin.post(f"{LOG}columns/", chosen)
    assert answer.headers["Location"] == f"{LOG}?status=completed"
    page = admin.get(LOG).content.decode()
    assert headings_of(page) == [*always, "End user", "Tags", "Admission", "Duration"]
    assert "<div>&lt;b&gt;ada</div>" in page
    assert "<div>team=red, a=b</div>" in page
    assert ">3 ms<" in page
    assert ">4 ms<" in page
    assert downloaded(admin, f"{LOG}export/?format=csv").count("first_token_ms") == 1
    admin.post(f"{LOG}columns/", {"query": ""})
    assert headings_of(admin.get(LOG).content.decode()) == before
    for odd in ("", "x" * 5_000, "column=__class__&column=cost", "\u0000"):
        admin.cookies["request_columns"] = odd
        assert admin.get(LOG).status_code == 200


@pytest.mark.django_db
def test_each_metadata_key_of_usage_is_a_column(admin: Client, api_key: Key) -> None:
    keys = ["team", "cost center", "a=b&c.d"]
    SiteSettings.objects.update_or_create(pk=1, defaults={"usage_tags": keys})
    site_settings.forget()
    ended(api_key, 100, 10, tags=["team=<b>red", "cost center=a=b", "teams=blue"])
    assert not set(keys) & set(headings_of(admin.get(LOG).content.decode()))
    admin.post(f"{LOG}columns/", {"column": [f"tag:{key}" for key in keys]})
    page = admin.get(LOG).content.decode()
    assert headings_of(page)[3:] == ["team", "cost center", "a=b&amp;c.d"]
    assert [page.count(text) for text in ("<div>&lt;b&gt;red</div>", "<div>a=b</div>")] == [1, 1]
    SiteSettings.objects.update(usage_tags=["team"])
    site_settings.forget()
    assert headings_of(admin.get(LOG).content.decode())[3:] == ["team"], "the others are gone"
    site_settings._last = SiteSettings()
    site_settings.forget()


def downloaded(browser: Client, address: str) -> str:
    answer = browser.get(address)
    assert isinstance(answer, StreamingHttpResponse), answer.status_code

    async def read() -> bytes:
        return b"".join([one async for one in cast(AsyncIterator[bytes], answer.streaming_content)])

    return async_to_sync(read)().decode()


@pytest.mark.django_db(transaction=True)
def test_a_download_has_every_request_once_and_is_audited(
    api_key: Key, admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "_BATCH", 3)
    for n in range(8):
        user = {6: "\n=1+1", 7: "=1+1"}.get(n, "ada")
        ended(api_key, 100 - n, n, end_user=user, cost=n / 4)
    refused(50, path="/v1/x", count=4)
    rows = list(csv.DictReader(io.StringIO(downloaded(admin, f"{LOG}export/?format=csv"))))
    assert len(rows) == 9
    assert rows[0]["end_user"] == "", "the refusal is the newest"
    assert rows[0]["requests"] == "4"
    users = [rows[1]["end_user"], rows[2]["end_user"]]
    assert users == ["'=1+1", "'\n=1+1"], "no formula"
    assert rows[1]["duration_ms"] == "7000.0"
    query = "format=jsonl&user=ada&kind=chat.completion"
    lines = downloaded(admin, f"{LOG}export/?{query}").splitlines()
    assert len(lines) == 6
    costs = [json.loads(line)["cost"] for line in lines]
    assert (costs[0], costs[-1]) == ("1.250000000", "0.000000000")
    entry = LogEntry.objects.latest("pk")
    said = "Exported as jsonl: kind=chat.completion, a filter by user."
    assert (entry.object_repr, entry.change_message) == ("Requests", said)


def test_downloads_and_metadata_are_by_permission(
    api_key: Key, staff: Callable[..., Client]
) -> None:
    accepted(api_key, 1)
    assert staff().get(f"{LOG}export/").status_code == 403
    browser = staff(VIEW)
    assert browser.get(f"{LOG}export/?metadata=a=b").status_code == 403
    page = browser.get(f"{LOG}?metadata=a=b").content.decode()
    assert "You do not have permission to see metadata." in page
    allowed = staff(VIEW, *STORED, "usage.view_usagerollup")
    assert "permission to see metadata" not in allowed.get(f"{LOG}?metadata=a=b").content.decode()


def test_the_menu_leads_to_the_tabs_and_shows_tables_to_administrators(
    staff: Callable[..., Client], admin: Client
) -> None:
    menu = staff(VIEW, *STORED).get("/admin/").content.decode()
    assert "/admin/requests/?status=refused" in menu
    assert "/admin/generations/generation/" not in menu
    assert "/admin/generations/generation/" in admin.get("/admin/").content.decode()


@pytest.mark.parametrize(
    ("query", "open_tab"),
    [("", "Requests"), ("?status=429", "Refused"), ("?slower=3", "Slow"), ("?status=queued", "")],
)
def test_only_the_open_tab_is_marked_in_the_menu(
    admin: Client, rf: RequestFactory, query: str, open_tab: str
) -> None:
    request = rf.get(f"{LOG}{query}")
    request.user = User.objects.get(username="admin")
    items = navigation(request)[1]["items"]
    marked = [item["title"] for item in items if item.get("active")]
    assert marked == [open_tab or "Requests"]


def test_a_name_of_a_sort_is_not_taken_from_the_query() -> None:
    assert filters_of(QueryDict("sort=-id")).sort == ""
    assert filters_of(QueryDict("slower=0.5&page=3")).slower == 0.5


def test_a_refusal_without_a_generation_is_in_an_order_by_time(api_key: Key) -> None:
    newer, older = refused(1), refused(2)
    Refusal.objects.filter(pk=newer.pk).update(created_at=dt.datetime.now(dt.UTC))
    shown = sorted_page(LogFilters(status="refused", sort="time"), 9).shown
    assert [row.pk for row in shown] == sorted([newer.pk, older.pk])


def test_words_are_found_in_responses_conversations_and_chat_completions(
    api_key: Key, staff: Callable[..., Client]
) -> None:
    key = api_key[0]
    chat = ended(api_key, 50, 20, public_id="chatcmpl-giraffe")
    StoredCompletion.objects.create(
        public_id=chat.public_id,
        project_id=key.project_id,
        model="m",
        messages=[{"role": "user", "content": "Two giraffes <i>ate</i> 100 % leaves"}],
        completion={"choices": []},
    )
    conversation = Conversation.objects.create(public_id="conv_1", project_id=key.project_id)
    text = {"type": "message", "role": "user", "content": [{"type": "text", "text": "A giraffe."}]}
    Item.objects.create(
        public_id="msg_1",
        project_id=key.project_id,
        conversation=conversation,
        conversation_position=0,
        position=0,
        is_output=False,
        data=text,
    )
    browser = staff(VIEW, CONTENT, "responses_api.view_conversation")

    def found(**query: Any) -> tuple[bool, bool, bool]:
        page = browser.get(LOG, query).content.decode()
        parts = (f"/accepted/{chat.pk}/", "conv_1", "Nothing that was searched")
        return parts[0] in page, parts[1] in page, parts[2] in page

    assert found(q="giraffe") == (True, True, False)
    assert found(q="GIRAFFES 100 %") == (True, False, False)
    assert found(q="giraffe", project=key.project_id) == (True, True, False)
    assert found(q="giraffe", project=key.project_id + 1) == (False, False, True)
    assert found(q="giraffe", user="ada") == (False, False, True)
    assert found(q="elephant") == (False, False, True)
    assert found(q="\"%_\\ ' or -")[:2] == (False, False)
    without = staff(VIEW, CONTENT, "auth.view_group").get(LOG, {"q": "giraffe"}).content.decode()
    assert "conv_1" not in without
