"""Limits and budgets of keys, over HTTP: what is over them is refused, and says so."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.keys import MadeKey, insert, make_budget, make_key
from tests.e2e.scripts import ENDLESS
from tests.served_stack import ServedStack, wait_until

CHAT = "/v1/chat/completions"


def ask(max_tokens: int | None = 5, model: str = "demo", text: str = "Hi", **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, **fields}


def headers_of(response: httpx.Response) -> dict[str, str]:
    prefix = "x-ratelimit-"
    return {k.removeprefix(prefix): v for k, v in response.headers.items() if k.startswith(prefix)}


def test_requests_a_minute_are_limited_and_told(stack: ServedStack) -> None:
    key = make_key(stack, requests_per_minute=2, project_requests_per_minute=100)
    with key.http(stack) as http:
        first, second, third = (http.post(CHAT, json=ask()) for _ in range(3))
    assert [first.status_code, second.status_code, third.status_code] == [200, 200, 429]
    told = headers_of(first)
    assert (told["limit-requests"], told["remaining-requests"]) == ("2", "1")
    assert headers_of(second)["remaining-requests"] == "0"
    assert third.json()["error"]["code"] == "rate_limit_exceeded"
    assert "2 requests a minute of this key" in third.json()["error"]["message"]
    assert 1 <= int(third.headers["retry-after"]) <= 60
    assert headers_of(third)["remaining-requests"] == "0"


def test_writes_that_generate_nothing_count_as_requests(stack: ServedStack) -> None:
    key = make_key(stack, project_requests_per_minute=6, tokens_per_minute=1)
    with key.http(stack) as http:
        made = http.post("/v1/conversations", json={})
        path = f"/v1/conversations/{made.json()['id']}"
        item = {"type": "message", "role": "user", "content": "Hi"}
        assert headers_of(made)["remaining-requests"] == "5"
        added = http.post(f"{path}/items", json={"items": [item]}).json()["data"][0]["id"]
        assert http.post(path, json={"metadata": {"a": "b"}}).status_code == 200
        assert http.delete(f"{path}/items/{added}").status_code == 200
        assert http.post(f"{CHAT}/chatcmpl-none", json={"metadata": {}}).status_code == 404
        assert http.get(path).status_code == 200
        assert http.delete(path).status_code == 200
        refused = http.post("/v1/conversations", json={})
        assert http.get(path).status_code == 404  # Reading is free.
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "6 requests a minute of this project" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 60


def test_without_limits_there_are_no_headers(http: httpx.Client) -> None:
    assert headers_of(http.post(CHAT, json=ask())) == {}


def test_streams_tell_the_limits_too(stack: ServedStack) -> None:
    key = make_key(stack, requests_per_minute=5, tokens_per_minute=1000)
    with key.http(stack) as http, http.stream("POST", CHAT, json=ask(stream=True)) as response:
        response.read()
    told = headers_of(response)
    assert told["remaining-requests"] == "4"
    assert 900 < int(told["remaining-tokens"]) < 1000


def test_the_official_client_raises_its_rate_limit_error(stack: ServedStack) -> None:
    key = make_key(stack, requests_per_minute=1)
    client = stack.client(key.secret)
    client.responses.create(model="demo", input="Hi", max_output_tokens=5)
    with pytest.raises(openai.RateLimitError) as caught:
        client.responses.create(model="demo", input="Hi", max_output_tokens=5)
    assert caught.value.code == "rate_limit_exceeded"


def test_tokens_a_minute_are_corrected_by_what_was_used(stack: ServedStack) -> None:
    """What was estimated for an answer that turned out short is there for the next request."""
    key = make_key(stack, tokens_per_minute=1000)
    with key.http(stack) as http:
        codes = [http.post(CHAT, json=ask(900, "scripted")).status_code for _ in range(6)]
    # One may come between the commit of the accounting by beat and its correction of the limit.
    assert codes.count(200) >= 5


def test_a_refusal_says_which_limit_was_reached(stack: ServedStack) -> None:
    key = make_key(stack, tokens_per_minute=1000, requests_per_minute=1)
    endless = ask(950, "scripted", ENDLESS, stream=True)
    with key.http(stack) as http, http.stream("POST", CHAT, json=endless):
        assert http.post(CHAT, json=ask(900)).json()["error"]["type"] == "requests"
    key = make_key(stack, tokens_per_minute=1000)
    with key.http(stack) as http, http.stream("POST", CHAT, json=endless):
        assert http.post(CHAT, json=ask(900)).json()["error"]["type"] == "tokens"


def test_an_answer_that_ends_in_the_next_minute_is_corrected_too(stack: ServedStack) -> None:
    key = make_key(stack, tokens_per_minute=1000)
    across = ask(900, "scripted", '[{"text": "a"}, {"sleep_ms": 500}]')
    with key.http(stack) as http, stack.redis() as counts:
        assert http.post(CHAT, json=ask(1)).status_code == 200
        counts.pexpire(f"limit:{{tokens/key/{key.id}}}", 60_300)  # Its minute ends in 0.3 s.
        assert http.post(CHAT, json=across).status_code == 200
        wait_until(lambda: http.post(CHAT, json=ask(800)).status_code == 200, 20, "the correction")


def test_a_request_that_is_refused_for_another_reason_counts_nothing(stack: ServedStack) -> None:
    key = make_key(stack, requests_per_minute=1)
    with key.http(stack) as http:
        assert http.post(CHAT, json=ask(model="no-such")).status_code == 404
        assert http.post(CHAT, json=ask(temperature=9)).status_code == 400
        assert http.post(CHAT, json=ask()).status_code == 200


def statuses(stack: ServedStack, key: MadeKey, count: int, **fields: Any) -> list[httpx.Response]:
    with key.http(stack) as http, ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: http.post(CHAT, json=ask(**fields)), range(count)))


def test_no_more_run_at_one_time_than_may(stack: ServedStack) -> None:
    key = make_key(stack, concurrent_runs=2, requests_per_minute=1000)
    endless = ask(model="scripted", text=ENDLESS, max_tokens=None, stream=True)

    def begin(_: int) -> httpx.Response:
        return http.send(http.build_request("POST", CHAT, json=endless), stream=True)

    with key.http(stack) as http, ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(begin, range(12)))  # None ends before the last has come.
        codes = sorted(answer.status_code for answer in answers)
        refused = [answer for answer in answers if answer.status_code == 429]
        told = {json.loads(answer.read())["error"]["message"] for answer in refused}
        assert {headers_of(answer).get("limit-requests") for answer in refused} == {"1000"}
        again = http.post(CHAT, json=ask())
        assert (again.status_code, headers_of(again)["remaining-requests"]) == (429, "998")
        for answer in answers:
            answer.close()
        assert (codes.count(200), codes.count(429)) == (2, 10)
        assert len(told) == 1
        assert "2 runs at one time of this key" in told.pop()
        wait_until(lambda: http.post(CHAT, json=ask()).status_code == 200, 120, "their end")


def test_limits_for_a_model_refuse_its_requests_and_no_others(stack: ServedStack) -> None:
    """Concurrent runs, requests and tokens, of the key and of the project."""
    key = make_key(stack)

    def limit(model: str, api_key_id: int | None = None, **limits: int) -> None:
        row = {"project_id": key.project_id, "api_key_id": api_key_id, "model": model, **limits}
        names, marks = ", ".join(row), ", ".join(["%s"] * len(row))
        stack.sql(f"INSERT INTO accounts_modellimit ({names}) VALUES ({marks})", *row.values())  # noqa: S608

    limit("scripted", key.id, concurrent_runs=2)
    limit("scripted", requests_per_minute=100)
    limit("demo", tokens_per_minute=300)
    endless = ask(model="scripted", text=ENDLESS, max_tokens=None, stream=True)

    def begin(_: int) -> httpx.Response:
        return http.send(http.build_request("POST", CHAT, json=endless), stream=True)

    with key.http(stack) as http, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(begin, range(6)))
        codes = [answer.status_code for answer in answers]
        (told,) = {
            json.loads(answer.read())["error"]["message"]
            for answer in answers
            if answer.status_code == 429
        }
        others = [http.post(CHAT, json=ask(max_tokens=4)) for _ in range(2)]
        full = http.post(CHAT, json=ask(max_tokens=260))
        for answer in answers:
            answer.close()
        assert (codes.count(200), codes.count(429)) == (2, 4)
        assert "2 runs at one time of this key for the model `scripted`" in told
        assert [answer.status_code for answer in others] == [200, 200]
        assert headers_of(others[0])["limit-tokens"] == "300"
        assert "limit-requests" not in headers_of(others[0])
        assert full.status_code == 429, "Estimates count until they are corrected."
        error = full.json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "tokens")
        assert "300 tokens a minute of this project for the model `demo`" in error["message"]
        wait_until(
            lambda: http.post(CHAT, json=ask(model="scripted")).status_code == 200, 120, "their end"
        )
        assert headers_of(http.post(CHAT, json=ask(model="scripted")))["limit-requests"] == "100"


def test_the_indexing_of_files_is_no_run(stack: ServedStack) -> None:
    key = make_key(stack, concurrent_runs=1)
    with key.http(stack) as http:
        made = stack.row(http.post(CHAT, json=ask()).json()["id"])
        # No worker has its model, so it waits.
        waiting = {"status": "queued", "finished_at": None, "claimed_at": None, "model": "none"}
        row = {**made, **waiting, "public_id": f"emb_{key.id}", "kind": "vector_store.embedding"}
        row |= {"background": True, "is_accounted": False}
        del row["id"], row["created_at"]
        pk = insert(stack, "generations_generation", **row)
        assert http.post(CHAT, json=ask()).status_code == 200
        stack.sql("UPDATE generations_generation SET background = false WHERE id = %s", pk)
        assert http.post(CHAT, json=ask()).status_code == 429
        stack.sql("DELETE FROM generations_generation WHERE id = %s", pk)


@pytest.mark.parametrize("count", [24, pytest.param(80, marks=pytest.mark.stress)])
def test_a_budget_is_not_exceeded_by_more_than_what_is_in_flight(
    stack: ServedStack, count: int
) -> None:
    key = make_key(stack)
    make_budget(stack, key, 10)
    answers = statuses(stack, key, count, max_tokens=20)
    done = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code != 200]
    used = [answer.json()["usage"]["total_tokens"] for answer in done]
    assert done, "the first fits"
    # Each was let in when nothing else was in flight, and something of the budget was left.
    assert sum(used) - used[-1] < 10
    assert {answer.status_code for answer in refused} == {429}
    assert {why_refused(answer) for answer in refused} <= {RESERVED, USED_UP}
    wait_until(lambda: spend(stack, key) == (sum(used), 0), 120, "the settlement")
    assert "add up" in stack.manage("usage", "--check")


def test_many_small_requests_use_a_budget_up_and_no_more(stack: ServedStack) -> None:
    key = make_key(stack)
    make_budget(stack, key, 270)
    text = "Tell me a story about a dog and a cat."
    answers = statuses(stack, key, 24, max_tokens=10, ignore_eos=True, text=text)
    used = [a.json()["usage"]["total_tokens"] for a in answers if a.status_code == 200]
    # The estimate of one of them is a token short.
    assert 135 < sum(used) <= 270 + len(used)
    wait_until(lambda: spend(stack, key) == (sum(used), 0), 120, "the settlement")


RESERVED, USED_UP = ("rate_limit_exceeded", "soon"), ("insufficient_quota", "next period")


def why_refused(answer: httpx.Response) -> tuple[str, str]:
    """The code, and when the request may come again."""
    waits_s = int(answer.headers["retry-after"])
    return answer.json()["error"]["code"], "soon" if waits_s == 1 else "next period"


def spend(stack: ServedStack, key: MadeKey) -> tuple[int, int]:
    [(spent, reserved)] = stack.sql(
        """SELECT spent, reserved FROM accounts_budgetspend spend JOIN accounts_budget budget
        ON budget.id = budget_id WHERE project_id = %s""",
        key.project_id,
    )
    return int(spent), int(reserved)


def test_one_after_the_other_each_request_finds_what_the_last_one_left(stack: ServedStack) -> None:
    """A budget that is nearly used up does not wait for the next step of accounting."""
    key = make_key(stack)
    make_budget(stack, key, 150)
    used = 0
    with key.http(stack) as http:
        while used + 40 <= 150:
            answer = http.post(CHAT, json=ask(20))
            assert answer.status_code == 200, answer.text
            used += answer.json()["usage"]["total_tokens"]


def test_each_end_user_has_a_budget(stack: ServedStack) -> None:
    key = make_key(stack)
    make_budget(stack, key, 5, each="user")
    client = stack.client(key.secret)

    def tokens(**fields: Any) -> int:
        usage = client.chat.completions.create(**ask(**fields)).usage
        return int(usage.total_tokens)

    used = tokens(user="ann")
    assert used > 5
    for fields in ({"user": "ann"}, {"user": "x", "safety_identifier": "ann"}):
        with pytest.raises(openai.RateLimitError) as caught:
            tokens(**fields)
        assert (caught.value.code, caught.value.type) == ("insufficient_quota",) * 2
        assert "the budget of 5 tokens a day for each end user is used up" in str(caught.value)
        assert int(caught.value.response.headers["retry-after"]) > 0
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model="demo", input="Hi", user="ann")
    assert tokens(user="bob") > 0
    assert tokens() > 0, "who names no end user is not bounded"
    other = make_key(stack)
    assert stack.client(other.secret).chat.completions.create(**ask(user="ann")).usage is not None
    wait_until(
        lambda: (
            stack.sql(
                "SELECT spent, reserved FROM accounts_budgetspend WHERE value = 'ann' AND budget_id"
                " IN (SELECT id FROM accounts_budget WHERE project_id = %s)",
                key.project_id,
            )
            == [(used, 0)]
        ),
        120,
        "the settlement",
    )


def test_a_budget_of_an_end_user_is_not_exceeded_by_more_than_what_is_in_flight(
    stack: ServedStack,
) -> None:
    key = make_key(stack)
    make_budget(stack, key, 10, each="user")
    answers = statuses(stack, key, 12, max_tokens=20, ignore_eos=True, user="ann")
    assert [answer.status_code for answer in answers].count(200) == 1
    refused = {why_refused(answer) for answer in answers if answer.status_code != 200}
    assert refused <= {RESERVED, USED_UP}


def test_while_another_reserves_the_rest_of_a_budget_a_request_may_come_again_soon(
    stack: ServedStack,
) -> None:
    """The budget is not used up: its rest is free when the other one has ended."""
    key = make_key(stack)
    make_budget(stack, key, 4_000)
    endless = ask(3_000, model="scripted", text=ENDLESS, stream=True)
    with key.http(stack) as http:
        with http.stream("POST", CHAT, json=endless):
            refused = http.post(CHAT, json=ask(2_000))
            assert why_refused(refused) == RESERVED
            assert "Please try again when one has ended." in refused.json()["error"]["message"]
        wait_until(lambda: http.post(CHAT, json=ask(5)).status_code == 200, 120, "the rest")


def test_a_background_response_is_refused_over_the_budget_too(stack: ServedStack) -> None:
    key = make_key(stack)
    make_budget(stack, key, 0)
    with key.http(stack) as http:
        answer = http.post(
            "/v1/responses", json={"model": "demo", "input": "Hi", "background": True}
        )
        assert answer.status_code == 429
        assert http.get("/v1/responses").json()["data"] == [], "nothing of it is stored"


def test_a_key_for_some_models_gets_no_others(stack: ServedStack) -> None:
    key = make_key(stack, allowed_models=["demo"])
    client = stack.client(key.secret)
    with pytest.raises(openai.PermissionDeniedError) as caught:
        client.chat.completions.create(**ask(model="scripted"))
    assert caught.value.code == "model_not_allowed"
    assert [model.id for model in client.models.list()] == ["demo"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("scripted")


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("POST", CHAT, "inference"),
        ("GET", "/v1/responses", "inference"),
        ("POST", "/v1/chat/render", "debug"),
        ("GET", "/v1/usage", "usage:read"),
        ("GET", "/v1/organization/usage/completions", "admin"),
        ("GET", "/v1/organization/usage/embeddings", "admin"),
    ],
)
def test_a_key_without_the_scope_is_refused(
    stack: ServedStack, method: str, path: str, scope: str
) -> None:
    key = make_key(stack, *({"inference", "debug", "usage:read", "admin"} - {scope}))
    with key.http(stack) as http:
        answer = http.request(method, path, json=ask() if method == "POST" else None)
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("insufficient_scope", "permission_error")
    assert f"'{scope}'" in error["message"]
