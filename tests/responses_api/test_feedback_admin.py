"""Feedback in the console: who gives it, what lists filter by, what exports have."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.test import Client

from completions.models import StoredCompletion
from inference_site.accounts.models import ApiKey
from inference_site.gateway.feedback import CLIENTS, MAX_AUTHORS, Rating, give
from responses_api.admin import responses
from responses_api.models import StoredResponse
from tests.responses_api.chains import Chain

pytestmark = pytest.mark.django_db
Key = tuple[ApiKey, str]
LIST = "/admin/responses_api/storedresponse/"
COMPLETIONS = "/admin/completions/storedcompletion/"


@pytest.fixture
def stored(api_key: Key) -> StoredResponse:
    return Chain(api_key[0]).turn("a question", "an answer")


def rate(browser: Client, address: str, pk: int, **fields: str) -> Any:
    return browser.post(f"{address}{pk}/feedback/", fields)


def test_users_who_may_see_content_rate_and_withdraw(admin: Client, stored: StoredResponse) -> None:
    give(stored, CLIENTS, Rating.UP, "from the app")
    rate(admin, LIST, stored.pk, rating="down", note="too <b>short</b>")
    page = admin.get(f"{LIST}{stored.pk}/change/").content.decode()
    assert "from the app" in page
    assert "too &lt;b&gt;short&lt;/b&gt;" in page
    stored.refresh_from_db()
    assert stored.rating == "down"
    assert [entry["author"] for entry in stored.feedback] == [CLIENTS, "staff:admin"]
    change = LogEntry.objects.latest("pk").change_message
    assert change == "Rated: bad."
    odd = rate(admin, LIST, stored.pk, rating="best")
    assert "There is no such rating." in str(list(odd.wsgi_request._messages))
    stored.refresh_from_db()
    assert stored.rating == "down"
    rate(admin, LIST, stored.pk, rating="")
    stored.refresh_from_db()
    assert (stored.rating, len(stored.feedback)) == ("up", 1)


def test_users_who_may_not_see_content_neither_rate_nor_read(
    staff: Callable[..., Client], stored: StoredResponse
) -> None:
    give(stored, CLIENTS, Rating.UP, "from the app")
    browser = staff("responses_api.view_storedresponse")
    assert rate(browser, LIST, stored.pk, rating="down").status_code == 403
    assert "from the app" not in browser.get(f"{LIST}{stored.pk}/change/").content.decode()
    assert Client().post(f"{LIST}{stored.pk}/feedback/", {"rating": "up"}).status_code == 302
    stored.refresh_from_db()
    assert len(stored.feedback) == 1


def test_the_lists_filter_by_the_newest_rating(
    admin: Client, api_key: Key, stored: StoredResponse
) -> None:
    other = Chain(api_key[0]).turn("another question", "another answer")
    completion = StoredCompletion.objects.create(
        public_id="chatcmpl-1",
        project=api_key[0].project,
        model="m",
        messages=[{"role": "user", "content": "Hi"}],
        completion={"choices": [{"message": {"role": "assistant", "content": "Ho"}}]},
    )
    give(stored, CLIENTS, Rating.UP, "")
    give(stored, "staff:ann", Rating.DOWN, "")
    rate(admin, COMPLETIONS, completion.pk, rating="up")
    for query, shown in (("down", {stored.pk}), ("up", set()), ("any", {stored.pk})):
        page = admin.get(LIST, {"rating": query}).content.decode()
        assert {pk for pk in (stored.pk, other.pk) if f"{LIST}{pk}/change/" in page} == shown
    for query, is_shown in (("up", True), ("down", False)):
        page = admin.get(COMPLETIONS, {"rating": query}).content.decode()
        assert (f"{completion.pk}/change/" in page) is is_shown


def test_an_export_has_the_feedback(stored: StoredResponse) -> None:
    give(stored, "staff:ann", Rating.DOWN, "wrong")
    lines, _ = responses._read_batch(StoredResponse.objects.filter(rating="down"), None)
    (entry,) = (json.loads(line)["feedback"] for line in lines.splitlines())
    assert [(one["author"], one["rating"], one["note"]) for one in entry] == [
        ("staff:ann", "down", "wrong")
    ]


def test_the_authors_of_an_answer_are_bounded(admin: Client, stored: StoredResponse) -> None:
    for number in range(MAX_AUTHORS):
        give(stored, f"staff:{number}", Rating.UP, "")
    answer = admin.post(f"{LIST}{stored.pk}/feedback/", {"rating": "up"}, follow=True)
    assert "100 authors have given feedback already." in answer.content.decode()
    assert get_user_model().objects.filter(username="admin").exists()
    stored.refresh_from_db()
    assert len(stored.feedback) == MAX_AUTHORS
