"""Reasoning and log probabilities of responses."""

from __future__ import annotations

import math
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.scripts import events, replay_raw, respond, script, stream_raw, types

CAPITAL = "What is the capital of Japan?"
THINK: dict[str, Any] = {"enable_thinking": True}


def test_reasoning_is_an_item_of_its_own(client: openai.OpenAI) -> None:
    made = client.responses.create(model="demo", input=CAPITAL, temperature=0, extra_body=THINK)
    assert [item.type for item in made.output] == ["reasoning", "message"]
    thought: Any = made.output[0]
    assert thought.summary == []
    assert thought.content[0].type == "reasoning_text"
    assert thought.content[0].text
    assert thought.encrypted_content is None
    assert "think>" not in thought.content[0].text + made.output_text
    assert made.usage is not None
    reasoning = made.usage.output_tokens_details.reasoning_tokens
    assert 0 < reasoning < made.usage.output_tokens


@pytest.mark.parametrize(("effort", "thinks"), [("low", True), ("none", False)])
def test_effort_turns_it_on_and_off(client: openai.OpenAI, effort: Any, thinks: bool) -> None:
    made = client.responses.create(
        model="demo", input=CAPITAL, temperature=0, reasoning={"effort": effort}
    )
    assert ("reasoning" in [item.type for item in made.output]) is thinks
    assert made.reasoning is not None
    assert made.reasoning.effort == effort


def test_reasoning_is_streamed_before_the_text(http: httpx.Client) -> None:
    raw = stream_raw(http, model="demo", input=CAPITAL, temperature=0, **THINK)
    order = list(dict.fromkeys(types(raw)))
    assert order.index("reasoning_text.delta") < order.index("output_text.delta")
    thought, message = events(raw)[-1]["response"]["output"]
    assert (thought["type"], message["type"]) == ("reasoning", "message")


def test_reasoning_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    made = respond(client, {"reasoning": "a"}, {"reasoning": "b"}, max_output_tokens=1)
    assert made.status == "incomplete"
    [thought] = made.output
    assert thought.status == "incomplete"
    after = client.responses.create(model="scripted", input="x", previous_response_id=made.id)
    assert after.status == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_sealed_reasoning_is_taken_back_without_the_servers_memory(
    client: openai.OpenAI, stream: bool
) -> None:
    answer: Any = client.responses.create(
        model="demo",
        input=CAPITAL,
        store=False,
        temperature=0,
        include=["reasoning.encrypted_content"],
        stream=stream,
        extra_body=THINK,
    )
    made = list(answer)[-1].response if stream else answer
    thought, message = (item.to_dict() for item in made.output)
    assert thought["encrypted_content"]
    question = {"role": "user", "content": CAPITAL}
    sealed = {k: v for k, v in thought.items() if k != "content"}
    for replayed in (sealed, thought):
        history: Any = [question, replayed, message, question]
        after = client.responses.create(model="demo", input=history, store=False, temperature=0)
        assert after.status == "completed"
    tampered: Any = [question, {**sealed, "encrypted_content": "x"}, message, question]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="demo", input=tampered)
    assert caught.value.code == "invalid_encrypted_content"
    assert caught.value.param == "input[1].encrypted_content"


def test_log_probabilities_come_when_they_are_included(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": CAPITAL, "temperature": 0}
    plain: Any = client.responses.create(**asked, top_logprobs=2)
    assert plain.output[0].content[0].logprobs == []
    made: Any = client.responses.create(
        **asked, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    entries = made.output[0].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == made.output_text
    for entry in entries:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob <= 0
        assert math.isclose(entry.logprob, entry.top_logprobs[0].logprob, abs_tol=1e-3)
    again: Any = client.responses.retrieve(made.id)
    assert again == made


def test_log_probabilities_of_the_deltas_are_those_of_the_whole(http: httpx.Client) -> None:
    """They are asked for by the other spelling of a list in a query, too."""
    body = {"model": "demo", "input": CAPITAL, "temperature": 0}
    raw = stream_raw(http, **body, include=["message.output_text.logprobs"])
    pieces = [e["logprobs"] for e in events(raw) if e["type"] == "response.output_text.delta"]
    final = events(raw)[-1]["response"]
    assert [entry for piece in pieces for entry in piece] == final["output"][0]["content"][0][
        "logprobs"
    ]
    assert all(entry["top_logprobs"] == [] for piece in pieces for entry in piece)


@pytest.mark.parametrize("name", ["include", "include[]"])
def test_include_of_a_query_is_taken_in_both_spellings(
    client: openai.OpenAI, http: httpx.Client, name: str
) -> None:
    made = respond(client, {"text": "a"})
    for path in (f"/v1/responses/{made.id}", f"/v1/responses/{made.id}/input_items"):
        response = http.get(path, params=[(name, "reasoning.encrypted_content")] * 2)
        assert response.status_code == 200, response.text


THOUGHT = [{"reasoning": "First this. Then\n\n"}, {"reasoning": "that? More."}, {"text": "a"}]


@pytest.mark.parametrize(
    ("kind", "summary"),
    [
        ("auto", "First this. Then\n\nthat? More."),
        ("detailed", "First this. Then\n\nthat? More."),
        ("concise", "First this. that?"),
    ],
)
def test_summary_is_made_of_the_reasoning(
    client: openai.OpenAI, http: httpx.Client, kind: Any, summary: str
) -> None:
    made: Any = respond(client, *THOUGHT, reasoning={"summary": kind})
    assert made.reasoning.summary == kind
    [part] = made.output[0].summary
    assert (part.type, part.text) == ("summary_text", summary)
    assert made.output[0].content[0].text == "First this. Then\n\nthat? More."
    raw = stream_raw(http, input=script(*THOUGHT), reasoning={"generate_summary": kind})
    assert types(raw)[types(raw).index("content_part.done") + 1 :][:5] == [
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    final = events(raw)[-1]["response"]
    assert final["output"][0]["summary"] == [{"type": "summary_text", "text": summary}]
    assert replay_raw(http, final["id"]) == raw


def test_summary_of_reasoning_that_is_cut_is_incomplete(http: httpx.Client) -> None:
    raw = stream_raw(
        http, input=script(*THOUGHT), reasoning={"summary": "auto"}, max_output_tokens=1
    )
    [done] = [e for e in events(raw) if e["type"] == "response.reasoning_summary_part.done"]
    assert done["status"] == "incomplete"


def test_context_of_reasoning_is_shown_as_it_takes_effect(client: openai.OpenAI) -> None:
    for asked, shown in (("auto", "all_turns"), ("current_turn", "current_turn")):
        made: Any = respond(client, {"text": "a"}, reasoning={"context": asked})
        assert made.reasoning.context == shown
