"""What servers are asked: fields under their names, and nothing they do not know."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from inference_site.core.domain.deltas import TextDelta
from inference_site.core.domain.errors import InvalidRequest
from inference_site.core.domain.request import (
    AudioPart,
    Constraint,
    GenerationRequest,
    ImagePart,
    Message,
    Sampling,
    TextPart,
    Tool,
    ToolCall,
)
from tests.sinks import RecordingSink
from tests.upstream_server import UpstreamServer, chunks, delta, finish, streamed, text, usage
from tests.worker.engines.openai_upstream.conftest import Load
from worker.engines.base import Engine
from worker.engines.chat.tools import plain_schema

HELLO = (Message("user", "Hello"),)
TOOLS = (Tool("f", "Does it", {"type": "object"}), Tool("g", None, {}))
EVERYTHING = Sampling(
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.1,
    typical_p=0.8,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    dry_multiplier=0.4,
    dry_penalty_last_n=10**9,
    dry_sequence_breakers=("x",),
    xtc_probability=0.1,
    mirostat=2,
    logit_bias=((5, -1.0),),
    seed=2**40,
)


def asked(engine: Engine, server: UpstreamServer, **fields: Any) -> dict[str, Any]:
    """What the server gets for a chat."""
    asked = {"messages": HELLO, **fields}
    engine.run(GenerationRequest("m", **asked), RecordingSink())
    assert server.asked[-1].path == "/v1/chat/completions"
    return server.body


def test_nothing_is_sent_that_was_not_asked_for(server: UpstreamServer, engine: Engine) -> None:
    assert asked(engine, server) == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


COMMON = {"temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"}


@pytest.mark.parametrize(
    ("flavor", "names"),
    [
        ("openai", COMMON | {"logit_bias"}),
        ("ollama", COMMON),
        ("tgi", COMMON | {"logit_bias"}),
        ("vllm", COMMON | {"logit_bias", "top_k", "min_p", "repetition_penalty"}),
        ("sglang", COMMON | {"logit_bias", "top_k", "min_p", "repetition_penalty"}),
        (
            "llama_cpp",
            COMMON
            | {"logit_bias", "top_k", "min_p", "typical_p", "repeat_penalty", "mirostat"}
            | {"dry_multiplier", "dry_penalty_last_n", "dry_sequence_breakers"}
            | {"xtc_probability"},
        ),
    ],
)
def test_samplers_have_the_names_of_the_server(
    server: UpstreamServer, load: Load, flavor: str, names: set[str]
) -> None:
    body = asked(load(flavor=flavor), server, sampling=EVERYTHING)
    own = {"messages", "model", "stream", "stream_options", "timings_per_token", "verbose"}
    assert body.keys() - own == names
    assert body.get("logit_bias", {"5": -1.0}) == {"5": -1.0}
    assert body["temperature"] == 0.5


def test_an_explicit_zero_is_sent(server: UpstreamServer, engine: Engine) -> None:
    assert asked(engine, server, sampling=Sampling(temperature=0))["temperature"] == 0


def test_numbers_fit_what_llama_cpp_can_hold(server: UpstreamServer, load: Load) -> None:
    limits = {"max_output_tokens": 2**53, "reasoning_budget": 2**53}
    body = asked(load(flavor="llama_cpp"), server, sampling=EVERYTHING, **limits)
    assert body["seed"] < 2**32
    assert body["dry_penalty_last_n"] == 2048
    assert body["max_tokens"] == body["thinking_budget_tokens"] == 2**31 - 1


def test_an_operator_renames_and_leaves_out_fields(server: UpstreamServer, load: Load) -> None:
    fields = {"max_tokens": "max_completion_tokens", "top_k": "k", "seed": None, "regex": "a.b"}
    engine = load(fields=fields)
    sampling = Sampling(top_k=3, seed=5)
    constraint = Constraint("regex", "a+", "grammar")
    body = asked(engine, server, sampling=sampling, max_output_tokens=9, constraint=constraint)
    assert (body["max_completion_tokens"], body["k"], body["a"]) == (9, 3, {"b": "a+"})
    assert not body.keys() & {"max_tokens", "top_k", "seed"}


TWO_ANSWERS = chunks(finish(), finish(index=1), usage())


def test_the_rest_of_a_chat(server: UpstreamServer, load: Load) -> None:
    server.answers = [TWO_ANSWERS]
    body = asked(
        load(flavor="vllm"),
        server,
        max_output_tokens=5,
        stop=("a", "b"),
        stop_token_ids=(7,),
        ignore_eos=True,
        choices=2,
        top_logprobs=0,
        reasoning_budget=50,
    )
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (body["max_tokens"], body["stop"], body["stop_token_ids"]) == (5, ["a", "b"], [7])
    assert (body["ignore_eos"], body["n"]) == (True, 2)
    assert (body["logprobs"], body["top_logprobs"]) == (True, 0)
    assert body["thinking_token_budget"] == 50


@pytest.mark.parametrize(
    "fields",
    [{"constraint": Constraint("regex", "a", "grammar")}, {"tools": TOOLS[:1], "must_call": True}],
    ids=["constraint", "call"],
)
def test_a_constrained_answer_is_never_asked_to_go_on(
    server: UpstreamServer, load: Load, fields: dict[str, Any]
) -> None:
    sink = RecordingSink()
    request = GenerationRequest("m", HELLO, ignore_eos=True, **fields)
    load(flavor="llama_cpp").run(request, sink)
    assert "ignore_eos" not in server.body


def test_messages_of_every_sort(server: UpstreamServer, load: Load) -> None:
    image = "data:image/png;base64,AAAA"
    messages = (
        Message("system", "Be brief."),
        Message(
            "user",
            None,
            parts=(
                TextPart("Look:"),
                ImagePart(image, "messages[1]"),
                AudioPart("BBBB", "wav", "messages[1]"),
            ),
        ),
        Message(
            "assistant",
            None,
            tool_calls=(ToolCall("call_1", "f", '{"a": 1}'),),
            reasoning="Hm",
        ),
        Message("tool", "5", tool_call_id="call_1"),
        Message("user", "Thanks", name="Ann"),
    )
    sent = asked(load(flavor="vllm"), server, messages=messages)["messages"]
    assert sent == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look:"},
                {"type": "image_url", "image_url": {"url": image}},
                {"type": "input_audio", "input_audio": {"data": "BBBB", "format": "wav"}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"a": 1}'},
                }
            ],
        },
        {"role": "tool", "content": "5", "tool_call_id": "call_1"},
        {"role": "user", "content": "Thanks", "name": "Ann"},
    ]
    assert "reasoning_content" not in asked(load(), server, messages=messages)["messages"][2]
    assert asked(load(flavor="ollama"), server, messages=messages)["messages"][2]["reasoning"]


def test_an_image_that_was_not_fetched_is_never_sent(
    server: UpstreamServer, engine: Engine
) -> None:
    part = ImagePart("http://10.0.0.1/secret.png", "messages[0].content[0]")
    with pytest.raises(InvalidRequest, match="not fetched"):
        asked(engine, server, messages=(Message("user", None, parts=(part,)),))
    assert server.asked == []


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [('{"a": 1}', {"a": 1}), ("", {}), ("[1]", {"input": "[1]"}), ('{"a"', {"input": '{"a"'})],
)
def test_arguments_of_the_history_are_objects(
    server: UpstreamServer, engine: Engine, arguments: str, sent: dict[str, Any]
) -> None:
    call = ToolCall("c", "f", arguments)
    messages = (*HELLO, Message("assistant", None, tool_calls=(call,)))
    told = asked(engine, server, messages=messages)["messages"][1]["tool_calls"][0]
    assert json.loads(told["function"]["arguments"]) == sent


def test_tools_are_sent_and_the_model_chooses(server: UpstreamServer, engine: Engine) -> None:
    body = asked(engine, server, tools=TOOLS, parallel_tool_calls=False)
    assert [tool["function"]["name"] for tool in body["tools"]] == ["f", "g"]
    assert body["tools"][0]["function"]["description"] == "Does it"
    assert body["parallel_tool_calls"] is False
    assert "tool_choice" not in body


def test_a_call_that_must_come_is_required(server: UpstreamServer, engine: Engine) -> None:
    with pytest.raises(Exception, match="made no call"):
        asked(engine, server, tools=TOOLS[:1], must_call=True)
    assert server.body["tool_choice"] == "required"
    assert len(server.body["tools"]) == 1


@pytest.mark.parametrize(
    ("flavor", "is_strict", "must_call", "sent"),
    [
        ("vllm", False, True, True),  # It forces the call, and binds only what is strict.
        ("vllm", True, False, True),
        ("vllm", False, False, None),
        ("openai", False, True, None),  # OpenAI's own refuses schemas that are not made for it.
        ("openai", True, True, True),
        ("ollama", True, False, None),
    ],
)
def test_strictness_is_sent_as_it_came_and_where_a_call_is_forced(
    server: UpstreamServer,
    load: Load,
    flavor: str,
    is_strict: bool,
    must_call: bool,
    sent: bool | None,
) -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    server.answers = [chunks(delta({"tool_calls": [call]}), finish("tool_calls"))]
    tool = replace(TOOLS[0], is_strict=is_strict)
    body = asked(load(flavor=flavor), server, tools=(tool,), must_call=must_call)
    assert body["tools"][0]["function"].get("strict") is sent


@pytest.mark.parametrize(
    ("flavor", "temperature", "sent"),
    [("vllm", 0.0, None), ("vllm", 0.5, 2), ("openai", 0.0, 2)],
)
def test_choices_that_are_alike_are_computed_once_where_the_server_refuses_them(
    server: UpstreamServer, load: Load, flavor: str, temperature: float, sent: int | None
) -> None:
    said = [text("Hi", index) for index in range(sent or 1)]
    ended = [finish(index=index) for index in range(sent or 1)]
    server.answers = [chunks(*said, *ended, usage(completion=5))]
    sink = RecordingSink()
    sampling = Sampling(temperature=temperature)
    load(flavor=flavor).run(GenerationRequest("m", HELLO, sampling=sampling, choices=2), sink)
    assert server.body.get("n") == sent
    texts = [(d.text, d.index) for d in sink.deltas if isinstance(d, TextDelta)]
    assert texts == [("Hi", 0), ("Hi", 1)]
    assert sink.usage.output_tokens == 5
    assert sink.finishes == ["stop", "stop"]


def test_fields_of_vllm_are_passed_on_to_it(server: UpstreamServer, load: Load) -> None:
    given: dict[str, Any] = {"min_tokens": 3, "bad_words": ["no"], "vllm_xargs": {"a": 1}}
    body = asked(load(flavor="vllm"), server, extensions={**given, "structural_tag": "{}"})
    assert {name: body[name] for name in given} == given
    assert body["structured_outputs"] == {"structural_tag": "{}"}
    body = asked(load(flavor="sglang"), server, extensions=given)
    assert (body["min_tokens"], "bad_words" in body) == (3, False)


def test_llama_cpp_is_forced_by_a_schema(server: UpstreamServer, load: Load) -> None:
    body = asked(load(flavor="llama_cpp"), server, tools=TOOLS, must_call=True)
    assert body["response_format"]["json_schema"]["schema"]["anyOf"]
    assert len(body["chat_template_kwargs"]["tools"]) == 2
    assert not body.keys() & {"tools", "tool_choice"}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OPENAI_SCHEMA = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
    }
}
LARK = 'start: "a"'
OUTPUTS = "structured_outputs"
LARK_ON_LLAMA_CPP = {"grammar": f"%llguidance {{}}\n{LARK}"}
LLGUIDANCE = json.dumps({"grammars": [{"lark_grammar": LARK}]})


@pytest.mark.parametrize(
    ("flavor", "kind", "source", "fields"),
    [
        ("openai", "json_schema", json.dumps(SCHEMA), OPENAI_SCHEMA),
        ("vllm", "json_schema", json.dumps(SCHEMA), OPENAI_SCHEMA),
        ("tgi", "json_schema", json.dumps(SCHEMA),
         {"response_format": {"type": "json_object", "value": SCHEMA}}),
        ("openai", "json_object", "", {"response_format": {"type": "json_object"}}),
        ("tgi", "json_object", "",
         {"response_format": {"type": "json_object", "value": {"type": "object"}}}),
        ("vllm", "gbnf", 'root ::= "a"', {OUTPUTS: {"grammar": 'root ::= "a"'}}),
        ("vllm", "lark", LARK, {OUTPUTS: {"grammar": LARK}}),
        ("vllm", "regex", "a+", {OUTPUTS: {"regex": "a+"}}),
        ("vllm", "llguidance", LLGUIDANCE, {OUTPUTS: {"grammar": LARK}}),
        ("sglang", "gbnf", 'root ::= "a"', {"ebnf": 'root ::= "a"'}),
        ("sglang", "regex", "a+", {"regex": "a+"}),
        ("llama_cpp", "gbnf", 'root ::= "a"', {"grammar": 'root ::= "a"'}),
        ("llama_cpp", "lark", LARK, LARK_ON_LLAMA_CPP),
        ("llama_cpp", "regex", "a/b", {"grammar": "%llguidance {}\nstart: /a\\/b/"}),
        ("llama_cpp", "llguidance", LLGUIDANCE, LARK_ON_LLAMA_CPP),
    ],
)  # fmt: skip
def test_constraints_go_where_the_server_looks_for_them(
    server: UpstreamServer, load: Load, flavor: str, kind: Any, source: str, fields: dict[str, Any]
) -> None:
    constraint = Constraint(kind, source, "grammar")
    body = asked(load(flavor=flavor), server, constraint=constraint)
    assert {name: body.get(name) for name in fields} == fields


LOOP = {"type": "object", "allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}}
"""A schema at which llama.cpp's server ends, as at this grammar."""
GROUPS = "root ::= " + "(" * 40_000 + '"a"' + ")" * 40_000
LOOPS = {"constraint": Constraint("json_schema", json.dumps(LOOP), "response_format")}
CALLS = {"tools": (Tool("f", None, LOOP, param="tools[0]"),)}


