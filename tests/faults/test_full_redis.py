"""A Redis at its ``maxmemory``: new requests are refused, and nothing that runs is lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from tests.served_stack import ServedStack, wait_until

CHAT = "/v1/chat/completions"
WORDS = 150


def slow(words: int) -> dict[str, Any]:
    """A request that the scripted model answers with so many words, at 50 ms each."""
    steps = [{"repeat": words, "steps": [{"text": "x "}, {"sleep_ms": 50}]}]
    messages = [{"role": "user", "content": json.dumps(steps)}]
    return {"model": "scripted", "messages": messages, "stream": True}


@contextmanager
def full(stack: ServedStack, share: float) -> Iterator[None]:
    """Set the limit so that Redis uses this share of it."""
    with stack.redis() as redis:
        used = redis.info("memory")["used_memory"]
        redis.config_set("maxmemory-policy", "noeviction")
        redis.config_set("maxmemory", int(used / share))
        try:
            yield
        finally:
            redis.config_set("maxmemory", 0)


def is_refused(http: httpx.Client) -> bool:
    """Whether a new request is refused as one should be."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    answer = http.post(CHAT, json=body)
    if answer.status_code == 200:
        return False
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["code"] == "queue_memory_full"
    return True


@pytest.mark.parametrize("share", [0.9, 2.0])
def test_a_full_redis_refuses_what_is_new_and_loses_nothing_that_runs(
    stack: ServedStack, share: float
) -> None:
    """With a share of 2 Redis itself refuses all that takes memory."""
    wait_until(lambda: _started(stack), 120, "all started")
    before = _started(stack)
    texts: list[str] = []

    def read(http: httpx.Client) -> None:
        with http.stream("POST", CHAT, json=slow(WORDS)) as response:
            texts.append("".join(response.iter_text()))

    with stack.http() as http:
        readers = [threading.Thread(target=read, args=(http,)) for _ in range(2)]
        for reader in readers:
            reader.start()
        with http.stream("POST", CHAT, json=slow(10_000)) as left:
            lines = left.iter_lines()
            first = next(line for line in lines if line.startswith("data: "))
            public_id = json.loads(first.removeprefix("data: "))["id"]
            wait_until(lambda: _running(stack) == 3, 120, "three run")
            with full(stack, share):
                wait_until(lambda: is_refused(http), 120, "refused")
                left.close()
                ended = wait_until(lambda: stack.row(public_id)["finished_at"], 120, "cancelled")
                assert stack.row(public_id)["status"] == "cancelled", ended
                for reader in readers:
                    reader.join(60)
                if share > 1:  # Else what the streams have taken is free again.
                    assert is_refused(http)
        wait_until(lambda: not is_refused(http), 120, "accepted again")
    assert [text.count('"content":"x "') for text in texts] == [WORDS, WORDS]
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert _started(stack) == before
    assert "Traceback" not in stack.text()


def test_a_redis_that_takes_no_writes_costs_no_process(stack: ServedStack) -> None:
    """As when its disk is full: the workers read their wake-ups again when that has passed."""
    wait_until(lambda: _started(stack), 120, "all started")
    before = _started(stack)
    script = '[{"text": "ok"}]'
    body = {"model": "scripted", "messages": [{"role": "user", "content": script}]}
    with stack.redis() as redis, stack.http() as http:
        wait_until(lambda: http.post(CHAT, json=body).status_code == 200, 120, "an answer")
        refused = _refused_wake_ups(redis)
        redis.config_set("min-replicas-to-write", 1)
        try:
            answer = http.post(CHAT, json=body)
            # Its worker has asked for wake-ups once more, and was refused.
            wait_until(lambda: _refused_wake_ups(redis) > refused, 120, "a refusal")
            wait_until(lambda: not stack.model_reports("demo"), 120, "no lease")
            later = http.post(CHAT, json=body)
            told = _told_by_socket(stack, script)
        finally:
            redis.config_set("min-replicas-to-write", 0)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_unavailable")
        assert (later.status_code, later.json()["error"]["code"]) == (503, "queue_unavailable")
        assert (told["status"], told["error"]["code"]) == (503, "queue_unavailable")
        wait_until(lambda: http.post(CHAT, json=body).status_code == 200, 120, "an answer")
    assert _started(stack) == before
    logs = stack.data_dir / "log"
    assert "Traceback" not in (logs / "web.log").read_text()
    assert "DeprecationWarning" not in (logs / "worker.log").read_text()


def _told_by_socket(stack: ServedStack, script: str) -> dict[str, Any]:
    """The first event of a response over a WebSocket."""
    url = f"{stack.url}/v1/responses".replace("http", "ws", 1)
    with connect(url, additional_headers={"Authorization": f"Bearer {stack.key}"}) as socket:
        socket.send(json.dumps({"type": "response.create", "model": "scripted", "input": script}))
        event: dict[str, Any] = json.loads(socket.recv(60))
        return event


def _refused_wake_ups(redis: Any) -> int:
    """How often Redis has refused to take a message from a list."""
    found = redis.info("commandstats").get("cmdstat_brpop", {})
    return int(found.get("rejected_calls", 0))


def _started(stack: ServedStack) -> list[int]:
    """The processes that may not die; none while one of them starts."""
    try:
        return [stack.pid_of(name) for name in ("beat", "worker", "web")]
    except AssertionError:
        return []


def _running(stack: ServedStack) -> int:
    statement = "SELECT count(*) FROM generations_generation WHERE status = 'running'"
    return int(stack.sql(statement)[0][0])
