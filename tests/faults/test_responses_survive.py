"""Responses outlive their clients, web processes and workers."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import httpx
import pytest

from tests.served_stack import ServedStack, wait_until

WORDS = 120


@pytest.fixture(scope="module")
def stack(scripted_stack: ServedStack) -> ServedStack:
    """The stack whose workers have one model."""
    return scripted_stack


def slow(words: int = WORDS, delay_ms: int = 50) -> str:
    """The input that makes the scripted model say so many words."""
    return json.dumps([{"repeat": words, "steps": [{"text": "x "}, {"sleep_ms": delay_ms}]}])


def begin(stack: ServedStack, **fields: Any) -> str:
    """Create a response in the background; return its id."""
    body = {"model": "scripted", "input": slow(), "background": True, **fields}
    with stack.http() as http:
        response = http.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["id"])


def shown(stack: ServedStack, response_id: str) -> dict[str, Any]:
    """Return the response as it is now."""
    with stack.http() as http:
        found: dict[str, Any] = http.get(f"/v1/responses/{response_id}").json()
        return found


def wait_until_ready(stack: ServedStack) -> None:
    """Wait until what the last test killed is there again."""

    def ready() -> bool:
        try:
            return httpx.get(f"{stack.url}/health/ready", timeout=60).status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(ready, 120, "ready again")


class Reader:
    """Reads a response's stream on a thread, attaching again after what it has when it is cut."""

    def __init__(self, stack: ServedStack, response_id: str) -> None:
        self.frames: list[str] = []
        self.cuts = 0
        self._stack, self._id = stack, response_id
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        wait_until(lambda: len(self.frames) > 4, 120, "the first events")

    def _read(self) -> None:
        while not self.frames or self.frames[-1] != "data: [DONE]":
            try:
                self._attach()
            except httpx.HTTPError:
                self.cuts += 1
                time.sleep(0.2)

    def _attach(self) -> None:
        after = {"starting_after": len(self.frames) - 1} if self.frames else {}
        with (
            self._stack.http() as http,
            http.stream(
                "GET", f"/v1/responses/{self._id}", params={"stream": "true", **after}
            ) as response,
        ):
            text = ""
            for piece in response.iter_text():
                text += piece
                *frames, text = text.split("\n\n")
                self.frames += [frame for frame in frames if not frame.startswith(":")]

    def wait(self, timeout_s: float = 120) -> list[dict[str, Any]]:
        """Return the events once the stream has ended."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"the stream hangs after {self.frames[-2:]}"
        return [json.loads(frame.partition("\ndata: ")[2]) for frame in self.frames[:-1]]


def numbers(events: list[dict[str, Any]]) -> list[int]:
    """Their sequence numbers."""
    return [event["sequence_number"] for event in events]


def attempts(stack: ServedStack, ids: list[str], number: int) -> int:
    """How many of these run now, for this time."""
    found = stack.sql(
        "SELECT count(*) FROM generations_generation "
        "WHERE public_id = ANY(%s) AND status = 'running' AND attempt = %s",
        ids,
        number,
    )
    return int(found[0][0])


def test_response_in_the_background_survives_its_worker(stack: ServedStack) -> None:
    response_id = begin(stack)
    beside = [begin(stack, input=slow(600)) for _ in range(2)]
    readers = [Reader(stack, response_id) for _ in range(3)]
    together = [response_id, *beside]
    wait_until(lambda: attempts(stack, together, 1) == 3, 60, "all three")
    os.kill(stack.pid_of("worker"), signal.SIGKILL)
    wait_until(lambda: attempts(stack, together, 2) == 3, 60, "all three beside each other")
    with stack.http() as http:
        for other in beside:
            http.post(f"/v1/responses/{other}/cancel")
    seen: list[dict[str, Any]] = []

    def has_ended() -> bool:
        seen.append(shown(stack, response_id))
        return str(seen[-1]["status"]) == "completed"

    wait_until(has_ended, 120, "completed")
    # While it is queued again, which may be too short to be seen, what was said counts no more.
    assert all(s["output"] == [] for s in seen if s["status"] == "queued")
    assert max(len(s["output"]) for s in seen) == 1
    first, *others = [reader.wait() for reader in readers]
    assert all(other == first for other in others)
    assert numbers(first) == list(range(len(first)))
    assert first[-1]["type"] == "response.completed"
    final = first[-1]["response"]
    assert final == shown(stack, response_id)
    assert [item["content"][0]["text"] for item in final["output"]] == ["x " * WORDS]
    begun = [e["item"]["id"] for e in first if e["type"] == "response.output_item.added"]
    ended = {
        e["item"]["id"]: e["item"]["status"]
        for e in first
        if e["type"] == "response.output_item.done"
    }
    assert len(begun) == 2
    assert [ended[item_id] for item_id in begun] == ["incomplete", "completed"]
    again = [e["response"]["output"] for e in first if e["type"] == "response.in_progress"]
    assert again == [[], []]
    row = stack.row(response_id)
    assert (row["status"], row["attempt"]) == ("completed", 2)


def test_foreground_stream_goes_on_though_redis_has_lost_its_log(stack: ServedStack) -> None:
    wait_until_ready(stack)
    body = {"model": "scripted", "input": slow(100), "stream": True}
    with stack.http() as http, http.stream("POST", "/v1/responses", json=body) as response:
        assert response.status_code == 200, response.read()
        text = ""
        flushed = False
        for piece in response.iter_text():
            text += piece
            if not flushed and text.count("output_text.delta") > 8:
                lose_frames(stack, text)
                flushed = True
    frames = [frame for frame in text.split("\n\n")[:-1] if not frame.startswith(":")]
    assert frames[-1] == "data: [DONE]"
    events = [json.loads(frame.partition("\ndata: ")[2]) for frame in frames[:-1]]
    assert numbers(events) == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    said = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    stored = shown(stack, events[0]["response"]["id"])
    assert said == stored["output"][0]["content"][0]["text"] == "x " * 100
    assert events[-1]["response"] == stored


def lose_frames(stack: ServedStack, text: str) -> None:
    """Have Redis forget the reader of a stream, and then what was written without a hint to it.

    That is over before the reader looks into the log because a second has passed without a hint.
    """
    response_id = json.loads(text.split("data: ")[1].split("\n")[0])["response"]["id"]
    with stack.redis() as redis:
        redis.flushall()
        wait_until(lambda: redis.exists(f"{{{response_id}}}:log"), 120, "frames without a hint")
        redis.flushall()


def test_response_in_the_foreground_fails_with_its_worker_and_keeps_what_it_said(
    stack: ServedStack,
) -> None:
    wait_until_ready(stack)
    body = {"model": "scripted", "input": slow(1000), "stream": True}
    with stack.http() as http, http.stream("POST", "/v1/responses", json=body) as response:
        assert response.status_code == 200, response.read()
        text = ""
        killed = False
        for piece in response.iter_text():
            text += piece
            if not killed and text.count("output_text.delta") > 4:
                os.kill(stack.pid_of("worker"), signal.SIGKILL)
                killed = True
    events = [
        json.loads(frame.partition("\ndata: ")[2])
        for frame in text.split("\n\n")
        if frame.startswith("event: ")
    ]
    assert numbers(events) == list(range(len(events)))
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    failed = events[-1]["response"]
    assert (events[-2]["code"], failed["error"]["code"]) == ("worker_lost", "server_error")
    assert failed["output"][0]["content"][0]["text"].startswith("x x")
    assert shown(stack, failed["id"]) == failed


def test_response_in_the_background_survives_its_web_process(stack: ServedStack) -> None:
    wait_until_ready(stack)
    response_id = begin(stack, input=slow(120))
    readers = [Reader(stack, response_id) for _ in range(3)]
    os.kill(stack.pid_of("web"), signal.SIGKILL)
    first, *others = [reader.wait() for reader in readers]
    assert all(other == first for other in others)
    assert all(reader.cuts > 0 for reader in readers)
    assert numbers(first) == list(range(len(first)))
    assert first[-1]["type"] == "response.completed"
    assert stack.row(response_id)["attempt"] == 1


def test_request_of_a_response_in_the_background_is_made_anew_when_redis_forgets_it(
    stack: ServedStack,
) -> None:
    wait_until_ready(stack)
    busy = [begin(stack, input=slow(120)) for _ in range(4)]  # All slots.
    waiting = begin(stack, input=json.dumps([{"text": "made anew"}]))
    assert shown(stack, waiting)["status"] == "queued"
    with stack.redis() as redis:
        redis.flushall()
    wait_until(lambda: shown(stack, waiting)["status"] == "completed", 120, "its turn")
    assert shown(stack, waiting)["output"][0]["content"][0]["text"] == "made anew"
    for response_id in busy:
        wait_until(
            lambda id_=response_id: shown(stack, id_)["status"] != "in_progress",
            120,
            "the others",
        )
