"""Usage over HTTP: it adds up to what the answers said, for whoever may see it."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai
import pytest
from openai.types.admin.organization.usage_completions_response import (
    DataResultOrganizationUsageCompletionsResult,
)

from tests.e2e.keys import MadeKey, make_key
from tests.served_stack import ServedStack, wait_until

ORGANIZATION = "/v1/organization/usage/completions"


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": "Hi"}]
    return client.chat.completions.create(
        **{"model": "demo", "messages": messages, "max_tokens": 5, **fields}
    )


@pytest.fixture(scope="module")
def used(stack: ServedStack) -> tuple[MadeKey, Any]:
    """A key, and the usage of its one answer, which is accounted."""
    key = make_key(stack)
    usage = chat(stack.client(key.secret)).usage
    wait_for_requests(stack, key, 1)
    return key, usage


def wait_for_requests(stack: ServedStack, key: MadeKey, count: int) -> None:
    with key.http(stack) as http:
        wait_until(
            lambda: results(http)[-1:] and results(http)[-1]["num_model_requests"] == count,
            120,
            "the accounting",
        )


def results(http: httpx.Client, path: str = "/v1/usage", **params: Any) -> list[dict[str, Any]]:
    answer = http.get(path, params=params)
    assert answer.status_code == 200, answer.text
    return [result for bucket in answer.json()["data"] for result in bucket["results"]]


@pytest.mark.parametrize("width", ["1m", "1h", "1d"])
def test_a_project_sees_what_it_used(
    stack: ServedStack, used: tuple[MadeKey, Any], width: str
) -> None:
    key, usage = used
    with key.http(stack) as http:
        since = int(time.time()) - 1800
        [result] = results(http, bucket_width=width, start_time=since)
    assert result["input_tokens"] == usage.prompt_tokens
    assert result["output_tokens"] == usage.completion_tokens
    assert result["num_model_requests"] == 1
    assert result["project_id"] is result["model"] is None


@pytest.mark.parametrize(("width", "buckets"), [("1m", 60), ("1h", 24), ("1d", 7)])
def test_without_a_time_the_buckets_until_now_are_one_page(
    stack: ServedStack, used: tuple[MadeKey, Any], width: str, buckets: int
) -> None:
    key, usage = used
    with key.http(stack) as http:
        page = http.get("/v1/usage", params={"bucket_width": width}).json()
        ended = int(time.time()) // 86_400 * 86_400
        before = http.get("/v1/usage", params={"bucket_width": width, "end_time": ended}).json()
    assert (len(page["data"]), page["has_more"]) == (buckets, False)
    [result] = [result for bucket in page["data"] for result in bucket["results"]]
    assert result["output_tokens"] == usage.completion_tokens
    assert (len(before["data"]), before["data"][-1]["end_time"]) == (buckets, ended)


def test_a_project_sees_nothing_of_others(stack: ServedStack, used: tuple[MadeKey, Any]) -> None:
    stranger = make_key(stack)
    with stranger.http(stack) as http:
        assert results(http) == []
        assert results(http, api_key_ids=f"key_{used[0].id}") == []


def test_the_official_client_reads_the_usage_of_all(
    stack: ServedStack, used: tuple[MadeKey, Any]
) -> None:
    key, usage = used
    admin = make_key(stack, "admin")
    client = openai.OpenAI(base_url=f"{stack.url}/v1", admin_api_key=admin.secret, api_key="-")
    with client:
        page = client.admin.organization.usage.completions(
            start_time=int(time.time()) - 86_400,
            group_by=["project_id", "api_key_id", "model"],
            limit=2,
        )
    found = [
        result
        for bucket in page.data
        for result in bucket.results
        if getattr(result, "project_id", None) == f"proj_{key.project_id}"
    ]
    [result] = found
    assert isinstance(
        result,
        DataResultOrganizationUsageCompletionsResult,
    )
    assert (result.api_key_id, result.model) == (f"key_{key.id}", "demo")
    assert result.input_tokens == usage.prompt_tokens
    assert result.num_model_requests == 1


def test_it_is_narrowed_by_project_key_and_model(
    stack: ServedStack, used: tuple[MadeKey, Any]
) -> None:
    key, _ = used
    since = int(time.time()) - 86_400
    mine = {"project_ids[]": f"proj_{key.project_id}", "start_time": since}
    with make_key(stack, "admin").http(stack) as http:
        assert results(http, ORGANIZATION, **mine)[0]["num_model_requests"] == 1
        assert results(http, ORGANIZATION, **mine, models="demo")
        for nothing in ({"models": "other"}, {"api_key_ids": "key_0"}, {"user_ids": "u"}):
            assert results(http, ORGANIZATION, **mine, **nothing) == []


def test_buckets_are_paged_without_gap_or_overlap(stack: ServedStack) -> None:
    now = int(time.time())
    query: dict[str, Any] = {"start_time": now - 5 * 3600, "bucket_width": "1h", "limit": 2}
    starts: list[int] = []
    with make_key(stack, "admin").http(stack) as http:
        while True:
            page = http.get(ORGANIZATION, params=query).json()
            starts += [bucket["start_time"] for bucket in page["data"]]
            if not page["has_more"]:
                break
            query["page"] = page["next_page"]
    assert page["next_page"] is None
    first = (now - 5 * 3600) // 3600 * 3600
    assert starts == [first + 3600 * i for i in range(6)]


_MINUTES = """
INSERT INTO usage_usagerollup (period, start, project_id, api_key_id, model, requests, completed,
    failed, cancelled, input_tokens, cached_tokens, output_tokens, reasoning_tokens, queue_ms,
    prefill_ms, decode_ms, cost)
SELECT 'minute', to_timestamp(%s) + n * interval '1 minute', %s, key, 'm',
    1, 1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0 FROM generate_series(0, %s) n, generate_series(1, %s) key
