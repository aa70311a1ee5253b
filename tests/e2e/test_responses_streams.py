"""Streams of responses that are read again: from the log, by many, live, and after the log."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.earlier import earlier
from tests.e2e.scripts import (
    CUSTOM,
    WEATHER,
    call,
    events,
    frames,
    replay_raw,
    respond,
    script,
    slow,
    stream_raw,
    types,
)
from tests.served_stack import ServedStack, wait_until

STEPS = script({"reasoning": "Hm"}, {"text": "Hel"}, {"text": "lo"})


def response_id(raw: list[str]) -> str:
    """The id of the response that a stream is of."""
    return str(events(raw)[0]["response"]["id"])


def forget_log(stack: ServedStack, of: str) -> None:
    """Do to the event log what its time to live does."""
    with stack.redis() as redis:
        assert redis.delete(f"{{{of}}}:log") == 1


@pytest.mark.parametrize("background", [False, True])
def test_finished_stream_is_replayed_byte_for_byte(http: httpx.Client, background: bool) -> None:
    raw = stream_raw(http, input=STEPS, background=background)
    created = response_id(raw)
    assert replay_raw(http, created) == raw
    for after in (0, 3, len(raw) - 3):
        assert replay_raw(http, created, after) == raw[after + 1 :]


def test_response_that_was_not_streamed_has_a_stream_too(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    made = respond(client, {"text": "a"}, {"text": "b"})
    raw = replay_raw(http, made.id)
    assert types(raw)[0] == "created"
    assert events(raw)[-1]["response"] == http.get(f"/v1/responses/{made.id}").json()


def test_background_stream_is_queued_first(http: httpx.Client) -> None:
    raw = stream_raw(http, input=STEPS, background=True)
    assert types(raw)[:4] == ["created", "queued", "in_progress", "output_item.added"]
    assert [event["response"]["status"] for event in events(raw)[:3]] == [
        "queued",
        "queued",
        "in_progress",
    ]


def test_what_follows_the_end_is_empty(
    client: openai.OpenAI, http: httpx.Client, stack: ServedStack
) -> None:
    """From the log, and when that is gone."""
    made = respond(client, {"text": "a"})
    last = events(replay_raw(http, made.id))[-1]["sequence_number"]
    for _ in range(2):
        for after in (last, last + 1, last + 2, 999_999_999):
            assert replay_raw(http, made.id, after) == ["data: [DONE]"]
        with stack.redis() as redis:
            redis.delete(f"{{{made.id}}}:log")


def test_silence_is_filled_with_comments(http: httpx.Client) -> None:
    """They come when the log is read again, too, and are no events."""
    given = script({"text": "a"}, {"sleep_ms": 60_000}, {"text": "b"})
    body = {"model": "scripted", "input": given, "background": True}
    made = http.post("/v1/responses", json=body).json()["id"]
    query, text, is_cancelled = {"stream": "true", "starting_after": "3"}, "", False
    with http.stream("GET", f"/v1/responses/{made}", params=query) as response:
        for piece in response.iter_text():
            text += piece
            if ": ping\n\n" in text and not is_cancelled:
                assert http.post(f"/v1/responses/{made}/cancel").status_code == 200
                is_cancelled = True
    assert ": ping\n\n" in text
    assert replay_raw(http, made, 3) == [
        frame for frame in text.split("\n\n")[:-1] if not frame.startswith(":")
    ]


@pytest.mark.parametrize("is_over", [True, False])
def test_nothing_comes_after_the_end(
    client: openai.OpenAI, http: httpx.Client, is_over: bool
) -> None:
    made = client.responses.create(model="scripted", input=slow(5), background=True)
    if is_over:
        wait_until(lambda: client.responses.retrieve(made.id).status == "completed", 120, "over")
    assert replay_raw(http, made.id, 5000) == ["data: [DONE]"]
    assert client.responses.retrieve(made.id).status == "completed"


@pytest.mark.parametrize("after", ["x", "-1", "1.5", "9999999999"])
def test_bad_starting_point_is_400(client: openai.OpenAI, http: httpx.Client, after: str) -> None:
    made = respond(client, {"text": "a"})
    query = {"stream": "true", "starting_after": after}
    response = http.get(f"/v1/responses/{made.id}", params=query)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "starting_after"


@pytest.mark.parametrize("background", [False, True])
def test_three_read_a_running_response_and_a_slow_one_loses_nothing(
    stack: ServedStack, background: bool
) -> None:
    body = {"model": "scripted", "input": slow(40, 25), "stream": True, "background": background}

    def resumed(created: str) -> list[str]:
        with stack.http() as http:
            return replay_raw(http, created, 3)

    over = threading.Event()

    def slowly(created: str) -> list[str]:
        """Read an event, and the others when the first reader has them all."""
        path, query = f"/v1/responses/{created}", {"stream": "true"}
        with stack.http() as http, http.stream("GET", path, params=query) as response:
            lines = response.iter_lines()
            read = list(itertools.islice(lines, 3))
            assert over.wait(120)
            return _frames_of([*read, *lines])

    with stack.http() as http, ThreadPoolExecutor(2) as pool:
        with http.stream("POST", "/v1/responses", json=body) as response:
            lines = response.iter_lines()
            begun = [next(lines)]
            while not begun[-1].startswith("data: "):  # A comment comes first when it is slow.
                begun.append(next(lines))
            created = response_id(_frames_of(begun))
            late, slow_one = pool.submit(resumed, created), pool.submit(slowly, created)
            first = _frames_of([*begun, *lines])
        over.set()  # Nobody has waited for the slow one.
        assert late.result() == first[4:]
        assert slow_one.result() == first
    assert len(first) > 45


def _frames_of(lines: list[str]) -> list[str]:
    frames = "\n".join(lines).rstrip("\n").split("\n\n")
    return [frame for frame in frames if not frame.startswith(":")]


def test_official_client_follows_from_where_it_was(client: openai.OpenAI) -> None:
    stream = client.responses.create(model="scripted", input=slow(20), stream=True, background=True)
    seen: list[Any] = []
    for event in stream:
        seen.append(event)
        if event.sequence_number == 6:
            break
    stream.close()
    rest = list(
        client.responses.retrieve(
            seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number
        )
    )
    assert [event.sequence_number for event in seen + rest] == list(range(len(seen + rest)))
    assert rest[-1].type == "response.completed"
    assert rest[-1].response.output_text == "x " * 20


def test_reader_that_leaves_stops_nothing(client: openai.OpenAI, http: httpx.Client) -> None:
    made = client.responses.create(model="scripted", input=slow(20), background=True)
    query = {"stream": "true"}
    with http.stream("GET", f"/v1/responses/{made.id}", params=query) as response:
        next(response.iter_lines())
    wait_until(lambda: client.responses.retrieve(made.id).status == "completed", 120, "completed")


def test_stream_can_be_read_while_it_is_not_claimed(client: openai.OpenAI) -> None:
    holders = [
        client.responses.create(model="scripted", input=slow(400), background=True)
        for _ in range(4)
    ]
    made = client.responses.create(model="scripted", input="late", background=True)
    stream: Any = client.responses.retrieve(made.id, stream=True)
    assert [next(stream).type for _ in range(2)] == ["response.created", "response.queued"]
    for holder in holders:
        client.responses.cancel(holder.id)
    assert [event.type for event in stream][-1] == "response.completed"


@pytest.mark.parametrize(
    ("steps", "fields"),
    [
        ([{"reasoning": "Hm"}, {"text": "Hel"}, {"text": "lo"}], {}),
        ([{"sleep_ms": 1}], {}),
        ([call("get_weather", '{"city":', '"Oslo"}'), call("get_weather")], {"tools": [WEATHER]}),
        ([call("run", '{"input": "1 +', ' 2"}')], {"tools": [CUSTOM]}),
        ([{"text": "a "}, {"text": "b"}, {"text": "c"}], {"max_output_tokens": 2}),
        ([{"text": "half"}, {"fail": "boom"}], {}),
        ([{"text": "a"}, {"text": "żó"}, {"text": "🦊"}], {}),
    ],
)
@pytest.mark.parametrize("background", [False, True])
def test_stream_whose_log_has_expired_is_made_anew(
    stack: ServedStack, http: httpx.Client, steps: list[Any], fields: Any, background: bool
) -> None:
    """Its events are the same. The keys of a schema may come in another order."""
    body = {"model": "scripted", "input": script(*steps), "background": background, **fields}
    created = http.post("/v1/responses", json=body)
    found = created.json()
    if created.status_code == 500:
        found = found["error"]["partial_response"]
    path, query = f"/v1/responses/{found['id']}", {"stream": "true"}
    live = replay_raw(http, found["id"])
    forget_log(stack, found["id"])
    with http.stream("GET", path, params=query) as response:
        assert "x-replay" not in response.headers
        rebuilt = frames(response)
    assert events(rebuilt) == events(live)
    for after in (0, 4, len(live) - 3):
        assert replay_raw(http, found["id"], after) == rebuilt[after + 1 :]


def test_stream_of_which_only_the_items_are_known_has_a_delta_for_each_text(
    stack: ServedStack, http: httpx.Client
) -> None:
    """So it is with responses that were stored by the release before."""
    created = http.post("/v1/responses", json={"model": "scripted", "input": STEPS}).json()["id"]
    live = replay_raw(http, created)
    forget_log(stack, created)
    stack.sql("UPDATE responses_api_storedresponse SET deltas = NULL WHERE public_id = %s", created)
    path, query = f"/v1/responses/{created}", {"stream": "true"}
    with http.stream("GET", path, params=query) as response:
        assert response.headers["x-replay"] == "compacted"
        rebuilt = frames(response)
    assert _without_deltas(rebuilt) == _without_deltas(live)
    assert replay_raw(http, created, 2) == rebuilt[3:]
    for seen in (len(rebuilt) - 2, len(live) + 40):  # Of the stream as it was before.
        [last] = events(replay_raw(http, created, seen))
        assert last == events(rebuilt)[-1] | {"sequence_number": seen + 1}


def test_log_that_says_nothing_of_the_end_is_not_waited_for(
    stack: ServedStack, http: httpx.Client
) -> None:
    """The worker died after the response had ended, and before it said so."""
    created = http.post("/v1/responses", json={"model": "scripted", "input": STEPS}).json()["id"]
    live = replay_raw(http, created)
    with stack.redis() as redis:
        assert redis.xdel(f"{{{created}}}:log", "18446744073709551615-0") == 1
    with earlier(stack, "finished_at", "1 hour", "public_id", created):
        began = time.monotonic()
        rebuilt = replay_raw(http, created)
    assert time.monotonic() - began < 20
    assert _without_deltas(rebuilt) == _without_deltas(live)


def test_end_that_is_told_between_two_looks_reaches_who_came_then(
    stack: ServedStack, http: httpx.Client
) -> None:
    """The response has ended, its log is closed a moment later: the writer knows of the reader."""
    created = http.post("/v1/responses", json={"model": "scripted", "input": STEPS}).json()["id"]
    live = replay_raw(http, created)
    log = f"{{{created}}}:log"
    with stack.redis() as redis:
        ((last, fields),) = redis.xrevrange(log, count=1)
        redis.xdel(log, last)
        path, query = f"/v1/responses/{created}", {"stream": "true"}
        with http.stream("GET", path, params=query) as response:
            lines = response.iter_lines()
            read = [next(lines)]
            followers = redis.smembers(f"{{{created}}}:followers")
            assert [name.decode().startswith("web.") for name in followers] == [True]
            redis.delete(log)  # A stream takes back no id that it had.
            redis.xadd(log, fields, id=last)
            read += lines
    assert _frames_of(read)[-1] == live[-1]


def _without_deltas(raw: list[str]) -> list[dict[str, Any]]:
    kept = [event for event in events(raw) if not event["type"].endswith(".delta")]
    return [{k: v for k, v in event.items() if k != "sequence_number"} for event in kept]
