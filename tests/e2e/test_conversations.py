"""Conversations, and the responses that are part of them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.keys import make_key
from tests.e2e.scripts import ENDLESS, dicts, respond, script, slow
from tests.served_stack import ServedStack, wait_until

UNKNOWN = "conv_" + "0" * 32


def user(text: str) -> Any:
    """An item of the user."""
    return {"type": "message", "role": "user", "content": text}


def texts(client: openai.OpenAI, of: str) -> list[str]:
    """The texts of a conversation's items, oldest first."""
    items = client.conversations.items.list(of, order="asc", limit=100)
    return [item["content"][0]["text"] for item in dicts(items)]


def test_conversation_is_made_read_changed_and_deleted(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    made = client.conversations.create(metadata={"a": "b"})
    assert made.id.startswith("conv_")
    assert made.metadata == {"a": "b"}
    assert client.conversations.retrieve(made.id) == made
    changed = client.conversations.update(made.id, metadata={"c": "\0"})
    assert changed.metadata == {"c": "\0"}
    assert client.conversations.retrieve(made.id).metadata == {"c": "\ufffd"}
    assert client.conversations.update(made.id, metadata=None).metadata == {}
    deleted = client.conversations.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    for attempt in _uses(client, made.id):
        with pytest.raises(openai.NotFoundError, match=f"Conversation with id '{made.id}'"):
            attempt()


def _uses(client: openai.OpenAI, of: str) -> list[Any]:
    return [
        lambda: client.conversations.retrieve(of),
        lambda: client.conversations.update(of, metadata={}),
        lambda: client.conversations.delete(of),
        lambda: client.conversations.items.list(of),
        lambda: client.conversations.items.create(of, items=[user("x")]),
        lambda: client.responses.create(model="scripted", input="x", conversation=of),
    ]


def test_unknown_is_404_and_malformed_is_400(client: openai.OpenAI) -> None:
    for attempt in _uses(client, UNKNOWN):
        with pytest.raises(openai.NotFoundError):
            attempt()
    for attempt in _uses(client, "thread_x"):
        with pytest.raises(openai.BadRequestError) as caught:
            attempt()
        assert caught.value.code == "invalid_value"


def test_body_may_be_empty(http: httpx.Client) -> None:
    bodies: list[Any] = [{"json": {}}, {}, {"headers": {"Content-Type": "application/json"}}]
    for body in bodies:
        response = http.post("/v1/conversations", **body)
        assert response.status_code == 200, response.text
        assert response.json()["metadata"] == {}


@pytest.mark.parametrize("body", ["[]", '""', "0", "false"])
def test_body_that_is_no_object_is_refused(http: httpx.Client, body: str) -> None:
    headers = {"Content-Type": "application/json"}
    assert http.post("/v1/conversations", content=body, headers=headers).status_code == 400


def test_items_are_added_listed_read_and_removed(client: openai.OpenAI) -> None:
    made = client.conversations.create(items=[user("0"), user("1")])
    added = client.conversations.items.create(
        made.id,
        items=[
            user("2"),
            {"role": "assistant", "content": "3"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "ok"},
        ],
    )
    assert [item.type for item in added.data] == [
        *("message", "message", "function_call", "function_call_output")
    ]
    assert added.has_more is False
    newest = client.conversations.items.list(made.id, limit=4)
    assert newest.has_more
    assert newest.data[0].id == added.data[-1].id
    assert [item.id for item in newest][:4] == [item.id for item in reversed(added.data)]
    assert len(list(newest)) == 6  # The SDK turns the page.
    ascending: Any = client.conversations.items.list(made.id, order="asc")
    assert ascending.data[3].content[0].to_dict() == {
        "type": "output_text",
        "text": "3",
        "annotations": [],
        "logprobs": [],
    }
    ids = [str(item.id) for item in ascending]
    page = client.conversations.items.list(made.id, order="asc", after=ids[1], limit=2)
    assert [item.id for item in page.data] == ids[2:4]
    found: Any = client.conversations.items.retrieve(ids[0], conversation_id=made.id)
    assert found.content[0].text == "0"
    left = client.conversations.items.delete(ids[0], conversation_id=made.id)
    assert left.id == made.id
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(ids[0], conversation_id=made.id)
    assert [item.id for item in client.conversations.items.list(made.id, order="asc")] == ids[1:]


@pytest.mark.parametrize("kind", ["compaction", "reasoning"])
@pytest.mark.parametrize("content", ["nonsense", "context.nonsense"])
def test_sealed_content_that_cannot_be_read_is_not_added(
    client: openai.OpenAI, kind: str, content: str
) -> None:
    """It was added, and each later response of the conversation was refused."""
    made = client.conversations.create()
    sealed: Any = {"type": kind, "encrypted_content": content}
    if kind == "reasoning":
        sealed |= {"id": "rs_1", "summary": []}
    items = [user("hello"), sealed]
    for add in (
        lambda: client.conversations.items.create(made.id, items=items),
        lambda: client.conversations.create(items=items),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            add()
        assert caught.value.param == "items[1].encrypted_content"
        assert caught.value.code == "invalid_encrypted_content"
    assert client.conversations.items.list(made.id).data == []


@pytest.mark.parametrize("count", [0, 21])
def test_up_to_twenty_items_are_added_at_once(client: openai.OpenAI, count: int) -> None:
    made = client.conversations.create()
    with pytest.raises(openai.BadRequestError) as caught:
        client.conversations.items.create(made.id, items=[user("x")] * count)
    assert caught.value.param == "items"
    if count:
        with pytest.raises(openai.BadRequestError):
            client.conversations.create(items=[user("x")] * count)


@pytest.mark.parametrize("stream", [False, True])
def test_response_reads_and_extends_its_conversation(client: openai.OpenAI, stream: bool) -> None:
    made = client.conversations.create(items=[user("one two")])
    answer: Any = client.responses.create(
        model="scripted", input="three", conversation=made.id, stream=stream
    )
    final = list(answer)[-1].response if stream else answer
    assert final.conversation.id == made.id
    assert final.usage.input_tokens == 3
    assert texts(client, made.id) == ["one two", "three", "three"]
    items = list(client.conversations.items.list(made.id, order="asc"))
    assert items[-1].id == final.output[0].id
    again = client.responses.create(
        model="scripted", input="four", conversation={"id": made.id}, max_output_tokens=1
    )
    assert again.usage is not None
    assert again.usage.input_tokens == 5
    assert texts(client, made.id)[3:] == ["four", "four"]
    listed = client.responses.input_items.list(final.id, order="asc")
    assert [item["content"][0]["text"] for item in dicts(listed)] == ["one two", "three"]


def test_incomplete_response_is_added_too(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    given = script({"text": "a"}, {"text": "b"})
    client.responses.create(
        model="scripted", input=given, conversation=made.id, max_output_tokens=1
    )
    assert texts(client, made.id) == [given, "a"]


def test_failed_and_cancelled_responses_are_not_added(client: openai.OpenAI) -> None:
    made = client.conversations.create(items=[user("kept")])
    with pytest.raises(openai.InternalServerError):
        respond(client, {"text": "half"}, {"fail": "boom"}, conversation=made.id)
    stopped = client.responses.create(
        model="scripted", input=ENDLESS, conversation=made.id, background=True
    )
    client.responses.cancel(stopped.id)
    assert texts(client, made.id) == ["kept"]
    client.responses.create(model="scripted", input="free again", conversation=made.id)
    assert texts(client, made.id) == ["kept", "free again", "free again"]


def test_unstored_response_reads_but_does_not_write(client: openai.OpenAI) -> None:
    made = client.conversations.create(items=[user("one two")])
    answer = client.responses.create(
        model="scripted", input="three", conversation=made.id, store=False
    )
    assert answer.usage is not None
    assert answer.usage.input_tokens == 3
    assert texts(client, made.id) == ["one two"]


def test_second_run_waits_for_the_first(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    first = client.responses.create(
        model="scripted", input=slow(12), conversation=made.id, background=True
    )
    second: Any = None
    waited_s: list[float] = []
    while second is None:
        asked_at = time.monotonic()
        try:
            second = client.responses.create(model="scripted", input="late", conversation=made.id)
        except openai.BadRequestError as refused:  # The first took longer than may be waited.
            if refused.code != "conversation_locked":
                raise
            waited_s.append(time.monotonic() - asked_at)
    assert all(seconds > 0.9 for seconds in waited_s)
    assert client.responses.retrieve(first.id).status == "completed"
    assert texts(client, made.id) == [slow(12), "x " * 12, "late", "late"]
    assert second.status == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_second_run_does_not_wait_for_ever(client: openai.OpenAI, stream: bool) -> None:
    made = client.conversations.create()
    first = client.responses.create(
        model="scripted", input=ENDLESS, conversation=made.id, background=True
    )
    started = time.monotonic()
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="scripted", input="x", conversation=made.id, stream=stream)
    assert 0.9 < time.monotonic() - started < 60
    assert (caught.value.code, caught.value.param) == ("conversation_locked", "conversation")
    client.responses.cancel(first.id)


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.stress)])
def test_waiters_on_one_conversation_hold_nobody_else_up(
    stack: ServedStack, client: openai.OpenAI, count: int
) -> None:
    """They are many more than the threads that run views."""
    made = client.conversations.create()
    first = client.responses.create(
        model="scripted", input=ENDLESS, conversation=made.id, background=True
    )
    waiter = {"model": "scripted", "input": "x", "conversation": made.id}
    key, unbounded = {"Authorization": f"Bearer {stack.key}"}, httpx.Limits(max_connections=None)
    with (
        httpx.Client(base_url=stack.url, headers=key, timeout=120, limits=unbounded) as http,
        make_key(stack).http(stack) as other,
        ThreadPoolExecutor(count) as threads,
    ):
        waiting = [threads.submit(http.post, "/v1/responses", json=waiter) for _ in range(count)]
        answered = 0
        while not all(request.done() for request in waiting):
            assert other.get("/v1/models").status_code == 200
            answered += 1
            time.sleep(0.01)  # Those that wait are what is to keep the site busy.
        errors = [request.result().json()["error"] for request in waiting]
    client.responses.cancel(first.id)
    assert {error["code"] for error in errors} == {"conversation_locked"}
    assert answered > 1  # One of them before the last of those that waited.


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.stress)])
def test_runs_of_one_conversation_at_once_come_one_after_the_other(
    stack: ServedStack, client: openai.OpenAI, rounds: int
) -> None:
    with ThreadPoolExecutor(8) as threads:
        for _ in range(rounds):
            made = client.conversations.create()
            together = threading.Barrier(8)
            runs = [threads.submit(_run, client, made.id, n, together) for n in range(8)]
            answers = {run.result().id: str(n) for n, run in enumerate(runs)}
            said = texts(client, made.id)
            assert said[::2] == said[1::2]
            assert sorted(said[::2]) == sorted(answers.values())
            for answer, own in answers.items():
                given = dicts(client.responses.input_items.list(answer, order="asc", limit=100))
                seen = [item["content"][0]["text"] for item in given]
                assert seen == said[: said.index(own) + 1]
            places = stack.sql(
                "SELECT item.conversation_position FROM responses_api_item item "
                "JOIN responses_api_conversation c ON c.id = item.conversation_id "
                "WHERE c.public_id = %s ORDER BY 1",
                made.id,
            )
            assert places == [(n,) for n in range(16)]


