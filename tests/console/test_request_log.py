"""The request log: accepted and refused requests in one list, without a copy of either."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from typing import Any

from django.contrib.admin.models import LogEntry
from django.test import Client
from django.utils import timezone

from completions.models import StoredCompletion
from inference_site.accounts.models import ApiKey
from inference_site.console import request_log_page
from inference_site.console.request_filters import LogFilters
from inference_site.console.request_log_page import log_page
from inference_site.runs.models import Generation, Status
from inference_site.runs.request_log.models import Refusal, SavedFilter
from responses_api.models import Item, StoredResponse
from tests.generations.rows import create_generation

Key = tuple[ApiKey, str]
NOW = timezone.now()
VIEW, CONTENT = "generations.view_generation", "responses_api.view_content"


def ago(seconds: float) -> dt.datetime:
    return NOW - dt.timedelta(seconds=seconds)


def accepted(key: Key, seconds: float, **fields: Any) -> Generation:
    return create_generation(key[0], created_at=ago(seconds), **fields)


def refused(seconds: float, **fields: Any) -> Refusal:
    usual = {"status": 429, "error_code": "rate_limit_exceeded", "path": "/v1/responses"}
    return Refusal.objects.create(created_at=ago(seconds), **(usual | fields))


def failed(key: Key, seconds: float, code: str) -> Generation:
    ending = {"status": Status.FAILED, "finished_at": NOW, "error_code": code}
    return accepted(key, seconds, **ending)


def pages(choice: LogFilters) -> list[list[Any]]:
    """Every page of a choice, one after the other."""
    found, before = [], choice.before
    while True:
        page = log_page(LogFilters(**{**_fields(choice), "before": before}))
        found.append(list(page.shown))
        if page.older is None:
            return found
        first, _, second = page.older.partition("-")
        before = int(first), int(second)


def _fields(choice: LogFilters) -> dict[str, Any]:
    return {name: getattr(choice, name) for name in LogFilters.__dataclass_fields__}


def test_both_tables_are_one_list_by_time_and_no_page_skips_or_repeats(
    api_key: Key, monkeypatch: Any
) -> None:
    monkeypatch.setattr(request_log_page, "PAGE_SIZE", 3)
    monkeypatch.setattr(request_log_page, "MAX_ROWS_READ", 4)
    expected: list[Any] = []
    for seconds in range(40, 0, -1):
        # Runs of one kind that are longer than what a page looks at.
        is_accepted = seconds % 13 < 7
        expected.insert(0, accepted(api_key, seconds) if is_accepted else refused(seconds))
    found = pages(LogFilters())
    assert [row for page in found for row in page] == expected
    assert all(len(page) == 3 for page in found[:-1])


def test_what_is_cut_short_goes_on_where_it_stopped(api_key: Key, monkeypatch: Any) -> None:
    for seconds in range(60, 0, -1):
        accepted(api_key, seconds, model="rare" if seconds in (55, 5) else "m")
        refused(seconds, model="rare" if seconds in (50, 30) else "")
    monkeypatch.setattr("inference_site.core.admin_pages.base_admin._FIRST_WINDOW", 4)
    monkeypatch.setattr("inference_site.core.admin_pages.base_admin._TIME_LIMIT_S", 0)
    found = pages(LogFilters(model="rare"))
    assert len(found) > 3
    ages = [round((NOW - row.created_at).total_seconds()) for page in found for row in page]
    assert ages == [5, 30, 50, 55]


def test_filters_are_of_both_tables(api_key: Key) -> None:
    mine = {"project_id": api_key[0].project_id, "api_key_id": api_key[0].pk}
    failed(api_key, 9, "model_error")
    accepted(api_key, 8)
    refused(7, **mine)
    refused(6, status=401, error_code="invalid_api_key", request_id="req_1")

    def found(**chosen: Any) -> list[str]:
        return [row.error_code for row in log_page(LogFilters(**chosen)).shown]

    assert found(key=api_key[0].pk) == ["rate_limit_exceeded", "", "model_error"]
    assert found(status="refused") == ["invalid_api_key", "rate_limit_exceeded"]
    assert found(status="401") == ["invalid_api_key"]
    assert found(status="failed") == ["model_error"]
    assert found(error="model_error") == ["model_error"]
    assert found(error="rate_limit_exceeded") == ["rate_limit_exceeded"]
    assert found(q="req_1") == ["invalid_api_key"]
    assert found(since="1h", model="m") == ["", "model_error"]


def test_the_page_shows_a_refusal_with_its_key_and_counts_facets(
    admin: Client, api_key: Key
) -> None:
    key = api_key[0]
    refused(2, api_key_id=key.pk, project_id=key.project_id, count=41)
    refused(1, status=401, error_code="invalid_api_key", path="/v1/<b>")
    page = admin.get("/admin/requests/").content.decode()
    assert f"{key.name} ({key.prefix}…)" in page, "in the facet"
    assert "unknown key" in page
    assert "× 41" in page
    assert "/v1/&lt;b&gt;" in page
    facet = re.search(r'status=429">429</a> <span>([0-9]+)<', page)
    assert facet is not None
    assert facet.group(1) == "41"


def test_previews_and_words_are_for_those_who_may_see_content(
    api_key: Key, staff: Callable[..., Client]
) -> None:
    key = api_key[0]
    accepted(api_key, 3, public_id="resp_1", kind="response")
    accepted(api_key, 2, public_id="chatcmpl-1")
    stored = StoredResponse.objects.create(
        public_id="resp_1", project_id=key.project_id, model="m", status="completed"
    )
    texts = (False, "What do cats <eat> at night?"), (True, "Cats eat mice.")
    for place, (is_output, text) in enumerate(texts):
        data = {"type": "message", "role": "user", "content": [{"type": "text", "text": text}]}
        Item.objects.create(
            public_id=f"msg_{place}",
            project_id=key.project_id,
            response=stored,
            position=place,
            is_output=is_output,
            data=data,
        )
    StoredCompletion.objects.create(
        public_id="chatcmpl-1",
        project_id=key.project_id,
        model="m",
        messages=[{"role": "user", "content": "Say dog."}],
        completion={"choices": [{"message": {"role": "assistant", "content": "Dog."}}]},
    )
    page = staff(VIEW, CONTENT).get("/admin/requests/").content.decode()
    for text in ("What do cats &lt;eat&gt; at night?", "Cats eat mice.", "Say dog.", "Dog."):
        assert text in page
    hit = staff(VIEW, CONTENT, "usage.view_usagerollup").get("/admin/requests/", {"q": "mice"})
    page = hit.content.decode()
    assert "Cats eat <mark>mice</mark>" in page
    without = staff(VIEW)
    page = without.get("/admin/requests/").content.decode()
    assert "cats" not in page
    assert "og." not in page
    page = without.get("/admin/requests/", {"q": "mice"}).content.decode()
    assert "You do not have permission to search prompts and answers." in page
    assert "resp_1" not in page


def test_a_saved_filter_is_its_users_own(staff: Callable[..., Client], admin: Client) -> None:
    browser = staff(VIEW)
    form = {"name": "Full", "query": "status=429&before=1-2&next=https%3A%2F%2Felsewhere"}
    answer = browser.post("/admin/requests/filters/", form)
    assert answer["Location"] == "/admin/requests/?status=429"
    saved = SavedFilter.objects.get()
    assert (saved.name, saved.query) == ("Full", "status=429")
    assert 'href="?status=429"' in browser.get("/admin/requests/").content.decode()
    assert "Full" not in admin.get("/admin/requests/").content.decode()
    admin.post("/admin/requests/filters/", {"delete": saved.pk})
    assert SavedFilter.objects.count() == 1
    browser.post("/admin/requests/filters/", {"delete": saved.pk})
    assert SavedFilter.objects.count() == 0
    entries = LogEntry.objects.order_by("pk").values_list("object_repr", "change_message")
    assert [*entries] == [
        ("Full", "Saved a filter of requests."),
        ("Full", "Deleted a filter of requests."),
    ]


def test_nobody_keeps_any_number_of_filters(admin: Client) -> None:
    for number in range(40):
        admin.post("/admin/requests/filters/", {"name": f"{number}", "query": ""})
    assert SavedFilter.objects.count() == 30
