"""llama.cpp's own HTTP server as the upstream: what weights answer, beside the contract suite."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.core.domain.deltas import (
    Finish,
    PromptDelta,
    TextDelta,
    TokensDelta,
    ToolCallDelta,
)
from inference_site.core.domain.errors import InvalidRequest
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import (
    Constraint,
    GenerationRequest,
    Message,
    Sampling,
    Tool,
)
from tests.sinks import RecordingSink
from tests.upstream_server import llama_server
from worker.engines.base import Engine, load_engine

SPEC = ModelSpec("demo", "openai_upstream", slots=2, context_length=1024)
OSLO = (Message("user", "What is the weather in Oslo?"),)
WEATHER = Tool(
    "get_weather",
    "Get the weather of a city",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    },
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with llama_server(SPEC.slots, SPEC.context_length) as address:
        yield address


@pytest.fixture(scope="module")
def engine(url: str) -> Iterator[Engine]:
    loaded = load_engine(replace(SPEC, options={"base_url": url, "flavor": "llama_cpp"}))
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def in_process() -> Iterator[Engine]:
    """The same model in this process."""
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    loaded = load_engine(replace(SPEC, engine="llama_cpp", file=DEMO_FILE, options=options))
    yield loaded
    loaded.close()


def chat(engine: Engine, **fields: Any) -> RecordingSink:
    asked = {"messages": OSLO, "sampling": Sampling(temperature=0, seed=1), **fields}
    sink = RecordingSink()
    engine.chat(GenerationRequest("demo", **asked), sink)
    return sink


def arguments(sink: RecordingSink) -> Any:
    pieces = [delta for delta in sink.deltas if isinstance(delta, ToolCallDelta)]
    assert pieces[0].name == "get_weather"
    return json.loads("".join(piece.arguments for piece in pieces))


def test_a_chosen_call(engine: Engine) -> None:
    sink = chat(engine, tools=(WEATHER,))
    assert arguments(sink) == {"city": "Oslo"}
    assert (sink.text, sink.finishes) == ("", ["tool_calls"])


@pytest.mark.parametrize("seed", range(3))
def test_a_forced_call_always_comes(engine: Engine, seed: int) -> None:
    sink = chat(
        engine,
        messages=(Message("user", "Tell me a story."),),
        tools=(WEATHER,),
        must_call=True,
        sampling=Sampling(temperature=1.9, seed=seed),
    )
    assert set(arguments(sink)) == {"city"}
    assert (sink.text, sink.finishes) == ("", ["tool_calls"])


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        ("json_schema", SCHEMA, r'\{\s*"colour"\s*:\s*"(red|green)"\s*\}'),
        ("json_object", "", r"(?s)\{.*\}"),
        ("gbnf", 'root ::= "yes" | "no"', "yes|no"),
        ("lark", 'start: "yes" | "no"', "yes|no"),
        ("regex", "[a-c]{5}", "[a-c]{5}"),
    ],
)
def test_constraints_hold(engine: Engine, kind: Any, source: str, pattern: str) -> None:
    constraint = Constraint(kind, source, "grammar")
    sink = chat(engine, constraint=constraint, sampling=Sampling(1.5, seed=1), max_output_tokens=90)
    if sink.finishes == ["stop"]:
        assert re.fullmatch(pattern, sink.text), sink.text


def test_a_wrong_grammar_is_the_clients_fault(engine: Engine) -> None:
    with pytest.raises(InvalidRequest):
        chat(engine, constraint=Constraint("gbnf", "root ::= ghost", "grammar"))


def test_answers_are_those_of_the_model_in_this_process(engine: Engine, in_process: Engine) -> None:
    for fields in ({}, {"tools": (WEATHER,)}, {"top_logprobs": 2, "max_output_tokens": 8}):
        ours, theirs = (chat(one, **fields) for one in (engine, in_process))
        assert ours.text == theirs.text
        assert ours.finishes == theirs.finishes
        assert ours.usage.input_tokens == theirs.usage.input_tokens
        assert ours.usage.output_tokens == theirs.usage.output_tokens


def test_log_probabilities_are_those_of_the_model_in_this_process(
    engine: Engine, in_process: Engine
) -> None:
    found = [
        [entry for d in chat(one, top_logprobs=2, max_output_tokens=8).deltas
         if isinstance(d, TextDelta) for entry in d.logprobs]
        for one in (engine, in_process)
    ]  # fmt: skip
    assert [entry.token for entry in found[0]] == [entry.token for entry in found[1]]
    assert all(len(entry.top) == 2 for entry in found[0])


def test_the_tokens_of_all_choices_are_counted(engine: Engine) -> None:
    told = chat(engine, choices=2, max_output_tokens=3, ignore_eos=True).usage
    assert told.output_tokens == 6


def test_a_completion_of_several_prompts_and_choices(engine: Engine) -> None:
    sink = RecordingSink()
    asked = GenerationRequest(
        "demo", operation="complete", prompts=("One, two,", (1, 5)), choices=2, max_output_tokens=3
    )
    engine.complete(asked, sink)
    assert sorted(d.index for d in sink.deltas if isinstance(d, Finish)) == [0, 1, 2, 3]
    assert sink.usage.output_tokens <= 12
    assert 3 < sink.usage.input_tokens < 12


def test_tokens_and_prompts_are_those_of_the_model_in_this_process(
    engine: Engine, in_process: Engine
) -> None:
    texts = GenerationRequest("demo", operation="tokenize", prompts=("Hello there",))
    shown = GenerationRequest("demo", OSLO, operation="render", tools=(WEATHER,))
    for run, request in (("tokenize", texts), ("render", shown)):
        told = []
        for one in (engine, in_process):
            sink = RecordingSink()
            getattr(one, run)(request, sink)
            told.append(sink.deltas)
        assert told[0] == told[1]
        assert isinstance(told[0][0], TokensDelta | PromptDelta)


def test_the_stop_text_is_told(engine: Engine) -> None:
    messages = (Message("user", "Count from 1 to 20."),)
    sink = chat(engine, messages=messages, stop=("nowhere", "5"))
    assert [d.stop for d in sink.deltas if isinstance(d, Finish)] == ["5"]