def _run(client: openai.OpenAI, of: str, number: int, together: threading.Barrier) -> Any:
    """Run a response when the conversation is free, as a client does that is told to retry."""
    together.wait()
    deadline = time.monotonic() + 60
    while True:
        try:
            return client.responses.create(model="scripted", input=str(number), conversation=of)
        except openai.BadRequestError as refused:
            if refused.code != "conversation_locked" or time.monotonic() > deadline:
                raise


def test_responses_of_a_deleted_conversation_stay_readable(client: openai.OpenAI) -> None:
    made = client.conversations.create(items=[user("before")])
    answer = client.responses.create(model="scripted", input="x", conversation=made.id)
    client.conversations.delete(made.id)
    assert client.responses.retrieve(answer.id) == answer
    items = client.responses.input_items.list(answer.id, order="asc")
    assert [item["content"][0]["text"] for item in dicts(items)] == ["before", "x"]
    after = client.responses.create(model="scripted", input="y", previous_response_id=answer.id)
    assert after.usage is not None
    assert after.usage.input_tokens == 4


def test_deleted_response_stays_in_its_conversation(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    answer = client.responses.create(model="scripted", input="x", conversation=made.id)
    client.responses.delete(answer.id)
    assert texts(client, made.id) == ["x", "x"]


@pytest.mark.parametrize("rounds", [2, pytest.param(30, marks=pytest.mark.stress)])
def test_all_of_a_conversation_is_deleted_at_once(
    stack: ServedStack, client: openai.OpenAI, rounds: int
) -> None:
    """Whichever comes first, each is answered, and in the end nothing is left."""
    with ThreadPoolExecutor(8) as threads:
        for n in range(rounds):
            made = client.conversations.create(items=[user("before")])
            kept = [
                client.responses.create(model="scripted", input=f"{n}", conversation=made.id).id
                for _ in range(3)
            ]
            after = client.responses.create(
                model="scripted", input="after", previous_response_id=kept[0]
            )
            runs = client.responses.create(
                model="scripted", input=slow(3), conversation=made.id, background=True
            )
            every = [*kept, after.id, runs.id]
            together = threading.Barrier(6)

            def delete(act: Any, id_: str, together: threading.Barrier = together) -> None:
                together.wait()
                act(id_)

            deletions = [threads.submit(delete, client.responses.delete, id_) for id_ in every]
            deletions.append(threads.submit(delete, client.conversations.delete, made.id))
            for deletion in deletions:
                deletion.result()
            rows = stack.sql(
                "SELECT public_id FROM responses_api_storedresponse WHERE public_id = ANY(%s) "
                "UNION ALL SELECT public_id FROM responses_api_conversation WHERE public_id = %s",
                every,
                made.id,
            )
            assert rows == []


def test_conversation_deleted_while_a_response_runs(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    runs = client.responses.create(
        model="scripted", input=slow(10), conversation=made.id, background=True
    )
    client.conversations.delete(made.id)
    wait_until(lambda: client.responses.retrieve(runs.id).status == "completed", 120, "completed")
