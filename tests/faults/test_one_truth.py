"""After a fault the row, the stored response and its stream say the same, and readers are told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import psycopg
import pytest

from tests.faults.freezing import frozen
from tests.faults.test_responses_survive import (
    Reader,
    begin,
    numbers,
    shown,
    slow,
    wait_until_ready,
)
from tests.served_stack import ROOT, ServedStack, wait_until

_PAIRS = """
SELECT r.public_id, r.status, g.status FROM responses_api_storedresponse r
LEFT JOIN generations_generation g ON g.public_id = r.public_id
WHERE (r.status IN ('queued', 'in_progress')) != coalesce(g.status IN ('queued', 'running'), false)
"""


@pytest.fixture(scope="module")
def stack(scripted_stack: ServedStack) -> ServedStack:
    """The stack whose workers have one model."""
    return scripted_stack


@pytest.fixture(autouse=True)
def _one_truth(stack: ServedStack) -> Iterator[None]:
    """Begin with all parts up; in the end no response and generation may disagree."""
    wait_until_ready(stack)
    yield
    wait_until_ready(stack)
    assert stack.sql(_PAIRS) == []


def text_of(response: dict[str, Any]) -> list[str]:
    return [item["content"][0]["text"] for item in response["output"]]


def attempt_of(stack: ServedStack, response_id: str) -> tuple[str, int]:
    row = stack.row(response_id)
    return row["status"], row["attempt"]


def is_completed(stack: ServedStack, response_id: str) -> bool:
    return bool(shown(stack, response_id)["status"] == "completed")


@contextmanager
def second_worker(stack: ServedStack) -> Iterator[str]:
    """Another worker of the scripted model; its id."""
    environment = {**stack.env, **stack.services, "SECRET_KEY": "unused", "DRAIN_TIMEOUT_S": "1"}
    command = [sys.executable, "manage.py", "worker", "--models", "scripted"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    try:
        with stack.redis() as client:
            mark = f"worker:*:{process.pid}:*"
            wait_until(lambda: list(client.scan_iter(mark)), 120, "its lease")
            [key] = (key for key in client.scan_iter(mark) if not key.endswith(b":unsent"))
        worker = key.decode().removeprefix("worker:")
        with stack.http() as http:
            wait_until(
                lambda: http.get("/v1/models/scripted").json()["workers"] == 2, 120, "2 workers"
            )
        yield worker
    finally:
        process.terminate()
        process.wait(90)


def test_run_that_was_given_to_another_worker_is_not_touched_by_the_first(
    stack: ServedStack,
) -> None:
    with second_worker(stack) as other:
        response_id = begin(stack, input=slow(150))
        reader = Reader(stack, response_id)
        first = stack.row(response_id)["worker"]
        with frozen(int(first.split(":")[-2])):
            wait_until(lambda: attempt_of(stack, response_id) == ("running", 2), 120, "another run")
        events = reader.wait(120)
        row = stack.row(response_id)
        assert (row["status"], row["attempt"]) == ("completed", 2)
        assert row["worker"] != first
        assert other in (first, row["worker"])
        check_second_attempt(stack, events)


def test_worker_that_was_cut_off_may_take_its_run_again(stack: ServedStack) -> None:
    response_id = begin(stack, input=slow(150))
    reader = Reader(stack, response_id)
    with frozen(stack.pid_of("worker")):
        wait_until(lambda: attempt_of(stack, response_id) == ("queued", 1), 120, "its queue")
    events = reader.wait(120)
    assert attempt_of(stack, response_id) == ("completed", 2)
    check_second_attempt(stack, events)


def check_second_attempt(stack: ServedStack, events: list[dict[str, Any]]) -> None:
    """What the first attempt said was ended once, and nothing of it came later."""
    assert numbers(events) == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds.count("response.in_progress") == 2
    assert kinds.count("response.output_item.added") == 2
    final = events[-1]["response"]
    assert final == shown(stack, final["id"])
    assert text_of(final) == ["x " * 150]
    again = len(kinds) - kinds[::-1].index("response.in_progress")
    said = [e["delta"] for e in events[again:] if e["type"] == "response.output_text.delta"]
    assert said == ["x "] * 150


def test_stream_goes_on_after_its_log_was_lost_and_its_worker_died(stack: ServedStack) -> None:
    response_id = begin(stack, input=slow(200))
    reader = Reader(stack, response_id)
    with stack.redis() as redis:
        redis.flushall()
    known = len(reader.frames)
    wait_until(lambda: len(reader.frames) > known + 10, 120, "frames after the loss")
    os.kill(stack.pid_of("worker"), signal.SIGKILL)
    events = reader.wait(120)
    assert numbers(events) == list(range(len(events)))
    assert attempt_of(stack, response_id) == ("completed", 2)
    assert [event["type"] for event in events].count("response.in_progress") == 2
    assert text_of(events[-1]["response"]) == ["x " * 200]
    events = Reader(stack, response_id).wait()
    assert events[-1]["response"] == shown(stack, response_id)
    assert numbers(events) == list(range(len(events)))


@pytest.mark.parametrize("damage", ["hole", "all"])
def test_damaged_log_of_a_dead_worker_holds_nothing_up(stack: ServedStack, damage: str) -> None:
    body = {"model": "scripted", "input": slow(1000), "stream": True}
    worker = stack.pid_of("worker")
    with stack.http() as http, http.stream("POST", "/v1/responses", json=body) as response:
        text = ""
        is_damaged = False
        for piece in response.iter_text():
            text += piece
            if not is_damaged and text.count("output_text.delta") > 20:
                response_id = json.loads(text.split("data: ")[1].split("\n")[0])["response"]["id"]
                lose(stack, response_id, worker, damage)
                is_damaged = True
    assert text.endswith("data: [DONE]\n\n")
    frames = [frame for frame in text.split("\n\n") if frame.startswith("event: ")]
    events = [json.loads(frame.partition("\ndata: ")[2]) for frame in frames]
    assert numbers(events) == list(range(len(events)))
    assert events[-1]["type"] in ("error", "response.failed")
    wait_until(lambda: shown(stack, response_id)["status"] == "failed", 120, "its end")
    row = stack.row(response_id)
    assert (row["status"], row["error_code"]) == ("failed", "worker_lost")
    began = time.time()
    with stack.redis() as redis:
        wait_until(lambda: float(redis.get("maintenance-done") or 0) > began, 120, "upkeep")
    replayed = Reader(stack, response_id).wait()
    assert replayed[-1]["response"] == shown(stack, response_id)


def lose(stack: ServedStack, response_id: str, worker: int, damage: str) -> None:
    """Lose entries of a log whose worker dies."""
    process = psutil.Process(worker)
    process.suspend()
    with stack.redis() as client:
        log = f"{{{response_id}}}:log"
        entries: Any = [entry_id for entry_id, _ in client.xrange(log)]
        client.xdel(log, *(entries if damage == "all" else entries[3:6]))
    process.kill()


def test_what_redis_forgets_before_a_worker_is_found_dead_is_still_ended_as_asked(
    stack: ServedStack,
) -> None:
    """A reader of fewer frames than an ending has, and a cancel of one that may be begun anew."""
    response_id = begin(stack, input=slow(1000))
    wait_until(lambda: attempt_of(stack, response_id) == ("running", 1), 120, "its run")
    script = json.dumps([{"text": "a"}, {"sleep_ms": 4000}, {"text": "b"}] * 20)
    body = {"model": "scripted", "messages": [{"role": "user", "content": script}], "stream": True}
    worker = stack.pid_of("worker")
    with (
        ThreadPoolExecutor(1) as pool,
        stack.http() as http,
        http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        while '"content":"a"' not in next(lines):
            pass
        os.kill(worker, signal.SIGSTOP)
        cancelled = pool.submit(stack.client().responses.cancel, response_id)
        wait_until(lambda: stack.row(response_id)["cancel_requested_at"], 120, "its cancel")
        with stack.redis() as redis:
            redis.flushall()
        os.kill(worker, signal.SIGKILL)
        said = [line for line in lines if line.startswith("data: ")]
        cancelled.result(120)
    assert said[-1] == "data: [DONE]"
    assert json.loads(said[-2].removeprefix("data: "))["error"]["code"] == "stream_lost"
    wait_until(lambda: attempt_of(stack, response_id) == ("cancelled", 1), 120, "its end")
    assert shown(stack, response_id)["status"] == "cancelled"


def test_what_waits_while_redis_is_away_is_run_when_it_is_back(
    stack: ServedStack,
) -> None:
    busy = [begin(stack, input=slow(200)) for _ in range(4)]  # All slots.
    waiting = begin(stack, input=json.dumps([{"text": "at last"}]))
    wait_until(lambda: all(stack.row(i)["status"] == "running" for i in busy), 120, "the others")
    with frozen(stack.pid_of("redis")):
        wait_until(
            lambda: all(stack.row(i)["status"] == "completed" for i in busy), 120, "their ends"
        )
        time.sleep(5)  # Longer than a worker waits for one answer of Redis.
    wait_until(lambda: stack.row(waiting)["status"] == "completed", 120, "its end")
    for response_id in (waiting, *busy):  # The first request after it may still be a 503.
        wait_until(
            lambda i=response_id: shown(stack, i).get("status") == "completed", 60, "its answer"
        )
    assert text_of(shown(stack, waiting)) == ["at last"]


def chat(words: int, delay_ms: int = 50, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": slow(words, delay_ms)}]
    return {"model": "scripted", "messages": messages, **fields}


def said_in(answer: str) -> str:
    """The text of a chat completion that was streamed whole."""
    frames = [frame for frame in answer.split("\n\n") if frame.startswith("data: {")]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    assert answer.endswith("data: [DONE]\n\n")
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])


def test_what_completed_while_redis_stood_still_is_answered_though_its_worker_died(
    stack: ServedStack,
) -> None:
    """From storage; what is not stored is told that it was computed."""
    begun = "SELECT public_id, status FROM generations_generation WHERE end_user = %s ORDER BY id"
    asked = {  # Long enough to run beside each other on a busy machine.
        "whole": chat(80, store=True, user="whole"),
        "stream": chat(80, store=True, user="stream", stream=True),
        "unstored": chat(80, user="unstored"),
    }

    def statuses() -> list[str]:
        return [status for name in asked for _, status in stack.sql(begun, name)]

    with stack.http() as http, ThreadPoolExecutor(3) as pool:
        path = "/v1/chat/completions"
        answers = {name: pool.submit(http.post, path, json=body) for name, body in asked.items()}
        wait_until(lambda: statuses() == ["running"] * 3, 120, "their runs")
        ids = {name: stack.sql(begun, name)[0][0] for name in asked}
        with stack.redis() as redis:
            wait_until(lambda: redis.xlen(f"{{{ids['stream']}}}:log") > 3, 120, "some frames")
        with frozen(stack.pid_of("redis")):
            wait_until(lambda: statuses() == ["completed"] * 3, 120, "their ends")
            os.kill(stack.pid_of("worker"), signal.SIGKILL)
        whole, streamed, unstored = (answers[name].result(120) for name in asked)
        assert whole.status_code == streamed.status_code == 200, (whole.text, streamed.text)
        stored = http.get(f"{path}/{ids['whole']}").json()
        assert {**whole.json(), "metadata": {}} == stored
        assert whole.json()["choices"][0]["message"]["content"] == "x " * 80
        assert said_in(streamed.text) == "x " * 80
    row, error = stack.row(ids["unstored"]), unstored.json()["error"]
    assert (unstored.status_code, error["code"]) == (503, "stream_lost")
    assert error["usage"]["output_tokens"] == row["output_tokens"] > 0
    assert error["usage"]["input_tokens"] == row["input_tokens"]


def test_a_redis_that_is_emptied_cuts_no_stream_and_repeats_no_run(stack: ServedStack) -> None:
    response = {"model": "scripted", "input": slow(80), "stream": True, "user": "emptied"}
    keyed = {"Idempotency-Key": "emptied"}
    runs = "SELECT count(*) FROM generations_generation WHERE end_user = 'emptied'"
    with stack.http() as http, ThreadPoolExecutor(4) as pool:
        path = "/v1/chat/completions"
        completion = chat(80, stream=True, user="emptied")
        first = pool.submit(http.post, path, json=completion, headers=keyed)
        stored = pool.submit(http.post, "/v1/responses", json=response)
        wait_until(lambda: stack.sql(runs) == [(2,)], 120, "their rows")
        time.sleep(1)
        with stack.redis() as redis:
            redis.flushall()
        again = pool.submit(http.post, path, json=completion, headers=keyed)
        for answer in (first, again):
            assert answer.result(120).status_code == 200, answer.result().text
            assert said_in(answer.result().text) == "x " * 80
        text = stored.result(120).text
    events = [json.loads(f.partition("\ndata: ")[2]) for f in text.split("\n\n") if "event: " in f]
    assert numbers(events) == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    assert text_of(shown(stack, events[-1]["response"]["id"])) == ["x " * 80]
    assert stack.sql(runs) == [(2,)]


def test_a_failed_response_keeps_what_was_said_before_redis_was_emptied(stack: ServedStack) -> None:
    body = {"model": "scripted", "input": slow(2000), "stream": True}
    worker = stack.pid_of("worker")
    with stack.http() as http, http.stream("POST", "/v1/responses", json=body) as response:
        text = ""
        is_emptied = is_dead = False
        for piece in response.iter_text():
            text += piece
            words = text.count("output_text.delta")
            if not is_emptied and words > 20:
                with stack.redis() as redis:
                    redis.flushall()
                is_emptied, lost_at = True, words
            elif is_emptied and not is_dead and words > lost_at + 20:
                os.kill(worker, signal.SIGKILL)
                is_dead = True
    frames = [frame for frame in text.split("\n\n") if frame.startswith("event: ")]
    events = [json.loads(frame.partition("\ndata: ")[2]) for frame in frames]
    assert numbers(events) == list(range(len(events)))
    said = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    final = events[-1]["response"]
    assert (final["status"], text_of(final)) == ("failed", [said])
    assert shown(stack, final["id"])["output"] == final["output"]


@pytest.mark.parametrize("path", ["conversation", "response"])
def test_a_key_is_free_once_the_web_process_that_claimed_it_is_killed(
    stack: ServedStack, path: str
) -> None:
    """It dies in the transaction that holds the claim, which waits for a row here."""
    keyed = {"Idempotency-Key": f"killed-{path}"}
    with stack.http() as http:
        made = http.post("/v1/conversations", json={}).json()["id"]
    url, body = f"/v1/conversations/{made}", dict[str, Any](metadata={"a": "b"})
    if path == "response":
        url, body = "/v1/responses", {"model": "scripted", "input": "[]", "conversation": made}
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"

    def post() -> int:
        try:
            with stack.http() as http:
                return http.post(url, json=body, headers=keyed).status_code
        except httpx.HTTPError:
            return 0

    with ThreadPoolExecutor(1) as pool:
        with psycopg.connect(stack.services["DATABASE_URL"]) as holder:
            holder.execute(
                "SELECT 1 FROM responses_api_conversation WHERE public_id = %s FOR UPDATE", [made]
            )
            first = pool.submit(post)
            wait_until(lambda: stack.sql(waiting)[0][0] > 0, 120, "the claim")
            os.kill(stack.pid_of("web"), signal.SIGKILL)
            assert first.result(120) == 0
        wait_until_ready(stack)
        assert post() == 200
    runs = stack.sql(
        "SELECT count(*) FROM generations_generation g JOIN responses_api_storedresponse r "
        "ON r.public_id = g.public_id JOIN responses_api_conversation c "
        "ON c.id = r.conversation_id WHERE c.public_id = %s",
        made,
    )
    assert runs == [(int(path == "response"),)]
