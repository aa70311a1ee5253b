"""Routes as clients see them: who answers, how long one stays, and when another steps in."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.keys import make_key
from tests.e2e.scripts import ENDLESS, script
from tests.e2e.test_disconnect import busy, run_s
from tests.served_stack import ServedStack, wait_until

OK = script({"text": "ok"})
HELLO: list[Any] = [{"role": "user", "content": OK}]
LONG: list[Any] = [{"role": "user", "content": "word " * 400}, *HELLO]


@pytest.fixture(scope="module")
def stack(routes_stack: ServedStack) -> ServedStack:
    return routes_stack


@pytest.fixture
def http(stack: ServedStack) -> Iterator[httpx.Client]:
    with stack.http() as own:
        yield own


@pytest.fixture
def client(stack: ServedStack) -> openai.OpenAI:
    return stack.client().with_options(max_retries=0)


def answerer(client: openai.OpenAI, model: str, **fields: Any) -> str:
    """Ask a chat, and return who has answered, by header and body."""
    fields = {"messages": HELLO, **fields}
    raw = client.chat.completions.with_raw_response.create(model=model, **fields)
    answered: str = raw.parse().model
    assert raw.headers["x-model"] == answered
    return answered


def test_weights_are_shares_and_a_conversation_stays(client: openai.OpenAI) -> None:
    def ask(key: int) -> str:
        return answerer(client, "chat", prompt_cache_key=f"key {key}")

    with ThreadPoolExecutor(8) as threads:
        first = list(threads.map(ask, range(120)))
        assert list(threads.map(ask, range(30))) == first[:30]
    assert Counter(first)["large"] == pytest.approx(24, abs=14)
    by_user = [answerer(client, "chat", user="u7") for _ in range(5)]
    assert len(set(by_user)) == 1


def test_requests_without_a_key_are_shared_too(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = Counter(threads.map(lambda _: answerer(client, "chat"), range(50)))
    assert found.keys() == {"small", "large"}
    assert found["large"] < 25


def test_responses_stay_with_who_answered_before(client: openai.OpenAI) -> None:
    seen = set()
    for _ in range(8):
        made = client.responses.create(model="chat", input=OK)
        for _ in range(3):
            after = client.responses.create(
                model="chat", input=OK, previous_response_id=made.id, truncation="auto"
            )
            assert after.model == made.model
            made = after
        seen.add(made.model)
    conversation = client.conversations.create()
    turns = {
        client.responses.create(
            model="chat", input=OK, conversation=conversation.id, truncation="auto"
        ).model
        for _ in range(4)
    }
    assert len(turns) == 1


def test_a_fallback_steps_in_when_no_server_is_up(
    stack: ServedStack, client: openai.OpenAI, http: httpx.Client
) -> None:
    """The first fallback cannot chat, and is the one that is chosen: it is checked as it is."""
    with pytest.raises(openai.BadRequestError, match="`vectors` does not support chat"):
        answerer(client, "down")
    made = client.embeddings.with_raw_response.create(model="embeds", input="a")
    assert (made.headers["x-model"], made.parse().model) == ("vectors", "vectors")
    shown = http.post("/api/embed", json={"model": "embeds", "input": "a"}).json()
    assert shown["model"] == "vectors"
    with pytest.raises(openai.InternalServerError) as caught:
        answerer(client, "lost")
    assert caught.value.code == "engine_unavailable"
    # It was taken, and has waited for the server to come.
    assert stack.sql("SELECT count(*) FROM generations_generation WHERE model = 'away'") == [(1,)]


def test_a_server_that_dies_costs_no_new_request(stack: ServedStack, client: openai.OpenAI) -> None:
    assert answerer(client, "dies", max_tokens=1) == "own"
    stack.server_of("own").kill()
    asked = {"max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
    is_known = False

    def answers_again() -> bool:
        nonlocal is_known
        try:
            found = answerer(client, "dies", **asked)
        except openai.InternalServerError:
            # What is sent to it until its end is known ends with it.
            assert not is_known
            return False
        is_known = True
        return found == "own"

    wait_until(answers_again, 60, "the server again")
    assert answerer(client, "dies", **asked) == "own"


def test_a_long_prompt_goes_to_a_longer_context(client: openai.OpenAI) -> None:
    """Also one that is long by what it continues; a prompt that may be cut stays."""
    small = next(f"k{i}" for i in range(99) if pick(client, f"k{i}") == "small")
    assert answerer(client, "chat", messages=LONG, prompt_cache_key=small) == "large"
    cut = {"extra_body": {"truncate_sequence": True}}
    assert answerer(client, "chat", messages=LONG, prompt_cache_key=small, **cut) == "small"
    asked: dict[str, Any] = {"model": "chat", "prompt_cache_key": small}
    first = client.responses.create(**asked, input="word " * 500 + OK)
    after = client.responses.create(**asked, input=OK, previous_response_id=first.id)
    assert (first.model, after.model) == ("large", "large")


def pick(client: openai.OpenAI, key: str) -> str:
    return answerer(client, "chat", prompt_cache_key=key)


def test_a_queue_that_is_too_long_falls_back(stack: ServedStack, client: openai.OpenAI) -> None:
    slow = [{"role": "user", "content": script({"sleep_ms": 1500}, {"text": "ok"})}]
    assert answerer(client, "wary", messages=slow) == "held"
    wait_until(lambda: run_s(stack, "held") > 1, 20, "how long its runs take")
    with ExitStack() as streams:
        held: Any = {"model": "held", "stream": True}
        held["messages"] = [{"role": "user", "content": ENDLESS}]
        first = streams.enter_context(client.chat.completions.create(**held))
        next(iter(first))
        wait_until(lambda: busy(stack, "held") == 1, 20, "a lease that says so")
        time.sleep(1.5)  # What is known of leases is a second old, of queues half as much.
        assert [answerer(client, "wary") for _ in range(3)] == ["large"] * 3
        rows = "SELECT count(*) FROM generations_generation WHERE model = 'held' AND status = %s"
        assert stack.sql(rows, "queued") == [(0,)]
        streamed = client.chat.completions.with_raw_response.create(
            model="wary", messages=HELLO, stream=True
        )
        assert streamed.headers["x-model"] == "large"
        assert {chunk.model for chunk in streamed.parse()} == {"large"}


def test_a_key_needs_the_route_and_pays_for_the_target(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    route = stack.client(make_key(stack, allowed_models=["chat"]).secret)
    key = next(f"k{i}" for i in range(99) if pick(client, f"k{i}") == "small")
    made = [route.chat.completions.create(model="chat", messages=HELLO) for _ in range(4)]
    assert {one.model for one in made} <= {"small", "large"}
    with pytest.raises(openai.PermissionDeniedError):
        answerer(route, "small")
    target = stack.client(make_key(stack, allowed_models=["small", "large"]).secret)
    with pytest.raises(openai.PermissionDeniedError, match="model `chat`"):
        answerer(target, "chat")
    paid = client.chat.completions.create(model="chat", messages=HELLO, prompt_cache_key=key)
    wait_until(lambda: stack.row(paid.id)["finished_at"] is not None, 20, "its end")
    assert stack.row(paid.id)["model"] == "small"
    assert stack.row(paid.id)["cost"] > 0


def test_routes_are_listed_with_their_targets(client: openai.OpenAI, http: httpx.Client) -> None:
    listed = {model.id: model.model_dump() for model in client.models.list()}
    assert listed["small"]["route"] is None
    assert listed["chat"]["route"] == {
        "targets": [{"model": "small", "share": 0.8}, {"model": "large", "share": 0.2}],
        "fallback": ["large"],
    }
    assert (listed["chat"]["status"], listed["chat"]["context_length"]) == ("loaded", 9000)
    assert client.models.retrieve("chat").model_dump() == listed["chat"]
    assert "none-for-you" not in listed
    for call in (client.models.retrieve, lambda name: answerer(client, name)):
        with pytest.raises(openai.NotFoundError):
            call("none-for-you")
    tags = [model["name"] for model in http.get("/api/tags").json()["models"]]
    assert {"chat", "small"} <= set(tags)
    shown = http.post("/api/show", json={"model": "chat"}).json()
    assert "completion" in shown["capabilities"]
    loaded = http.post("/v1/models/load", json={"model": "chat"})
    assert loaded.status_code in (403, 404)


def test_other_endpoints_take_the_name_of_a_route(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    assert client.completions.create(model="plain", prompt="a", max_tokens=2).model == "large"
    asked = {"model": "plain", "messages": HELLO, "stream": False}
    assert http.post("/api/chat", json=asked).json()["model"] == "large"
    counted = client.responses.input_tokens.count(model="dies", input="a b c")
    assert counted.input_tokens > 0
    tokens = http.post("/v1/tokenize", json={"model": "dies", "prompt": "a b"})
    assert tokens.headers["x-model"] == "own"
    background = client.responses.create(model="plain", input=OK, background=True)
    assert background.model == "large"


def test_a_flood_for_a_target_that_is_down_keeps_no_other_project_waiting(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    brief = [{"role": "user", "content": script({"sleep_ms": 20}, {"text": "ok"})}]
    down = make_key(stack)
    with down.http(stack) as http, ThreadPoolExecutor(50) as threads:
        asked = {"model": "dies-not", "messages": brief}

        def ask(_: int) -> tuple[int, str]:
            answer = http.post("/v1/chat/completions", json=asked)
            return answer.status_code, answer.headers.get("x-model", "")

        flood = threads.map(ask, range(300))
        mine = [answerer(client, "large") for _ in range(3)]
        assert mine == ["large"] * 3
        assert Counter(flood) == {(200, "large"): 300}


def test_lines_of_a_batch_go_through_a_route(client: openai.OpenAI) -> None:
    url: Any = "/v1/chat/completions"
    lines = [
        {
            "custom_id": f"{n}",
            "method": "POST",
            "url": url,
            "body": {"model": "chat", "messages": HELLO, "user": f"u{n}"},
        }
        for n in range(40)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    begun = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")

    def batch() -> openai.types.Batch:
        return client.batches.retrieve(begun.id)

    wait_until(lambda: batch().status in ("completed", "failed"), 60, "its end")
    assert (batch().status, batch().errors, batch().model) == ("completed", None, "chat")
    results = client.files.content(batch().output_file_id or "").text.splitlines()
    answerers = {json.loads(line)["response"]["body"]["model"] for line in results}
    assert (len(results), answerers) == (40, {"small", "large"})