@pytest.mark.parametrize(
    ("flavor", "fields", "param"),
    [
        ("llama_cpp", LOOPS, "response_format"),
        ("ollama", LOOPS, "response_format"),
        ("llama_cpp", {"constraint": Constraint("gbnf", GROUPS, "grammar")}, "grammar"),
        ("llama_cpp", CALLS, "tools[0]"),
        ("llama_cpp", {**CALLS, "must_call": True}, "tools[0]"),
    ],
)
def test_what_would_end_a_llama_server_is_not_sent_to_it(
    server: UpstreamServer, load: Load, flavor: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(load(flavor=flavor), server, **fields)
    assert (caught.value.param, server.asked) == (param, [])
    assert asked(load(flavor="vllm"), server, **{**fields, "must_call": False})


RECURSIVE = {
    "type": "object",
    "properties": {
        "any": True,
        "children": {"type": "array", "items": {"$ref": "#"}},
        "pair": {"prefixItems": [{"type": "integer"}], "items": False},
    },
}


@pytest.mark.parametrize("flavor", ["llama_cpp", "ollama"])
def test_schemas_for_the_converter_of_llama_cpp_are_in_the_forms_that_it_reads(
    server: UpstreamServer, load: Load, flavor: str
) -> None:
    schema = Constraint("json_schema", json.dumps(RECURSIVE), "response_format")
    body = asked(load(flavor=flavor), server, constraint=schema)
    sent = body["response_format"]["json_schema"]["schema"]
    assert sent == plain_schema(RECURSIVE) != RECURSIVE
    body = asked(load(flavor="openai"), server, constraint=schema)
    assert body["response_format"]["json_schema"]["schema"] == RECURSIVE


def test_tools_for_the_converter_of_llama_cpp_are_in_the_forms_that_it_reads(
    server: UpstreamServer, load: Load
) -> None:
    [tool] = asked(load(flavor="llama_cpp"), server, tools=(Tool("f", None, RECURSIVE),))["tools"]
    assert tool["function"]["parameters"] == plain_schema(RECURSIVE)
    [tool] = asked(load(flavor="vllm"), server, tools=(Tool("f", None, RECURSIVE),))["tools"]
    assert tool["function"]["parameters"] == RECURSIVE


def test_older_vllm_has_fields_of_its_own_for_constraints(
    server: UpstreamServer, load: Load
) -> None:
    engine = load(flavor="vllm", fields={"json_schema": "guided_json", "regex": "guided_regex"})
    body = asked(engine, server, constraint=Constraint("json_schema", json.dumps(SCHEMA), "g"))
    assert body["guided_json"] == SCHEMA
    assert "response_format" not in body
    assert asked(engine, server, constraint=Constraint("regex", "a", "g"))["guided_regex"] == "a"


@pytest.mark.parametrize(
    ("flavor", "kind", "source"),
    [("openai", "gbnf", "root ::= a"), ("ollama", "regex", "a"), ("sglang", "lark", LARK)],
)
def test_a_constraint_the_server_does_not_know_is_refused(
    server: UpstreamServer, load: Load, flavor: str, kind: Any, source: str
) -> None:
    with pytest.raises(InvalidRequest, match="knows no constraints") as caught:
        asked(load(flavor=flavor), server, constraint=Constraint(kind, source, "grammar"))
    assert caught.value.param == "grammar"


def test_template_variables_reach_the_template(server: UpstreamServer, load: Load) -> None:
    engine = load(flavor="vllm", chat_template_kwargs={"enable_thinking": False, "a": 1})
    variables = {"enable_thinking": True, "reasoning_effort": "high"}
    body = asked(engine, server, template_vars=variables)
    assert body["chat_template_kwargs"] == {**variables, "a": 1}
    assert body["reasoning_effort"] == "high"
    unusual = asked(engine, server, template_vars={"reasoning_effort": "xhigh"})
    assert "reasoning_effort" not in unusual


@pytest.mark.parametrize(
    ("variables", "effort"),
    [
        ({"reasoning_effort": "low", "enable_thinking": True}, "low"),
        ({"enable_thinking": False}, "none"),
        ({"enable_thinking": True}, None),
    ],
)
def test_servers_without_a_template_of_ours_get_the_effort(
    server: UpstreamServer, load: Load, variables: dict[str, Any], effort: str | None
) -> None:
    body = asked(load(flavor="ollama"), server, template_vars=variables)
    assert body.get("reasoning_effort") == effort
    assert "chat_template_kwargs" not in body


def test_other_variables_are_refused_by_them(server: UpstreamServer, load: Load) -> None:
    with pytest.raises(InvalidRequest, match="'colour'") as caught:
        asked(load(flavor="ollama"), server, template_vars={"colour": "red"})
    assert caught.value.param == "chat_template_kwargs"


def test_a_prefix_of_the_answer_is_a_message_to_be_continued(
    server: UpstreamServer, load: Load
) -> None:
    body = asked(load(flavor="vllm"), server, response_prefix="Sure")
    assert body["messages"][-1] == {"role": "assistant", "content": "Sure"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    turns = (Message("user", "Hi"), Message("assistant", "Sure"))
    ended = asked(load(flavor="vllm"), server, messages=turns)
    assert ended["continue_final_message"] is False
    assert "add_generation_prompt" not in ended


def complete(engine: Engine, server: UpstreamServer, **fields: Any) -> dict[str, Any]:
    """What the server gets for a completion."""
    request = GenerationRequest("m", operation="complete", **fields)
    engine.run(request, RecordingSink())
    assert server.asked[-1].path == "/v1/completions"
    return server.body


@pytest.mark.parametrize(
    ("prompts", "sent"),
    [(("a",), "a"), (((1, 2),), [1, 2]), (("a", "b"), ["a", "b"]), (((1,), (2,)), [[1], [2]])],
)
def test_prompts_are_texts_or_tokens(
    server: UpstreamServer, engine: Engine, prompts: Any, sent: Any
) -> None:
    server.answers = [TWO_ANSWERS if len(prompts) == 2 else streamed("Hello")]
    assert complete(engine, server, prompts=prompts)["prompt"] == sent


def test_the_rest_of_a_completion(server: UpstreamServer, engine: Engine) -> None:
    body = complete(engine, server, prompts=("a",), suffix="z", top_logprobs=2, stop=(".",))
    assert (body["suffix"], body["logprobs"], body["stop"]) == ("z", 2, ["."])
    assert "messages" not in body