"""


@pytest.mark.parametrize(("keys", "minutes", "pages"), [(50, 40, [30, 10]), (1600, 4, [1, 1, 1])])
def test_a_page_ends_before_it_has_too_many_results(
    stack: ServedStack, keys: int, minutes: int, pages: list[int]
) -> None:
    """At a whole bucket, and the next page goes on there; one bucket is whole in any case."""
    key, since = make_key(stack), int(time.time()) // 60 * 60 - 3 * 3600
    stack.sql(_MINUTES, since, key.project_id, minutes - 1, keys)
    asked: dict[str, Any] = {"bucket_width": "1m", "limit": 1440, "group_by": "api_key_id"}
    asked |= {"start_time": since, "end_time": since + 60 * minutes}
    buckets: list[dict[str, Any]] = []
    with key.http(stack) as http:
        for length in pages:
            page = http.get("/v1/usage", params=asked).json()
            assert len(page["data"]) == length
            buckets += page["data"]
            asked["page"] = page["next_page"]
    assert [b["start_time"] for b in buckets] == [since + 60 * n for n in range(sum(pages))]
    # Else the roll-ups would not add up to the usage log, which test_limits.py checks.
    stack.sql("DELETE FROM usage_usagerollup WHERE project_id = %s", key.project_id)
    assert {len(bucket["results"]) for bucket in buckets} == {keys}
    assert page["has_more"] == (len(buckets) < minutes)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({}, "start_time"),
        ({"start_time": "soon"}, "start_time"),
        ({"start_time": 5, "end_time": 4}, "end_time"),
        ({"start_time": 5, "bucket_width": "1w"}, "bucket_width"),
        ({"start_time": 5, "limit": 32}, "limit"),
        ({"start_time": 5, "limit": 0}, "limit"),
        ({"start_time": 5, "group_by": "colour"}, "group_by[0]"),
        ({"start_time": 5, "page": "x"}, "page"),
    ],
)
def test_a_bad_query_is_told(stack: ServedStack, query: dict[str, Any], param: str) -> None:
    with make_key(stack, "admin").http(stack) as http:
        answer = http.get(ORGANIZATION, params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_the_log_has_the_times_and_the_cost_of_a_generation(stack: ServedStack) -> None:
    key = make_key(stack)
    made = chat(stack.client(key.secret))
    row = stack.row(made.id)
    assert row["prefill_ms"] > 0
    assert row["decode_ms"] > 0
    usage = made.usage
    cached = usage.prompt_tokens_details.cached_tokens
    millionths = 2 * (usage.prompt_tokens - cached) + cached + 10 * usage.completion_tokens
    assert float(row["cost"]) == pytest.approx(millionths / 1e6)
    wait_for_requests(stack, key, 1)
    with key.http(stack) as http:
        assert results(http)[-1]["cost"] == pytest.approx(millionths / 1e6)


def test_cancelled_and_failed_requests_are_accounted_as_such(stack: ServedStack) -> None:
    key = make_key(stack)
    client = stack.client(key.secret)
    with pytest.raises(openai.APIError):
        chat(client, model="scripted", messages=[{"role": "user", "content": '[{"fail": "x"}]'}])
    with (
        stack.file("slow"),
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Count"}],
            stream=True,
            extra_body={"ignore_eos": True},
        ) as stream,
    ):
        first = next(iter(stream))
        for _ in range(4):
            next(stream)
        stream.close()
        wait_until(lambda: stack.row(first.id)["status"] == "cancelled", 120, "cancelled")
    with key.http(stack) as http:
        wait_until(
            lambda: results(http) and results(http)[-1]["num_model_requests"] == 2, 120, "it"
        )
        result = results(http)[-1]
    assert (result["num_failed_requests"], result["num_cancelled_requests"]) == (1, 1)
    assert result["output_tokens"] > 0, "what was cancelled was used all the same"


def test_usage_is_counted_by_end_user_and_by_the_chosen_keys_of_metadata(
    stack: ServedStack,
) -> None:
    stack.sql(
        "INSERT INTO site_settings_sitesettings (id, updated_at, usage_tags) "
        "VALUES (1, now(), '{team}') "
        "ON CONFLICT (id) DO UPDATE SET usage_tags = excluded.usage_tags RETURNING id"
    )
    time.sleep(2.5)  # Processes read the settings again after two seconds.
    key = make_key(stack)
    client = stack.client(key.secret)
    metadata = {"team": "red", "other": "x"}
    used = [
        chat(client, user="ann", metadata=metadata).usage.total_tokens,
        chat(client, safety_identifier="bob", user="ann").usage.total_tokens,
    ]
    answer = client.responses.create(
        model="demo", input="Hi", max_output_tokens=5, metadata=metadata, store=False
    )
    assert answer.usage is not None
    used.append(answer.usage.total_tokens)
    with key.http(stack) as http:
        message = {
            "model": "demo",
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "Hi"}],
        }
        sent = http.post("/v1/messages", json={**message, "metadata": {"user_id": "cyd"}}).json()
        parts = ("input_tokens", "cache_read_input_tokens", "output_tokens")
        used.append(sum(sent["usage"][name] or 0 for name in parts))
    wait_for_requests(stack, key, 4)
    rows = stack.sql(
        "SELECT dimension, value, input_tokens + output_tokens FROM usage_dimensionrollup "
        "WHERE period = 'day' AND project_id = %s",
        key.project_id,
    )
    assert {(dimension, value): tokens for dimension, value, tokens in rows} == {
        ("user", "ann"): used[0],
        ("user", "bob"): used[1],
        ("user", "cyd"): used[3],
        ("tag:team", "red"): used[0] + used[2],
    }
