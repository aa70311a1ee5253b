"""Content that is kept for debugging: what of it, for how long, and who sees it."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Iterator

import pytest
from django.test import Client
from django.utils import timezone

from inference_site.accounts.models import ApiKey
from inference_site.core.domain.deltas import TextDelta, ToolCallDelta
from inference_site.core.domain.request import GenerationRequest, Message
from inference_site.core.site_settings.models import SiteSettings, forget
from inference_site.runs.kept_content import models
from inference_site.runs.kept_content.models import Keeper, KeptContent, keeper_for, prune
from tests.generations.rows import create_generation

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _settings_are_read_anew() -> Iterator[None]:
    forget()
    yield
    forget()


def keep_for(hours: int | None) -> None:
    SiteSettings.objects.update_or_create(pk=1, defaults={"debug_content_hours": hours})
    forget()


def asked(*texts: str) -> GenerationRequest:
    return GenerationRequest("m", messages=tuple(Message("user", text) for text in texts))


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    assert keeper_for("chatcmpl-1", asked("hi")) is None
    keep_for(1)
    assert keeper_for("chatcmpl-1", asked("hi")) is not None


def test_the_prompt_and_the_answer_are_kept_with_calls() -> None:
    keep_for(1)
    keeper = Keeper("chatcmpl-1", asked("one", "two\0 \ud800"))
    for delta in (TextDelta("It "), TextDelta("rains."), ToolCallDelta(0, '{"a": 1}', name="f")):
        keeper.take(delta)
    keeper.save()
    kept = KeptContent.objects.get()
    assert [turn["content"] for turn in kept.prompt] == ["one", "two\ufffd ?"]
    assert kept.answer == 'It rains.\nf: {"a": 1}'


def test_a_long_prompt_loses_its_beginning_and_a_long_answer_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_for(1)
    monkeypatch.setattr(models, "MAX_CHARACTERS", 5)
    keeper = Keeper("chatcmpl-1", asked("gone", "abcd", "xyz"))
    for _ in range(4):
        keeper.take(TextDelta("12"))
    keeper.save()
    kept = KeptContent.objects.get()
    assert [turn["content"] for turn in kept.prompt] == ["cd", "xyz"]
    assert kept.answer == "12121"


def test_the_turns_of_a_prompt_are_bounded_though_they_have_no_text() -> None:
    keep_for(1)
    Keeper("chatcmpl-1", asked(*[""] * 5_000, "the last")).save()
    kept = KeptContent.objects.get()
    assert len(kept.prompt) == models.MAX_TURNS
    assert kept.prompt[-1]["content"] == "the last"


def test_of_two_attempts_the_later_one_is_kept() -> None:
    keep_for(1)
    for answer in ("first", "second"):
        keeper = Keeper("chatcmpl-1", asked("hi"))
        keeper.take(TextDelta(answer))
        keeper.save()
    assert KeptContent.objects.get().answer == "second"


def test_a_run_that_ends_after_the_setting_was_switched_off_is_not_kept() -> None:
    keep_for(1)
    keeper = keeper_for("chatcmpl-1", asked("hi"))
    assert keeper is not None
    keep_for(None)
    keeper.save()
    assert not KeptContent.objects.exists()


@pytest.mark.parametrize(("hours", "age_h"), [(None, 0), (2, 3)])
def test_what_is_to_be_deleted_is_not_shown(
    admin: Client, api_key: tuple[ApiKey, str], hours: int | None, age_h: int
) -> None:
    keep_for(hours)
    row = create_generation(api_key[0], public_id="chatcmpl-1")
    at = timezone.now() - dt.timedelta(hours=age_h)
    KeptContent.objects.create(public_id="chatcmpl-1", answer="an answer", created_at=at)
    for address in ("/admin/requests/", f"/admin/generations/generation/{row.pk}/change/"):
        assert "an answer" not in admin.get(address).content.decode(), address


def test_it_is_deleted_after_its_hours_and_all_of_it_when_nothing_is_to_be_kept() -> None:
    now = timezone.now()
    for number, hours in enumerate((3, 1, 0)):
        at = now - dt.timedelta(hours=hours)
        KeptContent.objects.create(public_id=f"chatcmpl-{number}", created_at=at)
    keep_for(2)
    assert prune(math.inf) == 1
    keep_for(None)
    assert prune(math.inf) == 2


@pytest.mark.parametrize("may_see", [False, True])
def test_it_is_shown_to_those_who_may_see_content(
    staff: Callable[..., Client], api_key: tuple[ApiKey, str], may_see: bool
) -> None:
    keep_for(1)
    row = create_generation(api_key[0], public_id="chatcmpl-1")
    turn = {"role": "user", "content": "a <secret> question"}
    KeptContent.objects.create(public_id="chatcmpl-1", prompt=[turn], answer="an answer")
    more = ["responses_api.view_content"] if may_see else []
    browser = staff("generations.view_generation", *more)
    for address in ("/admin/requests/", f"/admin/generations/generation/{row.pk}/change/"):
        text = browser.get(address).content.decode()
        assert ("a &lt;secret&gt; question" in text) is may_see, address
        assert ("an answer" in text) is may_see, address
