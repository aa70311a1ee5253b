"""Rate limits, on a real Redis: what is counted, given back, corrected and told."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import redis.exceptions

from inference_site.accounts import rate_limits
from inference_site.accounts.keys import Caller, Limits, find_caller
from inference_site.accounts.models import LIMITS, ApiKey, ModelLimit
from inference_site.accounts.rate_limits import (
    AccountedGeneration,
    Window,
    correct,
    give_back,
    hit,
)
from inference_site.core.errors.api_errors import RateLimitError
from inference_site.core.storage.redis import site_client
from inference_site.gateway.organization_limits import amounts_by_model, change_model_limits

Key = tuple[ApiKey, str]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    for name in site_client().scan_iter("limit*"):
        site_client().delete(name)


NONE = dict.fromkeys(LIMITS)
OfKey, OfProject = partial(Limits, "key"), partial(Limits, "project")


def caller(*limits: Limits) -> Caller:
    return Caller(1, 2, limits=limits)


def remaining(windows: list[Window]) -> list[int]:
    return [window.remaining for window in windows]


def test_requests_are_counted_up_to_the_limit() -> None:
    one = caller(OfKey(requests_per_minute=3))
    assert [remaining(hit(one, 0)) for _ in range(3)] == [[2], [1], [0]]
    with pytest.raises(RateLimitError, match="3 requests a minute of this key") as caught:
        hit(one, 0)
    assert 1 <= (caught.value.retry_after_s or 0) <= 60


def test_a_limit_of_a_project_applies_to_all_its_keys() -> None:
    limits = (OfProject(requests_per_minute=2),)
    hit(Caller(1, 2, limits=limits), 0)
    hit(Caller(9, 2, limits=limits), 0)
    with pytest.raises(RateLimitError, match="of this project"):
        hit(Caller(3, 2, limits=limits), 0)
    hit(Caller(1, 4, limits=limits), 0)


def test_tokens_are_counted_and_a_refused_request_counts_none() -> None:
    one = caller(OfKey(tokens_per_minute=100))
    assert remaining(hit(one, 60)) == [40]
    with pytest.raises(RateLimitError, match="100 tokens a minute") as caught:
        hit(one, 41)
    assert caught.value.envelope["error"]["type"] == "tokens", "as OpenAI's API says it"
    assert remaining(hit(one, 40)) == [0]


def test_a_request_larger_than_the_limit_needs_all_of_it() -> None:
    one = caller(OfKey(tokens_per_minute=100))
    assert remaining(hit(one, 5000)) == [0]


def test_a_limit_that_is_changed_keeps_what_was_counted() -> None:
    for _ in range(3):
        hit(caller(OfKey(3, 100)), 30)
    raised = caller(OfKey(4, 130))
    assert remaining(hit(raised, 30)) == [0, 10]
    for changed in (OfKey(4, 1000), OfKey(2, 1000), OfKey(None, 80)):
        with pytest.raises(RateLimitError):
            hit(caller(changed), 20)
    give_back(raised, 30, "")
    assert remaining(hit(raised, 40)) == [0, 0]


def test_a_limit_of_a_model_counts_its_requests_beside_the_limit_for_all() -> None:
    of_model = OfKey(2, 50, model="large"), OfProject(9, None, model="large")
    one = caller(OfKey(4, 100), *of_model)
    assert remaining(hit(one, 30, "small")) == [3, 70]
    assert remaining(hit(one, 30, "large")) == [2, 40, 1, 20, 8]
    with pytest.raises(RateLimitError, match="50 tokens a minute of this key for the model `larg"):
        hit(one, 30, "large")
    give_back(one, 30, "large")
    assert remaining(hit(one, 10, "large")) == [2, 60, 1, 40, 8]
    assert remaining(hit(one, None)) == [1], "A write names no model."


def test_headers_tell_of_the_limit_with_the_least_remaining_for_the_model() -> None:
    one = caller(OfKey(5, 100), OfKey(3, 1_000, model="a/b:c"))
    told = rate_limits.count_request(one, 10, "a/b:c")
    assert told["x-ratelimit-limit-requests"] == "3"
    assert told["x-ratelimit-limit-tokens"] == "100"
    assert rate_limits.count_request(one, 10, "demo")["x-ratelimit-limit-requests"] == "5"


def test_a_change_of_the_limits_of_models_notes_only_those_that_it_changes(api_key: Key) -> None:
    """Each of 1,000 changes of a project with 1,000 wrote an entry of 170 KB."""
    project, of_all = (
        api_key[0].project,
        {f"m{number}": {**NONE, "requests_per_minute": 5} for number in range(9)},
    )

    def change_to(wanted: dict[str, Any]) -> list[str]:
        return change_model_limits(project, amounts_by_model(project), wanted)

    assert len(change_to(of_all)[0].split("requests")) == 10
    assert change_to(of_all) == []
    changed = {**of_all, "m3": {**NONE, "requests_per_minute": 6}}
    assert change_to(changed) == [
        "limits of models: m3: requests per minute 5 → m3: requests per minute 6"
    ]
    del changed["m4"]
    assert change_to(changed) == ["limits of models: m4: requests per minute 5 → none"]
    assert {*amounts_by_model(project)} == {*changed}


def pass_time(seconds: float) -> None:
    """Make the counts older."""
    for name in site_client().scan_iter("limit*"):
        site_client().pexpire(name, int(site_client().pttl(name) - seconds * 1000))


def test_a_window_resets_when_nothing_is_counted_any_more() -> None:
    one = caller(OfKey(requests_per_minute=60))
    assert hit(one, 0)[0].reset_s == pytest.approx(120, abs=1)
    pass_time(80)  # The count is that of the previous minute now.
    assert hit(one, 0)[0].reset_s == pytest.approx(100, abs=1)


@pytest.mark.parametrize(
    ("used", "passed_s", "tokens", "wait_s"),
    [
        (90, 65, 50, 21),  # Of the previous minute 50 tokens count when 34 s of it are left.
        (90, 65, 90, 48),
        (90, 0, 50, 86),  # The same, after the rest of this minute.
        (100, 0, 100, 120),
        (100, 1, 1, 59),
    ],
)
def test_a_refusal_says_when_the_request_has_room(
    used: int, passed_s: float, tokens: int, wait_s: int
) -> None:
    one, began = caller(OfKey(tokens_per_minute=100)), time.monotonic()
    hit(one, used)
    pass_time(passed_s)
    with pytest.raises(RateLimitError) as caught:
        hit(one, tokens)
    took_s, told_s = time.monotonic() - began, caught.value.retry_after_s
    assert told_s is not None
    assert wait_s - 1 - took_s <= told_s <= wait_s
    assert f"try again in {rate_limits.duration(told_s)}." in caught.value.message
    pass_time(told_s + 0.001)  # The minute ends after its last millisecond.
    hit(one, tokens)


def test_an_undone_count_is_available_again() -> None:
    one = caller(OfKey(2, 100), OfProject(2, 100))
    hit(one, 30)
    give_back(one, 30, "")
    assert remaining(hit(one, 100)) == [1, 0, 1, 0]


def test_a_refusal_by_the_project_does_not_count_for_the_key() -> None:
    full = Caller(9, 2, limits=(OfProject(1, 100),))
    hit(full, 100)
    one = caller(OfKey(5, 100), OfProject(1, 100))
    with pytest.raises(RateLimitError):
        hit(one, 50)
    with pytest.raises(RateLimitError) as caught:
        hit(caller(OfKey(5, 90), OfProject(6, 100)), 50)
    told = caught.value.headers
    assert told["x-ratelimit-remaining-requests"] == "5"
    assert told["x-ratelimit-remaining-tokens"] == "0"
    alone = caller(OfKey(5, 100))
    assert remaining(hit(alone, 1)) == [4, 99]


def used(key: ApiKey, reserved: int, tokens: int, age_s: float = 1) -> AccountedGeneration:
    created = dt.datetime.fromtimestamp(time.time() - age_s, dt.UTC)
    return AccountedGeneration(key.project_id, key.pk, "demo", created, reserved, tokens)


@pytest.mark.parametrize(
    ("tokens", "age_s", "left"),
    [
        (10, 1, 89),  # Less than the 50 that were estimated.
        (80, 1, 19),  # More.
        (10, 61, 49),  # What was estimated has left the window by itself.
        (80, 61, 19),  # What was used beyond it has not.
    ],
)
def test_the_estimate_is_corrected_by_what_was_used(
    api_key: Key, tokens: int, age_s: float, left: int
) -> None:
    key = api_key[0]
    ApiKey.objects.filter(pk=key.pk).update(tokens_per_minute=100)
    one = Caller(key.pk, key.project_id, limits=(OfKey(tokens_per_minute=100),))
    hit(one, 50)
    correct([used(key, 50, tokens, age_s)], time.time())
    assert remaining(hit(one, 1)) == [left]


def test_the_estimate_is_corrected_in_the_limits_of_the_model_that_was_used(api_key: Key) -> None:
    key = api_key[0]
    ModelLimit.objects.create(project=key.project, model="demo", tokens_per_minute=100)
    for model in ("demo", "other"):
        fields = {"project": key.project, "api_key": key, "model": model}
        ModelLimit.objects.create(**fields, tokens_per_minute=90)
    one = find_caller(api_key[1])
    assert one is not None
    assert remaining(hit(one, 50, "demo")) == [40, 50]
    assert remaining(hit(one, 50, "other")) == [40]
    correct([used(key, 50, 10)], time.time())
    assert remaining(hit(one, 1, "demo")) == [79, 89]
    assert remaining(hit(one, 1, "other")) == [39]


def test_a_correction_gives_no_credit(api_key: Key) -> None:
    """An estimate that is larger than the limit took the limit, and no more is given back."""
    key = api_key[0]
    ApiKey.objects.filter(pk=key.pk).update(tokens_per_minute=100)
    one = Caller(key.pk, key.project_id, limits=(OfKey(tokens_per_minute=100),))
    hit(one, 5000)
    correct([used(key, 5000, 10)], time.time())
    assert remaining(hit(one, 1)) == [89]
    correct([used(key, 90, 0), used(key, 90, 0)], time.time())
    assert remaining(hit(one, 1)) == [99]


def test_an_estimate_is_corrected_in_the_minute_in_which_it_was_counted(api_key: Key) -> None:
    key = api_key[0]
    ApiKey.objects.filter(pk=key.pk).update(tokens_per_minute=100)
    one = Caller(key.pk, key.project_id, limits=(OfKey(tokens_per_minute=100),))
    hit(one, 60)
    pass_time(64)
    hit(one, 20)
    correct([used(key, 60, 10, age_s=64)], time.time())
    assert remaining(hit(one, 1)) == [70], "of the 10, nine count still"
    correct([used(key, 10, 0, age_s=64), used(key, 20, 0, age_s=0)], time.time())
    assert remaining(hit(one, 1)) == [98]


def test_the_headers_describe_the_window_with_the_least_left() -> None:
    windows = [
        Window("requests", 10, 5, 59.2),
        Window("tokens", 1000, 10, 0.25),
        Window("requests", 100, 3, 12),
    ]
    assert rate_limits.headers(windows) == {
        "x-ratelimit-limit-requests": "100",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": "12s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "10",
        "x-ratelimit-reset-tokens": "250ms",
    }
    assert rate_limits.headers([]) == {}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0004, "1ms"), (1, "1s"), (59.01, "1m0s"), (90, "1m30s")]
)
def test_durations_are_written_as_the_api_does(seconds: float, text: str) -> None:
    assert rate_limits.duration(seconds) == text


@pytest.fixture
def no_redis(settings: Any) -> Iterator[None]:
    settings.RATE_LIMIT_URL = "redis://127.0.0.1:1/0"
    rate_limits.limit_storage.cache_clear()
    yield
    rate_limits.limit_storage.cache_clear()


@pytest.mark.usefixtures("no_redis")
def test_without_redis_requests_pass_or_fail_as_configured(settings: Any) -> None:
    one = caller(OfKey(requests_per_minute=1))
    settings.RATE_LIMITS_FAIL_OPEN = True
    assert hit(one, 0) == []
    settings.RATE_LIMITS_FAIL_OPEN = False
    with pytest.raises(redis.exceptions.ConnectionError):
        hit(one, 0)
    give_back(one, 0, "")
