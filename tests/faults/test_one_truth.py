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

import psutil
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
            [key] = client.scan_iter(mark)
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


def test_lost_beginning_of_a_stream_is_told_when_the_worker_dies_too(stack: ServedStack) -> None:
    response_id = begin(stack, input=slow(200))
    reader = Reader(stack, response_id)
    with stack.redis() as redis:
        redis.flushall()
    known = len(reader.frames)
    wait_until(lambda: len(reader.frames) > known + 10, 120, "frames after the loss")
    os.kill(stack.pid_of("worker"), signal.SIGKILL)
    events = reader.wait(120)
    assert numbers(events) == list(range(len(events)))
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "stream_lost")
    wait_until(lambda: is_completed(stack, response_id), 120, "its second attempt")
    assert attempt_of(stack, response_id)[1] == 2
    assert text_of(shown(stack, response_id)) == ["x " * 200]
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


def test_run_that_is_claimed_while_redis_is_away_is_run_when_it_is_back(
    stack: ServedStack,
) -> None:
    busy = [begin(stack, input=slow(120)) for _ in range(4)]  # All slots.
    waiting = begin(stack, input=json.dumps([{"text": "at last"}]))
    wait_until(lambda: all(stack.row(i)["status"] == "running" for i in busy), 120, "the others")
    with frozen(stack.pid_of("redis")):
        wait_until(lambda: stack.row(waiting)["status"] == "running", 120, "its claim")
        time.sleep(5)  # Longer than a worker waits for one answer of Redis.
    wait_until(lambda: is_completed(stack, waiting), 120, "its end")
    assert text_of(shown(stack, waiting)) == ["at last"]
    for response_id in busy:
        wait_until(lambda i=response_id: is_completed(stack, i), 120, "the others")
