"""What a model of random weights says fits all the same, because it is made to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from inference_site.core.domain.deltas import ToolCallDelta
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import (
    Constraint,
    ConstraintKind,
    GenerationRequest,
    Message,
    Sampling,
    Tool,
    custom_tool,
)
from tests.sinks import RecordingSink
from tests.tiny_weights import write_model
from worker.engines.base import Engine, load_engine
from worker.runtime.tool_calls import CustomCalls

pytestmark = pytest.mark.slow  # It generates with weights.

SEEDS = range(8)
NO_HALF_CHARACTERS = tuple((3 + byte, -100.0) for byte in range(128, 256))
"""A bias against tokens that are single bytes of a character: llama.cpp's grammars let them make
no character at all, and its parser fails on that."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "deep": {
            "type": "object",
            "properties": {"flag": {"type": "boolean"}},
            "required": ["flag"],
            "additionalProperties": False,
        },
    },
    "required": ["colour", "count", "tags", "deep"],
    "additionalProperties": False,
}
TOOLS = (
    Tool("pick", "Pick a thing", SCHEMA),
    Tool("look_at", None, {"properties": {"x": {"type": "null"}}, "required": ["x"]}),
    Tool("nothing", None, {}),
)


def fits(value: Any) -> bool:
    """Whether the value matches SCHEMA."""
    return (
        value.keys() == {"colour", "count", "tags", "deep"}
        and value["colour"] in ("red", "green")
        and value["count"] in range(1, 100)
        and len(value["tags"]) <= 3
        and all(isinstance(tag, str) and len(tag) <= 4 for tag in value["tags"])
        and value["deep"] in ({"flag": True}, {"flag": False})
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_model(tmp_path_factory.mktemp("weights") / "random.gguf")
    spec = ModelSpec(
        "random",
        "llama_cpp",
        path,
        slots=2,
        context_length=1024,
        options={"chat_template_kwargs": {"enable_thinking": False}},
    )
    loaded = load_engine(spec)
    yield loaded
    loaded.close()


def ask(
    engine: Engine,
    seed: int,
    bias: tuple[tuple[int, float], ...] = NO_HALF_CHARACTERS,
    **fields: Any,
) -> RecordingSink:
    sink = RecordingSink()
    sampling = Sampling(temperature=1.5, top_k=0, min_p=0.0, seed=seed, logit_bias=bias)
    engine.run(
        GenerationRequest(
            "random",
            (Message("user", "Hello"),),
            sampling,
            **{"max_output_tokens": 400, **fields},
        ),
        sink,
    )
    return sink


def test_unbound_it_says_what_nobody_can_use(engine: Engine) -> None:
    sink = ask(engine, 1)
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(sink.text)


def call_of(sink: RecordingSink) -> tuple[str, str]:
    """Name and arguments of the one call there must be."""
    pieces = [delta for delta in sink.deltas if isinstance(delta, ToolCallDelta)]
    assert [piece.call for piece in pieces] == [0] * len(pieces)
    assert [bool(piece.id and piece.name) for piece in pieces] == [True] + [False] * (
        len(pieces) - 1
    )
    assert sink.text == ""
    return pieces[0].name or "", "".join(piece.arguments for piece in pieces)


def fitting_calls(engine: Engine, tools: tuple[Tool, ...]) -> list[str]:
    """The names of the calls that were whole, each of which must fit; the others are cut."""
    names = []
    for seed in SEEDS:
        sink = ask(engine, seed, tools=tools, must_call=True)
        if sink.finishes == ["length"]:
            continue
        assert sink.finishes == ["tool_calls"]
        name, text = call_of(sink)
        arguments = json.loads(text)
        assert isinstance(arguments, dict)
        assert name != "pick" or fits(arguments)
        assert name != "look_at" or arguments == {"x": None}
        assert name != "nothing" or arguments == {}
        names.append(name)
    return names


def test_forced_call_is_of_a_tool_and_fits_its_schema(engine: Engine) -> None:
    names = fitting_calls(engine, TOOLS)
    assert names
    assert set(names) <= {tool.name for tool in TOOLS}


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_named_call_fits_its_schema(engine: Engine, tool: Tool) -> None:
    assert set(fitting_calls(engine, (tool,))) == {tool.name}


def test_each_choice_has_a_call_of_its_own(engine: Engine) -> None:
    sink = next(
        sink
        for seed in SEEDS
        if (sink := ask(engine, seed, tools=TOOLS[:1], must_call=True, choices=2)).finishes
        == ["tool_calls"] * 2
    )
    pieces = [delta for delta in sink.deltas if isinstance(delta, ToolCallDelta)]
    texts = ["".join(p.arguments for p in pieces if p.index == n) for n in (0, 1)]
    assert all(fits(json.loads(text)) for text in texts)
    assert len({piece.id for piece in pieces if piece.id}) == 2


@pytest.mark.parametrize("seed", SEEDS)
def test_forced_call_of_a_custom_tool_is_plain_text(engine: Engine, seed: int) -> None:
    tools = (custom_tool("run", None),)
    sink = ask(engine, seed, tools=tools, must_call=True, max_output_tokens=100)
    calls = CustomCalls(tools)
    passed = [piece for delta in sink.deltas for piece in calls.take(delta)]
    texts = [piece.arguments for piece in passed if isinstance(piece, ToolCallDelta)]
    "".join(texts).encode()
    if sink.finishes == ["tool_calls"]:
        assert json.loads(call_of(sink)[1], strict=False)["input"] == "".join(texts)


GRAMMARS: list[tuple[ConstraintKind, str, str]] = [
    ("gbnf", 'root ::= ("yes" | "no") "!" [0-9] [0-9]?', r"(yes|no)!\d\d?"),
    ("regex", r"[A-F]{3}-[0-9]{2}", r"[A-F]{3}-[0-9]{2}"),
    ("regex", r"(a/b|ü🦊){1,3}", r"(a/b|ü🦊){1,3}"),
    ("lark", 'start: ("left" | "right") (" " /[0-9]{1,3}/)?', r"(left|right)( \d{1,3})?"),
    ("lark", 'start: X ~ 1 "x~2" ("y" | /~3/)~2..3\nX: "a"~2', r"aax~2(y|~3){2,3}"),
    ("llguidance", json.dumps({"grammars": [{"lark_grammar": "start: /x{2,30}/"}]}), r"x{2,30}"),
]


@pytest.mark.parametrize(("kind", "source", "pattern"), GRAMMARS)
def test_grammar_of_each_kind_is_met(
    engine: Engine, kind: ConstraintKind, source: str, pattern: str
) -> None:
    for seed in SEEDS:
        sink = ask(engine, seed, constraint=Constraint(kind, source, "grammar"))
        assert sink.finishes == ["stop"]
        assert re.fullmatch(pattern, sink.text)


SCHEMAS: list[tuple[ConstraintKind, str]] = [
    ("json_schema", json.dumps(SCHEMA)),
    ("llguidance", json.dumps({"grammars": [{"json_schema": SCHEMA}]})),
]


@pytest.mark.parametrize(("kind", "source"), SCHEMAS)
def test_json_schema_is_met(engine: Engine, kind: ConstraintKind, source: str) -> None:
    finishes = set()
    for seed in SEEDS:
        sink = ask(engine, seed, constraint=Constraint(kind, source, "response_format"))
        finishes.update(sink.finishes)
        assert sink.finishes == ["length"] or fits(json.loads(sink.text))
    assert "stop" in finishes


def test_link_of_a_schema_is_a_link(engine: Engine) -> None:
    link = {"type": "string", "format": "uri", "maxLength": 9}
    schema = {"type": "object", "properties": {"link": link}, "required": ["link"]}
    constraint = Constraint("json_schema", json.dumps(schema), "response_format")
    ended = [sink.text for seed in SEEDS if (sink := ask(engine, seed, constraint=constraint))]
    links = [json.loads(text)["link"] for text in ended if text.endswith("}")]
    assert links
    assert all(re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*:\S+", link) for link in links)


def test_link_of_a_schema_in_a_grammar_is_a_link(engine: Engine) -> None:
    source = 'start: "<" link ">"\nlink: %json {"type": "string", "format": "uri", "maxLength": 9}'
    sinks = [ask(engine, n, constraint=Constraint("lark", source, "grammar")) for n in SEEDS]
    links = [json.loads(sink.text[1:-1]) for sink in sinks if sink.finishes == ["stop"]]
    assert links
    assert all(re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*:\S+", link) for link in links)


def test_keyword_that_is_ignored_leaves_the_others_in_force(engine: Engine) -> None:
    share = {"type": "number", "minimum": 0.25, "maximum": 0.5}
    rest = {"type": "array", "items": {"type": "null"}, "maxItems": 2, "uniqueItems": True}
    properties = {"share": share, "rest": rest}
    schema = {"type": "object", "properties": properties, "required": ["share", "rest"]}
    constraint = Constraint("json_schema", json.dumps(schema), "response_format")
    ended = [sink.text for seed in SEEDS if (sink := ask(engine, seed, constraint=constraint))]
    shares = [json.loads(text)["share"] for text in ended if text.endswith("}")]
    assert shares
    assert all(0.25 <= share <= 0.5 for share in shares)


@pytest.mark.parametrize("seed", SEEDS)
def test_json_object_is_an_object_unless_the_limit_cuts_it(engine: Engine, seed: int) -> None:
    constraint = Constraint("json_object", "", "response_format")
    sink = ask(engine, seed, constraint=constraint)
    assert sink.text.lstrip().startswith("{")
    if sink.finishes == ["stop"]:
        assert isinstance(json.loads(sink.text), dict)


def test_bytes_that_are_no_character_do_not_fail_a_constrained_answer(engine: Engine) -> None:
    constraint = Constraint("json_object", "", "response_format")
    for seed in SEEDS:
        ask(engine, seed, bias=(), constraint=constraint)
