"""What requests leave in Redis, and how much of it one project may have."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import SHARE_OF_REDIS
from tests.e2e.keys import MadeKey, make_key
from tests.e2e.scripts import ENDLESS, frames, respond, script
from tests.served_stack import ServedStack, wait_until

CHAT = "/v1/chat/completions"
LINGER_S, RESUMABLE_S = 30, 300
"""Defaults of EVENT_LOG_LINGER_S and EVENT_LOG_TTL_S."""


def left_of(stack: ServedStack, public_id: str) -> dict[str, tuple[int, int]]:
    """The bytes and the seconds to live of each key of a generation."""
    with stack.redis() as redis:
        keys = [key.decode() for key in redis.scan_iter(f"{{{public_id}}}:*", count=1000)]
        sizes = [int(redis.memory_usage(key, samples=0) or 0) for key in keys]
        lives = [int(redis.ttl(key)) for key in keys]
    names = [key.rpartition(":")[2] for key in keys]
    return dict(zip(names, zip(sizes, lives, strict=True), strict=True))


def ids_of(stack: ServedStack, key: MadeKey) -> list[str]:
    """The generations of a key."""
    statement = "SELECT public_id FROM generations_generation WHERE api_key_id = %s ORDER BY id"
    return [row[0] for row in stack.sql(statement, key.id)]


def left_at_last(stack: ServedStack, public_id: str, within_s: int) -> dict[str, tuple[int, int]]:
    """What is left once that is only a log, and for no longer than this."""
    left = dict[str, tuple[int, int]]()

    def is_gone_soon() -> bool:
        left.clear()
        left.update(left_of(stack, public_id))
        return left.keys() <= {"log"} and all(0 < ttl <= within_s for _, ttl in left.values())

    wait_until(is_gone_soon, 120, f"the end of all but a log of {public_id}")
    return left


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [False, True])
def test_a_refused_request_with_large_fields_leaves_little_for_seconds(
    stack: ServedStack, stream: bool, store: bool
) -> None:
    key = make_key(stack)
    text = secrets.token_hex(30_000)  # More would be refused before it is queued.
    body = {"model": "demo", "input": "Hi", "instructions": text, "stream": stream, "store": store}
    with key.http(stack) as http:
        # A stream that has waited for a second is answered 200, and has the error in it.
        assert "context_length_exceeded" in http.post("/v1/responses", json=body).text
    [refused] = ids_of(stack, key)
    left = left_at_last(stack, refused, LINGER_S)
    assert sum(size for size, _ in left.values()) < len(text) + 10_000


def test_events_that_repeat_a_large_field_are_read_again_as_they_were_sent(
    stack: ServedStack,
) -> None:
    key = make_key(stack)
    tool = {"type": "function", "name": "look", "parameters": {"x": "żółć" * 2000}}
    body: dict[str, Any] = {"model": "scripted", "input": script({"text": "Hi"})}
    body |= {"instructions": "\u2028\\" * 4000, "tools": [tool], "stream": True}
    with key.http(stack) as http:
        sent = http.post("/v1/responses", json=body)
        assert sent.status_code == 200, sent.text
        (made,) = ids_of(stack, key)
        for after in (-1, 0, 1, 4):
            query = {"stream": "true"} | ({"starting_after": str(after)} if after >= 0 else {})
            again = http.get(f"/v1/responses/{made}", params=query)
            assert "x-replay" not in again.headers
            assert frames(again) == frames(sent)[after + 1 :]
        body |= {"stream": False, "background": True}
        queued = http.post("/v1/responses", json=body).json()
        assert queued["instructions"] == body["instructions"]
    size, _ = left_of(stack, made)["log"]
    assert size < 2 * (len(str(body["instructions"]).encode()) + 2 * len("żółć" * 2000))


def test_only_a_log_that_is_all_there_is_of_an_answer_is_kept_for_minutes(
    stack: ServedStack, client: openai.OpenAI, http: httpx.Client
) -> None:
    body: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    body["max_tokens"] = 3
    plain = http.post(CHAT, json=body).json()["id"]
    headers = {"Idempotency-Key": secrets.token_hex(8)}
    repeatable = http.post(CHAT, json=body, headers=headers).json()["id"]
    unstored = respond(client, {"text": "a"}, store=False).id
    stored = respond(client, {"text": "a"}).id
    headers = {"Idempotency-Key": secrets.token_hex(8)}
    both = respond(client, {"text": "a"}, extra_headers=headers).id
    for made, least_s, most_s in (
        (plain, 0, LINGER_S),
        (unstored, 0, LINGER_S),
        (repeatable, LINGER_S, RESUMABLE_S),
        (stored, 0, LINGER_S),
        (both, 0, LINGER_S),
    ):
        left = left_at_last(stack, made, most_s)
        assert left or least_s == 0
        assert all(ttl > least_s for _, ttl in left.values())


def test_a_project_has_its_share_of_redis_and_gets_it_back(stack: ServedStack) -> None:
    greedy, other = make_key(stack), make_key(stack)
    large = [{"role": "user", "content": "x" * (SHARE_OF_REDIS // 13)}] * 3
    asked = {"model": "scripted", "messages": large}

    def waiting() -> bool:
        statement = (
            "SELECT count(*) FROM generations_generation WHERE api_key_id = %s AND status = %s"
        )
        return bool(stack.sql(statement, greedy.id, "queued")[0][0] == 4)

    with other.http(stack) as http, ExitStack() as occupied:
        streams = []  # One that is forgotten is closed.
        for _ in range(4):  # All slots.
            running = {"model": "scripted", "stream": True}
            running["messages"] = [{"role": "user", "content": ENDLESS}]
            held = occupied.enter_context(http.stream("POST", CHAT, json=running))
            streams.append(held.iter_lines())
            next(streams[-1])
        with greedy.http(stack) as many, ExitStack() as sent:
            for _ in range(4):  # Each is answered 200 when it has waited for a second.
                one = sent.enter_context(many.stream("POST", CHAT, json={**asked, "stream": True}))
                assert one.status_code == 200
            wait_until(waiting, 120, "four wait")
            refused = many.post(CHAT, json=asked)
            short = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
            assert http.post(CHAT, json={**short, "max_tokens": 3}).status_code == 200
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert error["code"] == "rate_limit_exceeded"
        assert "bytes" in error["message"]
        assert int(refused.headers["retry-after"]) > 0

        def is_given_back() -> bool:
            with stack.redis() as redis:
                return redis.hget("held-by-project", str(greedy.project_id)) is None

        wait_until(is_given_back, 120, "room again")
    with greedy.http(stack) as again:
        assert again.post(CHAT, json=asked).status_code == 200
    [first, *_] = ids_of(stack, greedy)
    wait_until(lambda: left_of(stack, first) == {}, 120, "the end of all that it left")
