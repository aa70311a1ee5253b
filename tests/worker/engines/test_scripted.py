"""The script language of the engine without weights."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference_site.core.domain.deltas import (
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from inference_site.core.domain.errors import InvalidRequest
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest, Message
from tests.sinks import RecordingSink
from worker.engines.scripted import load


def play(*texts: str, script: list[dict[str, Any]] | None = None) -> RecordingSink:
    """Ask with these user messages."""
    options = {} if script is None else {"script": script}
    sink = RecordingSink()
    messages = tuple(Message("user", text) for text in texts)
    load(ModelSpec("m", "scripted", options=options)).run(GenerationRequest("m", messages), sink)
    return sink


def test_a_message_is_echoed_word_by_word() -> None:
    assert play("Hello  there, you").pieces == ["Hello", " ", " there,", " you"]


def test_only_the_last_user_message_is_played() -> None:
    assert play("first", "second").text == "second"


def test_a_script_in_the_message_is_played_in_order() -> None:
    steps = [{"reasoning": "Hm"}, {"text": "one "}, {"sleep_ms": 1}, {"text": "two"}]
    prompt = len(json.dumps(steps).split())
    assert play(json.dumps(steps)).deltas == [
        Usage(prompt, 0, 0, 0),
        ReasoningDelta("Hm"),
        TextDelta("one "),
        TextDelta("two"),
        Finish("stop"),
        Usage(prompt, 0, 3, 1),
    ]


def test_a_script_recalls_what_the_user_said_before() -> None:
    script: list[dict[str, Any]] = [{"recall": "You said: "}]
    assert play("I am Ada.", "Hi.", "Who am I?", script=script).text == "You said: I am Ada. Hi."
    assert play("Who am I?", script=script).text == "You said: nothing."


def test_the_script_of_the_model_goes_before_the_message() -> None:
    assert play("ignored", script=[{"text": "always"}]).text == "always"


def test_repetitions_nest() -> None:
    inner = {"repeat": 2, "steps": [{"text": "b"}]}
    outer = {"repeat": 2, "steps": [{"text": "a"}, inner]}
    assert play(json.dumps([outer, {"text": "!"}])).text == "abbabb!"


def test_a_finish_ends_the_answer_with_its_reason() -> None:
    sink = play(json.dumps([{"text": "a"}, {"finish": "length"}, {"text": "never"}]))
    assert (sink.text, sink.finishes) == ("a", ["length"])


def test_a_stop_text_is_named_at_the_end() -> None:
    steps = json.dumps([{"text": "one tw"}, {"text": "o three"}])
    sink = RecordingSink()
    request = GenerationRequest("m", (Message("user", steps),), stop=("two",))
    load(ModelSpec("m", "scripted")).run(request, sink)
    assert sink.text == "one "
    assert Finish("stop", stop="two") in sink.deltas


def test_calls_come_in_pieces() -> None:
    calls = [
        {"tool_call": {"name": "f", "arguments": ['{"a":', "1}"]}},
        {"tool_call": {"name": "g", "arguments": []}},
    ]
    sink = play(json.dumps(calls))
    pieces = [delta for delta in sink.deltas if isinstance(delta, ToolCallDelta)]
    assert [(p.call, p.name, p.arguments) for p in pieces] == [
        (0, "f", ""),
        (0, None, '{"a":'),
        (0, None, "1}"),
        (1, "g", ""),
    ]
    ids = [piece.id for piece in pieces if piece.name]
    assert len(set(ids)) == 2
    assert all(str(id_).startswith("call_") for id_ in ids)
    assert sink.finishes == ["tool_calls"]
    assert isinstance(sink.deltas[-1], Usage)
    assert sink.deltas[-1].output_tokens == 2


def test_a_call_is_cut_by_the_limit() -> None:
    steps = json.dumps([{"tool_call": {"name": "f", "arguments": ["a", "b", "c"]}}])
    sink = RecordingSink()
    request = GenerationRequest("m", (Message("user", steps),), max_output_tokens=2)
    load(ModelSpec("m", "scripted")).run(request, sink)
    pieces = [delta.arguments for delta in sink.deltas if isinstance(delta, ToolCallDelta)]
    assert pieces == ["", "a", "b"]
    assert sink.finishes == ["length"]


@pytest.mark.parametrize(
    "script",
    [
        "[1]",
        '["text"]',
        '[{"texxt": "a"}]',
        '[{"text": 1}]',
        '[{"finish": "never"}]',
        '[{"tool_call": {"name": "f"}}]',
        '[{"repeat": 2}]',
        '[{"repeat": "x", "steps": []}]',
        '[{"repeat": 2, "steps": [{"sleep_ms": "x"}]}]',
        '[{"text": "a"',
    ],
)
def test_a_bad_script_is_the_clients_fault(script: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        play(script)
    assert caught.value.param == "messages"
