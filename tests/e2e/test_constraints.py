"""``response_format`` and ``grammar``: the text matches, whatever the model would have said."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

QUESTION: list[Any] = [{"role": "user", "content": "Tell me a story."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": ["red", "green"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["colour", "size"],
    "additionalProperties": False,
}


def text_of(client: openai.OpenAI, **fields: Any) -> str:
    """The answer to a question that asks for something else altogether."""
    completion = client.chat.completions.create(
        model="demo", messages=QUESTION, max_tokens=200, temperature=1.5, extra_body=fields
    )
    assert completion.choices[0].finish_reason == "stop"
    return completion.choices[0].message.content or ""


def fits(value: Any) -> bool:
    """Whether the value matches SCHEMA."""
    return (
        set(value) == {"colour", "size"}
        and value["colour"] in ("red", "green")
        and value["size"] in range(1, 10)
    )


@pytest.mark.parametrize("strict", [True, False, None])
def test_json_schema_is_always_met(client: openai.OpenAI, strict: bool | None) -> None:
    wanted = {"name": "thing", "schema": SCHEMA, "strict": strict}
    text = text_of(client, response_format={"type": "json_schema", "json_schema": wanted})
    assert fits(json.loads(text))


COLOUR: dict[str, Any] = {
    "type": "function",
    "function": {"name": "paint", "description": "Paint it", "parameters": SCHEMA},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"response_format": FORMAT, "tools": [COLOUR], "tool_choice": "none"},
        {"tools": [COLOUR], "tool_choice": "required"},
    ],
    ids=["schema", "tools that may not be called", "call"],
)
def test_ignore_eos_adds_nothing_to_a_constrained_answer(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=QUESTION, max_tokens=200, extra_body={**fields, "ignore_eos": True}
    )
    choice = raw.parse().choices[0]
    calls = choice.message.model_dump()["tool_calls"]
    text = calls[0]["function"]["arguments"] if calls else choice.message.content
    assert fits(json.loads(text or ""))
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert raw.headers["x-unsupported-params"] == "ignore_eos"


def test_json_object_is_an_object(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Give me JSON with a name."}],
        temperature=0,
        response_format={"type": "json_object"},
        max_tokens=300,
    )
    text = completion.choices[0].message.content or ""
    assert text.lstrip().startswith("{")
    if completion.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_text_format_constrains_nothing(client: openai.OpenAI) -> None:
    assert text_of(client, response_format={"type": "text"}, temperature=0)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= ("yes" | "no") "!"', r"(yes|no)!"),
        ({"type": "gbnf", "value": "root ::= [0-9] [0-9]"}, r"\d\d"),
        ({"type": "regex", "value": r"[A-F]{3}-[0-9]{2}"}, r"[A-F]{3}-[0-9]{2}"),
        ({"type": "regex", "value": r"a/b|c/d"}, r"a/b|c/d"),
        ({"type": "lark", "value": 'start: "left" | "right"'}, r"left|right"),
        # llama.cpp would take these for no grammar at all.
        ({"type": "lark", "value": r'start: "\x41\\x41" | "\xe9" /\x42/'}, r"A\\x41|éB"),
        ({"type": "regex", "value": "a\0b"}, "a\0b"),
        (
            {"type": "llguidance", "value": {"grammars": [{"lark_grammar": "start: /x{2,3}/"}]}},
            r"x{2,3}",
        ),
    ],
)
def test_grammar_of_each_kind_is_met(client: openai.OpenAI, grammar: Any, pattern: str) -> None:
    assert re.fullmatch(pattern, text_of(client, grammar=grammar))


CHOICES = ["red (dark)", "green\nor blue", "a/b"]
GUIDED: list[tuple[dict[str, Any], str | None]] = [
    ({"guided_json": SCHEMA}, None),
    ({"guided_json": json.dumps(SCHEMA)}, None),
    ({"guided_regex": "[A-F]{3}"}, "[A-F]{3}"),
    ({"guided_choice": CHOICES}, "|".join(map(re.escape, CHOICES))),
    ({"guided_grammar": "root ::= [0-9] [0-9]"}, r"\d\d"),
    ({"regex": "[A-F]{3}"}, "[A-F]{3}"),
    ({"ebnf": "root ::= [0-9] [0-9]"}, r"\d\d"),
    ({"guided_grammar": 'start: "left" | "right"'}, "left|right"),
    ({"json_schema": SCHEMA}, None),
    ({"structured_outputs": {"json": SCHEMA}}, None),
    ({"structured_outputs": {"regex": "[xy]{4}"}}, "[xy]{4}"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"grammar": "root ::= [0-9]"}}, r"\d"),
    # As guidance sends a grammar to vLLM of any version.
    (
        {
            "structured_outputs": {"grammar": '%llguidance {}\nstart: "left" | "right"\n'},
            "guided_grammar": '%llguidance {}\nstart: "left" | "right"\n',
            "guided_decoding_backend": "guidance",
        },
        "left|right",
    ),
]


@pytest.mark.parametrize(("fields", "pattern"), GUIDED)
def test_fields_of_vllm_constrain_every_kind_of_answer(
    client: openai.OpenAI, fields: dict[str, Any], pattern: str | None
) -> None:
    completion = client.completions.create(
        model="demo", prompt="Once", max_tokens=100, extra_body=fields
    )
    response = client.responses.create(
        model="demo", input="Hello", max_output_tokens=100, extra_body=fields
    )
    for text in (text_of(client, **fields), completion.choices[0].text, response.output_text):
        assert fits(json.loads(text)) if pattern is None else re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}},
        {"type": "json_object", "schema": SCHEMA},
    ],
)
def test_completion_may_have_a_format(client: openai.OpenAI, wanted: dict[str, Any]) -> None:
    fields = {"response_format": wanted}
    completion = client.completions.create(
        model="demo", prompt="Once", max_tokens=100, extra_body=fields
    )
    assert fits(json.loads(completion.choices[0].text))


def test_json_object_may_have_a_schema(client: openai.OpenAI) -> None:
    text = text_of(client, response_format={"type": "json_object", "schema": SCHEMA})
    assert fits(json.loads(text))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": "no JSON"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "grammar": "root ::= [a]"}, "guided_regex"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
        ),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ],
)
def test_bad_field_of_vllm_is_refused(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        text_of(client, **fields)
    assert caught.value.param == param


BAD_SCHEMAS: list[dict[str, Any]] = [
    {"type": "ghost"},
    {"enum": 5},
    {"type": "string", "pattern": "["},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a"}}},
]


@pytest.mark.parametrize("schema", BAD_SCHEMAS)
def test_bad_schema_is_refused_everywhere(client: openai.OpenAI, schema: dict[str, Any]) -> None:
    fields = {"guided_json": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for ask in (
        lambda: text_of(client, **fields),
        lambda: client.completions.create(model="demo", prompt="Once", extra_body=fields),
        lambda: client.responses.create(model="demo", input="Hi", extra_body=fields),
        lambda: text_of(client, tools=[tool]),
        lambda: text_of(client, tools=[tool], tool_choice="required"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask()
        assert caught.value.param in ("guided_json", "tools[0].function.parameters")


def test_schema_that_completions_cannot_be_bound_to_is_refused(client: openai.OpenAI) -> None:
    schema = {"type": "array", "uniqueItems": True}
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="A", extra_body={"guided_json": schema})
    assert caught.value.param == "guided_json"


@pytest.mark.parametrize(
    "named",
    [
        {"$id": "Output Format"},
        {"$schema": "https://json-schema.org/draft-07/schema#"},
        {"$schema": "http://json-schema.org/schema#"},
        {"$id": "https://example.com/thing", "properties": {
            "colour": {"$ref": "#/$defs/colour"}, "size": SCHEMA["properties"]["size"]
        }, "$defs": {"colour": SCHEMA["properties"]["colour"]}},
        {"properties": {
            name: {"$id": f"The {name}", **part} for name, part in SCHEMA["properties"].items()
        }},
    ],
    ids=[
        "name with a space", "dialect over https", "newest dialect", "name beside references",
        "names of parts",
    ],
)  # fmt: skip
def test_name_of_a_schema_and_of_its_dialect_change_nothing(
    client: openai.OpenAI, named: dict[str, Any]
) -> None:
    schema = {**SCHEMA, **named}
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    assert fits(json.loads(text_of(client, response_format=wanted)))
    call = client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        tools=[{"type": "function", "function": {"name": "paint", "parameters": schema}}],
        tool_choice="required",
    )
    [made] = call.choices[0].message.tool_calls or []
    assert isinstance(made, ChatCompletionMessageFunctionToolCall)
    assert fits(json.loads(made.function.arguments))


def test_pattern_that_looks_ahead_leaves_a_tool_usable(client: openai.OpenAI) -> None:
    mail = {"type": "string", "pattern": "^(?!\\.)[a-z]+$"}
    parameters = {"type": "object", "properties": {"mail": mail}}
    assert text_of(client, tools=[
        {"type": "function", "function": {"name": "f", "parameters": parameters}}
    ], temperature=0)  # fmt: skip


@pytest.mark.parametrize("value", [SCHEMA, json.dumps(SCHEMA)])
def test_grammar_may_be_a_json_schema(client: openai.OpenAI, value: Any) -> None:
    assert fits(json.loads(text_of(client, grammar={"type": "json_schema", "value": value})))


def test_constraint_also_holds_in_a_stream_and_for_every_choice(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        n=2,
        stream=True,
        extra_body={"grammar": {"type": "regex", "value": "[ab]{8}"}},
    )
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert all(re.fullmatch("[ab]{8}", text) for text in texts)


class Thing(pydantic.BaseModel):
    """What the client wants to be given."""

    colour: Literal["red", "green"]
    size: Literal[1, 2, 3]


def test_grammar_of_a_model_that_may_think_may_begin_with_white_space(
    client: openai.OpenAI,
) -> None:
    for source in ('root ::= "  yes"', 'root ::= [ \\n] "yes"'):
        assert text_of(client, grammar=source, enable_thinking=True).strip() == "yes"


def test_parse_with_a_pydantic_model(client: openai.OpenAI) -> None:
    completion = client.chat.completions.parse(
        model="demo", messages=QUESTION, response_format=Thing, max_tokens=100
    )
    assert isinstance(completion.choices[0].message.parsed, Thing)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"grammar": "root ::= 'x'", "response_format": {"type": "json_object"}}, "grammar"),
        ({"grammar": {"type": "abnf", "value": "x"}}, "grammar.type"),
        ({"grammar": {"type": "regex", "value": {}}}, "grammar.value"),
        ({"grammar": {"type": "json_schema", "value": "{"}}, "grammar.value"),
        ({"grammar": {"type": "json_schema", "value": "[]"}}, "grammar.value"),
        ({"grammar": {"type": "llguidance", "value": {"grammars": []}}}, "grammar"),
        ({"grammar": "this is no grammar"}, "grammar"),
        ({"grammar": {"type": "regex", "value": "("}}, "grammar"),
        ({"grammar": {"type": "lark", "value": "start: unknown"}}, "grammar"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema",
                                 "json_schema": {"name": "x", "schema": {"type": "ghost"}}}},
            "response_format",
        ),
    ],
)  # fmt: skip
def test_bad_constraint_is_400_and_names_the_parameter(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=QUESTION, extra_body=fields)
    assert caught.value.param == param
