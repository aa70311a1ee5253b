"""Responses in the background, and stopping and deleting them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.scripts import ENDLESS, dicts, events, replay_raw, respond, slow, types
from tests.served_stack import ServedStack, wait_until
from tests.upstream_server import UpstreamServer

UNKNOWN = "resp_" + "0" * 32


@pytest.fixture(autouse=True)
def _free_slots(stack: ServedStack) -> Iterator[None]:
    """Stop what a test has left running."""
    yield
    left = stack.sql(
        "SELECT public_id FROM generations_generation WHERE background AND status IN (%s, %s)",
        *("queued", "running"),
    )
    with stack.http() as http:
        for (public_id,) in left:
            http.post(f"/v1/responses/{public_id}/cancel")


def begin(client: openai.OpenAI, given: str = ENDLESS, **fields: Any) -> Any:
    """Create a response in the background."""
    return client.responses.create(model="scripted", input=given, background=True, **fields)


def running(client: openai.OpenAI, **fields: Any) -> Any:
    """Create one and wait until it has said something."""
    made = begin(client, **fields)
    wait_until(lambda: client.responses.retrieve(made.id).output_text, 120, "output")
    return made


def test_a_completion_window_is_no_reason_to_wait(client: openai.OpenAI) -> None:
    options = {"completion_window": "8h", "continuation_id": "report"}
    raw = client.responses.with_raw_response.create(
        model="scripted", input="x", background=True, extra_body={"background_options": options}
    )
    made = raw.parse()
    assert (made.service_tier, raw.headers.get("x-unsupported-params")) == ("default", None)
    wait_until(lambda: client.responses.retrieve(made.id).status == "completed", 120, "the end")


def test_background_answers_at_once_and_is_polled(client: openai.OpenAI) -> None:
    made = begin(client, slow(10, 300))  # It runs for many times as long as a look takes.
    assert (made.status, made.output, made.background) == ("queued", [], True)
    seen: list[Any] = []

    def ended() -> bool:
        seen.append(client.responses.retrieve(made.id))
        return seen[-1].status not in ("queued", "in_progress")

    wait_until(ended, 120, "the end")
    assert seen[-1].status == "completed"
    assert seen[-1].output_text == "x " * 10
    partial = [shown for shown in seen if shown.status == "in_progress" and shown.output]
    assert partial, "nothing was shown while it ran"
    assert partial[0].output[0].status == "in_progress"
    assert partial[0].output[0].id == seen[-1].output[0].id
    assert seen[-1].output_text.startswith(partial[0].output_text)
    order = ["queued", "in_progress", "completed"]
    assert sorted((s.status for s in seen), key=order.index) == [s.status for s in seen]


def test_background_goes_on_when_its_client_leaves(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    stream = begin(client, slow(15), stream=True)
    first = next(stream)
    for _ in range(4):
        next(stream)
    stream.close()
    wait_until(
        lambda: client.responses.retrieve(first.response.id).status == "completed", 120, "completed"
    )
    assert events(replay_raw(http, first.response.id))[-1]["type"] == "response.completed"


def test_foreground_is_stopped_when_its_client_leaves(client: openai.OpenAI) -> None:
    stream: Any = client.responses.create(model="scripted", input=ENDLESS, stream=True)
    first = next(stream)
    for _ in range(6):
        next(stream)
    stream.close()
    wait_until(  # It would have gone on for 80 s.
        lambda: client.responses.retrieve(first.response.id).status == "cancelled", 60, "cancelled"
    )
    stored = client.responses.retrieve(first.response.id)
    assert stored.output_text.startswith("x ")
    assert stored.output[0].to_dict()["status"] == "incomplete"


def test_cancel_stops_the_engine(
    stack: ServedStack, client: openai.OpenAI, http: httpx.Client
) -> None:
    made = running(client)
    started = time.monotonic()
    cancelled = client.responses.cancel(made.id)
    assert time.monotonic() - started < 30  # It would have gone on for 80 s.
    assert cancelled.status == "cancelled"
    assert stack.row(made.id)["status"] == "cancelled"
    assert cancelled.output_text.startswith("x ")
    assert (cancelled.error, cancelled.completed_at) == (None, None)
    assert cancelled.usage is not None
    assert cancelled.usage.output_tokens > 0
    raw = replay_raw(http, made.id)
    assert types(raw)[-2:] == ["output_item.done", "failed"]
    assert events(raw)[-1]["response"] == http.get(f"/v1/responses/{made.id}").json()
    assert events(raw)[-1]["response"]["status"] == "cancelled"
    assert client.responses.cancel(made.id) == cancelled  # Twice is once.


def test_cancel_tells_who_reads_along(client: openai.OpenAI) -> None:
    made = running(client)
    stream: Any = client.responses.retrieve(made.id, stream=True)
    next(stream)
    client.responses.cancel(made.id)
    last = list(stream)[-1]
    assert last.type == "response.failed"
    assert last.response.status == "cancelled"


def test_cancelled_before_it_is_claimed_never_runs(
    stack: ServedStack, client: openai.OpenAI, http: httpx.Client
) -> None:
    holders = [running(client) for _ in range(4)]
    made = begin(client, "late")
    assert client.responses.retrieve(made.id).status == "queued"
    started = time.monotonic()
    cancelled = client.responses.cancel(made.id)
    assert time.monotonic() - started < 30  # It would have gone on for 80 s.
    assert (cancelled.status, cancelled.output) == ("cancelled", [])
    assert types(replay_raw(http, made.id)) == ["created", "queued", "failed"]
    assert stack.row(made.id)["claimed_at"] is None
    listed = {
        status: {r["id"] for r in http.get(f"/v1/responses?status={status}").json()["data"]}
        for status in ("in_progress", "queued", "cancelled")
    }
    assert {holder.id for holder in holders} <= listed["in_progress"]
    assert not {holder.id for holder in holders} & listed["queued"]
    assert made.id in listed["cancelled"]
    for holder in holders:
        client.responses.cancel(holder.id)


def test_cancelling_what_has_ended_changes_nothing(client: openai.OpenAI) -> None:
    made = begin(client, "hello")
    wait_until(lambda: client.responses.retrieve(made.id).status == "completed", 120, "completed")
    before = client.responses.retrieve(made.id)
    assert client.responses.cancel(made.id) == before
    assert client.responses.retrieve(made.id) == before


def test_cancel_takes_an_empty_body(client: openai.OpenAI, http: httpx.Client) -> None:
    made = begin(client, "hello")
    response = http.post(
        f"/v1/responses/{made.id}/cancel", headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 200


def test_foreground_cannot_be_cancelled(client: openai.OpenAI) -> None:
    made = respond(client, {"text": "a"})
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(made.id)


def test_failure_in_the_background_is_stored(client: openai.OpenAI, http: httpx.Client) -> None:
    made = respond(client, {"text": "half"}, {"fail": "boom"}, background=True)
    wait_until(lambda: client.responses.retrieve(made.id).status == "failed", 120, "failed")
    failed = client.responses.retrieve(made.id)
    assert failed.error is not None
    assert failed.error.to_dict() == {
        "code": "server_error",
        "message": "The model failed: boom",
    }
    assert failed.output_text == "half"
    assert types(replay_raw(http, made.id))[-2:] == ["error", "failed"]


@pytest.mark.parametrize(
    ("status", "said", "code"),
    [
        (429, "Slow down.", "rate_limit_exceeded"),
        (400, "Bad.", "invalid_prompt"),
        (400, "This model's maximum context length is 8192 tokens. However, your messages resulted "
              "in 9000 tokens.", "context_length_exceeded"),
    ],
)  # fmt: skip
def test_failures_have_the_codes_of_openai(
    client: openai.OpenAI, odd: UpstreamServer, status: int, said: str, code: str
) -> None:
    odd.answers = [lambda talk: talk.say(status, {"error": {"message": said}})]
    made = client.responses.create(model="odd", input="Hi", background=True)
    wait_until(lambda: client.responses.retrieve(made.id).status == "failed", 120, "failed")
    failed = client.responses.retrieve(made.id)
    assert failed.error is not None
    assert failed.error.code == code


def test_failure_before_the_first_word_is_a_stream_in_the_background(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    made = respond(client, {"fail": "boom"}, background=True)
    wait_until(lambda: client.responses.retrieve(made.id).status == "failed", 120, "failed")
    assert types(replay_raw(http, made.id)) == [
        *("created", "queued", "in_progress", "error", "failed")
    ]


@pytest.mark.parametrize("background", [False, True])
def test_deleted_response_is_gone(
    client: openai.OpenAI, http: httpx.Client, background: bool
) -> None:
    made = respond(client, {"text": "a"}, background=background)
    wait_until(lambda: client.responses.retrieve(made.id).status == "completed", 120, "completed")
    answer = http.delete(f"/v1/responses/{made.id}").json()
    assert answer == {"id": made.id, "object": "response", "deleted": True}
    for attempt in _uses(client, made.id):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{made.id}' not found"):
            attempt()
    listed = http.get("/v1/responses").json()["data"]
    assert made.id not in [response["id"] for response in listed]


def test_unknown_response_is_404_everywhere(client: openai.OpenAI) -> None:
    for attempt in _uses(client, UNKNOWN):
        with pytest.raises(openai.NotFoundError) as caught:
            attempt()
        assert caught.value.code == "response_not_found"


def _uses(client: openai.OpenAI, of: str) -> list[Any]:
    return [
        lambda: client.responses.retrieve(of),
        lambda: client.responses.retrieve(of, stream=True),
        lambda: client.responses.cancel(of),
        lambda: client.responses.delete(of),
        lambda: client.responses.input_items.list(of),
    ]


def test_deleting_what_runs_stops_it_first(stack: ServedStack, client: openai.OpenAI) -> None:
    made = running(client)

    def delete(_: int) -> bool:
        try:
            client.responses.delete(made.id)
        except openai.NotFoundError:
            return False
        return True

    started = time.monotonic()
    with ThreadPoolExecutor(3) as pool:  # The others waited 10 s for the end of what was deleted.
        assert any(pool.map(delete, range(3)))
    assert time.monotonic() - started < 10  # It would have gone on for 80 s.
    assert stack.row(made.id)["status"] == "cancelled"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_deleted_items_stay_while_others_build_on_them(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    first = respond(client, {"text": "one"})
    second = respond(client, {"text": "two"}, previous_response_id=first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, {"text": "x"}, previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(
            model="scripted", input=[{"type": "item_reference", "id": first.output[0].id}]
        )
    third = respond(client, {"text": "three"}, previous_response_id=second.id)
    history = client.responses.input_items.list(third.id, order="asc", limit=100)
    said = dicts(history)
    assert [item["content"][0]["text"] for item in said if item["role"] == "assistant"] == [
        *("one", "two")
    ]
    assert client.responses.retrieve(second.id).previous_response_id == first.id

    def kept() -> list[str]:
        rows = stack.sql(
            "SELECT public_id FROM responses_api_storedresponse WHERE public_id = ANY(%s)",
            [first.id, second.id, third.id],
        )
        return sorted(row[0] for row in rows)

    client.responses.delete(second.id)
    assert len(kept()) == 3
    client.responses.delete(third.id)
    assert kept() == []
