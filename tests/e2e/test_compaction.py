"""Compaction of a response's context, as its clients and its model see it."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.keys import make_key
from tests.e2e.scripts import dicts, events, replay_raw, stream_raw
from tests.served_stack import ServedStack, wait_until
from tests.upstream_server import Answer, Talk, UpstreamServer, streamed, text, usage

COMPACTED: Any = [{"type": "compaction", "compact_threshold": 1000}]
TRIGGER: Any = {"type": "compaction_trigger"}
TURN = "Turn {}: " + "word " * 60


def summarising(words: str = "SUMMARY", context_length: int = 10**6) -> Answer:
    """The answers of a model that says "yes", and ``words`` if it is asked for a summary.

    It refuses prompts with more characters than ``context_length``.
    """

    def answer(talk: Talk) -> None:
        messages = talk.body["messages"]
        size = sum(len(json.dumps(message)) for message in messages)
        if size > context_length:
            text = (
                f"This model's maximum context length is {context_length} tokens. "
                f"However, your messages resulted in {size} tokens."
            )
            error = {"message": text, "type": "invalid_request_error", "code": None}
            talk.say(400, {"error": error})
            return
        streamed(words if is_summary(talk.body) else "yes")(talk)

    return answer


def is_summary(body: dict[str, Any]) -> bool:
    """Whether the model is asked to summarise."""
    return str(body["messages"][0]["content"]).endswith("what is still to be done.")


@pytest.fixture
def model(odd: UpstreamServer) -> UpstreamServer:
    """The server of the model ``odd``, which summarises."""
    odd.answers = [summarising()]
    odd.asked.clear()
    return odd


def shown(body: dict[str, Any]) -> list[tuple[str, str]]:
    """The roles and beginnings of the messages that the model got."""
    return [(m["role"], str(m.get("content") or "")[:12].strip()) for m in body["messages"]]


def types_of(response: Any) -> list[str]:
    return [item.type for item in response.output]


def test_long_conversation_is_compacted_again_and_again(
    model: UpstreamServer, client: openai.OpenAI
) -> None:
    model.answers = [summarising(context_length=9000)]
    last, compacted, longest = None, 0, 0
    for n in range(100):
        made = client.responses.create(
            model="odd",
            input=TURN.format(n),
            instructions="Be brief.",
            previous_response_id=last,
            context_management=COMPACTED,
        )
        assert made.output_text == "yes"
        assert types_of(made) in (["message"], ["compaction", "message"])
        compacted += len(made.output) - 1
        longest = max(longest, len(model.body["messages"]))
        last = made.id
    assert 3 < compacted < 34  # Each summary is paid for by at least half a threshold of turns.
    assert longest < 40
    assert len(list(client.responses.input_items.list(str(last), limit=100))) > 198


def test_what_is_compacted_is_sent_no_more_but_stays(
    model: UpstreamServer, client: openai.OpenAI, http: httpx.Client
) -> None:
    developer: Any = {"role": "developer", "content": "Answer in Dutch."}
    first = client.responses.create(
        model="odd", input=[developer, {"role": "user", "content": TURN.format(1) * 20}]
    )
    model.asked.clear()
    raw = stream_raw(
        http,
        model="odd",
        input="And now?",
        instructions="Be brief.",
        previous_response_id=first.id,
        context_management=COMPACTED,
    )
    summary, answer = (asked.body for asked in model.asked)
    assert is_summary(summary)
    assert summary["max_tokens"] == 250
    assert "Turn 1: word" in summary["messages"][1]["content"]
    assert shown(answer) == [
        ("system", "Be brief."),
        ("system", "Answer in Du"),
        ("system", "Summary of t"),
        ("user", "And now?"),
    ]
    seen = events(raw)
    added, done = (e for e in seen if e.get("item", {}).get("type") == "compaction")
    assert added["item"]["encrypted_content"] == ""
    assert done["item"]["id"] == added["item"]["id"]
    made = seen[-1]["response"]
    assert [item["type"] for item in made["output"]] == ["compaction", "message"]
    assert made["output"][0] == done["item"]
    assert replay_raw(http, made["id"]) == raw
    # Both turns of the model are counted.
    assert made["usage"]["output_tokens"] == 2
    # The next request begins with what the compaction holds, and so does a client's own list.
    following: list[dict[str, Any]] = [
        {"previous_response_id": made["id"], "input": "More."},
        {"input": [*made["output"], {"role": "user", "content": "More."}], "store": False},
        {
            "input": [
                developer,
                {"role": "user", "content": "Not sent."},
                *made["output"],
                {"role": "user", "content": "More."},
            ]
        },
    ]
    for body in following:
        client.responses.create(model="odd", **body)
        assert shown(model.body) == [
            ("system", "Answer in Du"),
            ("system", "Summary of t"),
            ("user", "And now?"),
            ("assistant", "yes"),
            ("user", "More."),
        ]
    # Nothing is lost: the items are listed, and a request may continue from before.
    listed = list(client.responses.input_items.list(made["id"], order="asc"))
    assert len(listed) == 4
    client.responses.create(model="odd", input="Else?", previous_response_id=first.id)
    assert [role for role, _ in shown(model.body)] == ["system", "user", "assistant", "user"]


def test_trigger_is_answered_by_a_compaction_alone(
    model: UpstreamServer, client: openai.OpenAI
) -> None:
    history: Any = [
        {"role": "user", "content": "Write a file."},
        {"type": "function_call", "call_id": "c", "name": "write", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "written"},
    ]
    made = client.responses.create(model="odd", input=[*history, *[TRIGGER] * 1000])
    assert types_of(made) == ["compaction"]
    assert made.status == "completed"
    assert len(model.asked) == 1
    # The result that the model has not seen stays, with its call and the question.
    more: Any = [*dicts(made.output), {"role": "user", "content": "Well?"}]
    client.responses.create(model="odd", input=more)
    assert [role for role, _ in shown(model.body)] == [
        *("system", "user", "assistant", "tool", "user")
    ]
    # Nothing new: the model is not asked again.
    model.asked.clear()
    again = client.responses.create(
        model="odd", input=[TRIGGER], previous_response_id=made.id, store=False
    )
    assert types_of(again) == ["compaction"]
    stray = client.responses.with_raw_response.create(
        model="odd", input=[TRIGGER, {"role": "user", "content": "x"}]
    )
    assert stray.headers["x-unsupported-params"] == "input[].compaction_trigger"


def test_prompt_that_the_server_refuses_is_compacted(
    model: UpstreamServer, client: openai.OpenAI
) -> None:
    model.answers = [summarising(context_length=4000)]
    long: Any = [{"role": "user", "content": TURN.format(n)} for n in range(40)]
    turns: Any = [item for one in long for item in (one, {"role": "assistant", "content": "ok"})]
    asked: Any = {"model": "odd", "input": [*turns, {"role": "user", "content": "Now?"}]}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**asked)
    assert caught.value.code == "context_length_exceeded"
    made = client.responses.create(
        **asked, context_management=[{"type": "compaction", "compact_threshold": 10**6}]
    )
    assert types_of(made) == ["compaction", "message"]
    assert shown(model.body) == [("system", "Summary of t"), ("user", "Now?")]
    # A newest turn that is too long alone is an error all the same.
    newest: Any = {"role": "user", "content": "x" * 5000}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(
            model="odd",
            input=[*turns, newest],
            context_management=COMPACTED,
        )
    assert caught.value.code == "context_length_exceeded"


def test_empty_summary_is_replaced_by_the_end_of_the_transcript(
    model: UpstreamServer, client: openai.OpenAI
) -> None:
    model.answers = [summarising(words=" ")]
    history: Any = [
        {"role": "user", "content": TURN.format(1)},
        {"role": "assistant", "content": "A"},
    ]
    client.responses.create(model="odd", input=[*history, TRIGGER])
    made = client.responses.create(model="odd", input=[*history, TRIGGER])
    client.responses.create(
        model="odd", input=[*dicts(made.output), {"role": "user", "content": "x"}]
    )
    assert model.body["messages"][0]["content"].endswith("assistant: A")


def test_compaction_counts_tokens_where_the_model_can(client: openai.OpenAI) -> None:
    last, seen = None, list[list[str]]()
    for n in range(12):
        made = client.responses.create(
            model="demo",
            input=TURN.format(n) * 2,
            previous_response_id=last,
            context_management=COMPACTED,
            max_output_tokens=16,
        )
        assert made.usage is not None
        assert made.usage.input_tokens < 4000
        seen.append(types_of(made))
        last = made.id
    assert any("compaction" in types for types in seen)


def test_conversation_is_compacted(model: UpstreamServer, client: openai.OpenAI) -> None:
    talk = client.conversations.create()
    for n in range(30):
        client.responses.create(
            model="odd",
            input=TURN.format(n),
            conversation=talk.id,
            context_management=COMPACTED,
        )
    assert len(model.body["messages"]) < 30
    items = list(client.conversations.items.list(talk.id, limit=100))
    assert "compaction" in {item.type for item in items}
    assert len([item for item in items if item.type == "message"]) == 60


def test_sealed_context_is_read_for_its_project_alone(
    model: UpstreamServer, client: openai.OpenAI, stack: ServedStack
) -> None:
    stranger = stack.client(make_key(stack).secret)
    history: Any = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "A"}]
    made = client.responses.create(model="odd", input=[*history, TRIGGER])
    [item] = dicts(made.output)
    question: Any = {"role": "user", "content": "x"}
    plain = client.responses.compact(model="scripted", input="My name is Ann.")
    legacy = plain.output[-1].to_dict(warnings=False)["encrypted_content"]
    for who, content in (
        (stranger, item["encrypted_content"]),
        (client, item["encrypted_content"][:-3]),
        (client, f"context.{legacy}"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            who.responses.create(
                model="scripted",
                input=[{"type": "compaction", "encrypted_content": content}, question],
            )
        assert caught.value.param == "input[0].encrypted_content"


def test_odd_thresholds_and_triggers_are_refused_by_name(http: httpx.Client) -> None:
    for body, param in (
        ({"context_management": [{"type": "compaction", "compact_threshold": 999}]},
         "context_management[0].compact_threshold"),
        ({"context_management": [{"type": "forget"}]}, "context_management[0].type"),
        ({"context_management": COMPACTED * 17}, "context_management"),
        ({"input": [TRIGGER]}, "input"),
    ):  # fmt: skip
        response = http.post("/v1/responses", json={"model": "scripted", "input": "x", **body})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


def test_instructions_that_leave_no_room_are_named_by_a_field_of_the_request(
    http: httpx.Client,
) -> None:
    body = {"model": "demo", "input": "x", "instructions": "é" * 3_000}
    for path in ("/v1/responses", "/v1/responses/compact"):
        error = http.post(path, json=body).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
        assert error["message"].endswith("Please reduce the length of the input.")


def test_worker_that_dies_while_it_compacts_starts_again(
    model: UpstreamServer, client: openai.OpenAI, stack: ServedStack
) -> None:
    begun = threading.Event()

    def never(talk: Talk) -> None:
        begun.set()
        talk.wait_for_hang_up()

    model.answers = [never]
    history: Any = [{"role": "user", "content": TURN}, {"role": "assistant", "content": "A"}]
    made = client.responses.create(
        model="odd",
        input=[*history, {"role": "user", "content": "x"}, TRIGGER],
        background=True,
    )
    assert begun.wait(60)
    model.answers = [summarising()]
    os.kill(stack.pid_of("worker"), signal.SIGKILL)
    wait_until(lambda: client.responses.retrieve(made.id).status == "completed", 120, "completed")
    done = client.responses.retrieve(made.id)
    assert types_of(done) == ["compaction"]
    events = list(client.responses.retrieve(made.id, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    stack.wait_served("demo")  # For the tests of other files.


def test_cancelled_compaction_ends_and_is_counted(
    model: UpstreamServer, client: openai.OpenAI
) -> None:
    def slow(talk: Talk) -> None:
        talk.begin()
        talk.event(text("half"))
        talk.event(usage(prompt=50, completion=1))
        begun.set()
        talk.wait_for_hang_up()

    begun = threading.Event()
    model.answers = [slow]
    history: Any = [{"role": "user", "content": TURN}, {"role": "assistant", "content": "A"}]
    made = client.responses.create(model="odd", input=[*history, TRIGGER], background=True)
    assert begun.wait(60)
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output == []
    assert cancelled.usage is not None
    assert cancelled.usage.input_tokens == 50
