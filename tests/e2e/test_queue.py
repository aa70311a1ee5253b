"""The queue as clients see it: places, fairness among projects, and its bound."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import httpx
from websockets.sync.client import connect

from tests.e2e.keys import MadeKey, make_key
from tests.e2e.scripts import ENDLESS, script
from tests.e2e.test_disconnect import busy, run_s
from tests.served_stack import ServedStack, wait_until

SLOTS = 4
BRIEF = {"model": "scripted", "input": script({"sleep_ms": 30}, {"text": "ok"})}
_BEFORE = """
SELECT count(*) FROM generations_generation crowd, generations_generation one
WHERE one.api_key_id = %s AND crowd.api_key_id = %s
    AND crowd.claimed_at BETWEEN one.created_at AND one.claimed_at
"""
_FILL = """
INSERT INTO generations_generation
SELECT filled.* FROM generations_generation one, generate_series(1, %s) number,
    LATERAL jsonb_populate_record(one, jsonb_build_object(
        'id', nextval(pg_get_serial_sequence('generations_generation', 'id')),
        'public_id', format('filling-%%s-%%s', number, txid_current()), 'status', 'queued',
        'worker', '', 'claimed_at', null, 'attempt', 0, 'service_class', %s)) filled
WHERE one.id = (SELECT max(id) FROM generations_generation WHERE status = 'running')
"""
_EMPTY = "DELETE FROM generations_generation WHERE public_id LIKE 'filling-%%'"


@contextmanager
def all_slots_held(stack: ServedStack, key: MadeKey) -> Iterator[None]:
    """Have as much run as can."""
    held = {"model": "scripted", "stream": True}
    held["messages"] = [{"role": "user", "content": ENDLESS}]
    with key.http(stack) as http, ExitStack() as streams:
        lines = []
        for _ in range(SLOTS):
            stream = http.stream("POST", "/v1/chat/completions", json=held)
            lines.append(streams.enter_context(stream).iter_lines())
        for one in lines:
            next(one)
        wait_until(lambda: busy(stack, "scripted") == SLOTS, 120, "all slots known to be taken")
        yield


def has_ended(http: httpx.Client, made: Any) -> bool:
    return bool(http.get(f"/v1/responses/{made['id']}").json()["status"] == "completed")


def test_who_waits_is_told_of_its_place(stack: ServedStack, http: httpx.Client) -> None:
    """Afterwards, and with a slot free, there is none."""
    wait_until(lambda: place(http.post("/v1/responses", json=BRIEF)) == 0, 120, "a free slot")
    # Until the lease says how long its runs take, no wait is estimated.
    wait_until(lambda: run_s(stack, "scripted") > 0, 120, "how long its runs take")
    owner = make_key(stack)
    with all_slots_held(stack, owner):
        late = {**BRIEF, "background": True}
        made = [http.post("/v1/responses", json=late)]
        # Until the lease says that all slots are busy, it might start at once.
        first = f"/v1/responses/{made[0].json()['id']}"
        wait_until(lambda: place(http.get(first)) == 1, 120, "the lease of the busy worker")
        made += [http.post("/v1/responses", json=late) for _ in range(2)]
        assert [place(answer) for answer in made[1:]] == [2, 3]
        assert all(int(answer.headers["x-queue-estimated-wait"]) >= 0 for answer in made[1:])
        now = [http.get(f"/v1/responses/{answer.json()['id']}") for answer in made]
        assert [place(answer) for answer in now] == [1, 2, 3]
        with http.stream("POST", "/v1/responses", json={**late, "stream": True}) as stream:
            assert stream.headers["x-queue-position"] == "4"
    for answer in made:
        wait_until(partial(has_ended, http, answer.json()), 120, "its end")
    ended = http.get(f"/v1/responses/{made[0].json()['id']}")
    assert "x-queue-position" not in ended.headers


def place(answer: httpx.Response) -> int:
    """The position that an answer tells."""
    assert answer.status_code == 200, answer.text
    return int(answer.headers["x-queue-position"])


def test_a_crowd_delays_another_project_by_one_run_of_each_slot(stack: ServedStack) -> None:
    crowd, one = make_key(stack), make_key(stack)
    late = {**BRIEF, "background": True}
    with crowd.http(stack) as many, one.http(stack) as single:
        with all_slots_held(stack, crowd):
            made = [many.post("/v1/responses", json=late).json() for _ in range(40)]
            alone = single.post("/v1/responses", json=late).json()
        wait_until(lambda: has_ended(single, alone), 120, "the end of the one")
        assert stack.sql(_BEFORE, one.id, crowd.id)[0][0] <= SLOTS
        wait_until(lambda: has_ended(many, made[-1]), 120, "the end of the crowd")


def test_a_project_that_floods_a_queue_is_refused_and_nobody_else(stack: ServedStack) -> None:
    """By every door: what it sends in the background, and then in the foreground."""
    flooder, one = make_key(stack, requests_per_minute=1000), make_key(stack)
    late = {**BRIEF, "background": True}
    chat = {"model": "scripted", "messages": [{"role": "user", "content": BRIEF["input"]}]}
    with flooder.http(stack) as flood, one.http(stack) as other:
        try:
            with all_slots_held(stack, flooder):
                fill(stack, 500, 10)
                assert_refused(flood.post("/v1/responses", json=late))
                flex = {**chat, "service_tier": "flex"}
                assert_refused(flood.post("/v1/chat/completions", json=flex))
                assert place(other.post("/v1/responses", json=late)) > 0
                fill(stack, 500, 0)
                assert_refused(flood.post("/v1/responses", json=BRIEF))
                assert_refused(flood.post("/v1/chat/completions", json=chat))
                ollama = flood.post("/api/chat", json=chat)
                assert (ollama.status_code, list(ollama.json())) == (429, ["error"])
                assert refused_on_socket(stack, flooder) == "project_queue_full"
                # Of the other project, one is accepted, and goes before all that waits.
                answer = other.stream("POST", "/v1/chat/completions", json={**chat, "stream": True})
                with answer as stream:
                    assert place(stream) <= SLOTS
            assert other.post("/v1/chat/completions", json=chat).status_code == 200
        finally:
            stack.sql(_EMPTY)


def fill(stack: ServedStack, count: int, service_class: int) -> None:
    """Queue this many generations of the project with the slots; return when they are counted."""
    stack.sql(_FILL, count, service_class)
    time.sleep(1)  # A web process counts what waits each half second.


def assert_refused(answer: httpx.Response) -> None:
    """Assert that it is refused because its project has its share of the queue."""
    assert answer.status_code == 429, answer.text
    assert answer.json()["error"]["code"] == "project_queue_full"
    assert int(answer.headers["retry-after"]) > 0
    assert answer.headers["x-ratelimit-limit-requests"] == "1000"


def refused_on_socket(stack: ServedStack, key: MadeKey) -> str:
    """The code of the error that a response over a WebSocket gets."""
    url = f"{stack.url.replace('http', 'ws', 1)}/v1/responses"
    headers = {"Authorization": f"Bearer {key.secret}"}
    with connect(url, additional_headers=headers, proxy=None) as socket:
        socket.send(json.dumps({"type": "response.create", **BRIEF}))
        return str(json.loads(socket.recv(60))["error"]["code"])


def test_a_full_queue_refuses_at_once_and_has_room_again(stack: ServedStack) -> None:
    filler, one = make_key(stack), make_key(stack)
    late = {**BRIEF, "background": True}
    with one.http(stack) as http:
        try:
            with all_slots_held(stack, filler):
                fill(stack, 2000, 10)
                wait_until(lambda: is_full(http, late), 120, "a full queue")
                refused = [http.post("/v1/responses", json=late) for _ in range(5)]
                assert {answer.status_code for answer in refused} == {503}
                assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
                stack.sql(_EMPTY)
                wait_until(lambda: not is_full(http, late), 120, "room")
        finally:
            stack.sql(_EMPTY)


def is_full(http: httpx.Client, body: dict[str, Any]) -> bool:
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code in (200, 503), answer.text
    return answer.status_code == 503 and answer.json()["error"]["code"] == "queue_full"
