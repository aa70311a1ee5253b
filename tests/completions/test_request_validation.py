"""Bad bodies and what is told of them; unknown fields; nulls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pytest_django.fixtures import Settings

from completions.anthropic.wire import MessagesRequest, ToolResultBlock, ToolUseBlock
from completions.wire.chat import ChatCompletionRequest
from completions.wire.scores import ScoreRequest
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.json_bodies import decode_json
from inference_site.gateway.api.payload import WireRequest, parse
from inference_site.gateway.file_views import UploadRequest
from inference_site.vector_stores.wire import FileChanges, SearchRequest

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
NAMELESS = {"type": "function", "function": {"arguments": "{}"}}


def body(**fields: Any) -> dict[str, Any]:
    """Return a good body with these fields replaced; ``...`` removes one."""
    whole = {"model": "m", "messages": [USER], **fields}
    return {name: value for name, value in whole.items() if value is not ...}


def refused(whole: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parse(ChatCompletionRequest, whole)
    assert (caught.value.status, caught.value.type) == (400, "invalid_request_error")
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"model": ...}, "model", "missing_required_parameter"),
        ({"messages": 5}, "messages", "invalid_type"),
        ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{**USER, "content": ["hi"]}]}, "messages[0].content[0]", "invalid_type"),
        (
            {"messages": [{**USER, "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "missing_required_parameter",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": None}]}]},
            "messages[0].tool_calls[0].id",
            "invalid_type",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
            "messages[0].tool_calls[0].id",
            "missing_required_parameter",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", **NAMELESS}]}]},
            "messages[0].tool_calls[0].function.name",
            "missing_required_parameter",
        ),
        (
            {"messages": [{**USER, "content": [{"type": "text", "text": "a"}, {"type": "x"}]}]},
            "messages[0].content[1].type",
            "invalid_value",
        ),
        ({"model": None}, "model", "invalid_type"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"temperature": 2.1}, "temperature", "decimal_above_max_value"),
        ({"temperature": -0.1}, "temperature", "decimal_below_min_value"),
        ({"top_p": 1.5}, "top_p", "decimal_above_max_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "integer_below_min_value"),
        (
            {"metadata": dict.fromkeys("abcdefghijklmnopq", "")},
            "metadata",
            "object_above_max_properties",
        ),
        ({"metadata": {"team": "x" * 513}}, "metadata.team", "string_above_max_length"),
        ({"metadata": {"k" * 65: "x"}}, f"metadata.{'k' * 64}…", "string_above_max_length"),
        ({"stop": ["a", ""]}, "stop[1]", "empty_string"),
        ({"stop": ["a", 5]}, "stop[1]", "invalid_type"),
        ({"stop": {"text": "a"}}, "stop", "invalid_type"),
        ({"seed": 2**63}, "seed", "integer_above_max_value"),
        ({"seed": -(2**63) - 1}, "seed", "integer_below_min_value"),
        ({"stream": 1}, "stream", "invalid_type"),
        (
            {"stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage",
            "invalid_type",
        ),
    ],
)
def test_a_bad_field_is_named_with_what_is_wrong(
    fields: dict[str, Any], param: str, code: str
) -> None:
    error = refused(body(**fields))
    assert (error.param, error.code) == (param, code)
    assert code == "invalid_value" or f"'{param}'" in error.message


@pytest.mark.parametrize(
    ("model", "whole", "message"),
    [
        (
            ScoreRequest,
            {"model": "m", "text_1": ["a", "b"], "text_2": ["c"]},
            "Invalid 'text_2': 'text_1' must be one text, or as many as 'text_2'.",
        ),
        (
            UploadRequest,
            {"bytes": 1, "filename": "..", "mime_type": "a/b", "purpose": "user_data"},
            "Invalid 'filename': Expected the name of a file.",
        ),
        (  # A text is allowed there, but not this one.
            SearchRequest,
            {"query": "a", "filters": {"type": "eq", "key": "team", "value": "\0"}},
            "Invalid 'filters.value': string does not match pattern. Expected a string that "
            "matches the pattern '^[^\\x00]*$'.",
        ),
    ],
)
def test_a_rule_that_a_body_breaks_is_told_in_its_own_words(
    model: type[WireRequest], whole: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(model, whole)
    assert (caught.value.message, caught.value.code) == (message, "invalid_value")


def test_a_field_of_several_types_is_refused_with_all_of_them() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(FileChanges, {"attributes": {"team": None}})
    assert caught.value.message == (
        "Invalid type for 'attributes.team': expected a boolean or an integer or a decimal or "
        "a string, but got null instead."
    )


@pytest.mark.parametrize(
    ("field", "number", "code", "reason"),
    [
        ("seed", 2**64, "integer_above_max_value", "integer above maximum value"),
        ("n", -(10**40), "integer_below_min_value", "integer below minimum value"),
    ],
)
def test_an_integer_of_more_than_64_bits_is_named_as_one(
    field: str, number: int, code: str, reason: str
) -> None:
    """The parser of JSON makes it a decimal."""
    error = refused(decode_json(json.dumps(body(**{field: number})).encode()))
    assert (error.param, error.code) == (field, code)
    assert error.message == (
        f"Invalid '{field}': {reason}. Expected an integer of 64 bits, but got {float(number)} "
        "instead."
    )
    text = refused(decode_json(json.dumps(body(model=number)).encode()))
    assert text.message == (
        "Invalid type for 'model': expected a string, but got an integer instead."
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": ...}, "Missing required parameter: 'messages'."),
        (
            {"temperature": "hot"},
            "Invalid type for 'temperature': expected a decimal, but got a string instead.",
        ),
        (
            {"stream": 1},
            "Invalid type for 'stream': expected a boolean, but got an integer instead.",
        ),
        (
            {"max_tokens": 0},
            "Invalid 'max_tokens': integer below minimum value. Expected a value >= 1, but got 0",
        ),
        (
            {"temperature": 3},
            "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 3",
        ),
        (
            {"messages": []},
            "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an",
        ),
        (
            {"stop": list("abcde")},
            "Invalid 'stop': array too long. Expected an array with maximum length 4, but got an",
        ),
        (
            {"metadata": {str(number): "x" for number in range(17)}},
            "Invalid 'metadata': too many properties. Expected an object with at most 16 "
            "properties, but got an object with 17 properties instead.",
        ),
        (
            {"metadata": {"team": "x" * 513}},
            "Invalid 'metadata.team': string too long. Expected a string with maximum length 512, "
            "but got a string with length 513 instead.",
        ),
        (
            {"stop": ""},
            "Invalid 'stop': empty string. Expected a string with minimum length 1, but got an "
            "empty string instead.",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "Invalid 'tools[0].function.name': string does not match pattern. Expected a string "
            "that matches the pattern '^[A-Za-z0-9_-]{1,64}$'.",
        ),
        (
            {"messages": [{"role": "robot", "content": "hi"}]},
            "Invalid value: 'robot'. Supported values are: 'system', 'developer', 'user', ",
        ),
        (
            {"messages": [{**USER, "content": [{"type": "image"}]}]},
            "Invalid value: 'image'. Supported values are: 'text', 'image_url', 'input_audio', "
            "'file', and 'refusal'.",
        ),
    ],
)
def test_errors_use_the_words_of_the_api(fields: dict[str, Any], message: str) -> None:
    assert refused(body(**fields)).message.startswith(message)


def test_the_error_deepest_in_the_body_is_told() -> None:
    error = refused(body(temperature="hot", messages=[USER, {"role": "user", "content": 5}]))
    assert error.param == "messages[1].content"


def test_null_counts_as_not_given() -> None:
    optional = ChatCompletionRequest.model_fields.keys() - {"model", "messages"}
    nulls = parse(ChatCompletionRequest, body(**dict.fromkeys(optional), unknown=None))
    assert nulls.model_dump() == {
        **parse(ChatCompletionRequest, body()).model_dump(),
        "unknown": None,
    }
    assert nulls.ignored_params == []


def test_the_bounds_belong_to_the_range() -> None:
    for fields in (
        {"temperature": 0, "top_p": 0, "seed": -(2**63), "max_tokens": 1},
        {"temperature": 2, "top_p": 1, "seed": 2**63 - 1, "stop": list("abcd")},
    ):
        parse(ChatCompletionRequest, body(**fields))


def test_unknown_fields_are_named_in_the_order_they_came() -> None:
    whole = body(zeta=1, prediction="low", alpha=False, nothing=None)
    assert parse(ChatCompletionRequest, whole).ignored_params == ["zeta", "prediction", "alpha"]


def test_unknown_fields_of_nested_objects_are_named_once_by_their_path() -> None:
    part = {"type": "text", "text": "hi", "cache_control": {}}
    messages = [{**USER, "mood": "good"}, {**USER, "mood": "bad", "content": [part, part]}]
    whole = body(messages=messages, stream_options={"include_obfuscation": False}, top=1)
    assert parse(ChatCompletionRequest, whole).ignored_params == [
        "top",
        "messages[].mood",
        "messages[].content[].cache_control",
        "stream_options.include_obfuscation",
    ]
    configs = {"add": {"enabled": True, "defer_loading": True}}
    toolset = {"type": "mcp_toolset", "mcp_server_name": "a", "configs": configs}
    message = {"model": "m", "max_tokens": 1, "messages": [USER], "tools": [toolset]}
    assert parse(MessagesRequest, message).ignored_params == ["tools[].configs.add.defer_loading"]


@pytest.mark.parametrize("name", ["bad\r\nset-cookie: a", "a,b", "naïve", "x" * 65, ""])
def test_a_name_that_does_not_fit_a_header_is_left_out(name: str) -> None:
    assert parse(ChatCompletionRequest, body(**{name: 1})).ignored_params == []


def test_strict_fields_refuse_what_is_unknown(settings: Settings) -> None:
    settings.STRICT_FIELDS = True
    error = refused(body(prediction="low", other=1))
    assert (error.param, error.code) == ("prediction", "unknown_parameter")
    parse(ChatCompletionRequest, body(prediction=None))


def test_a_long_bad_value_is_not_repeated_whole() -> None:
    error = refused(body(messages=[{"role": "x" * 100_000, "content": "hi"}]))
    assert len(error.message) < 300


def test_ids_of_calls_may_be_as_long_as_a_server_made_them() -> None:
    """LiteLLM puts Gemini's signatures into them, and needs them back."""
    long = "call_1__thought__" + "x" * 5000
    used = {"type": "tool_use", "id": long, "name": "f", "input": {}}
    assert parse(ToolUseBlock, used).id == long
    returned = {"type": "tool_result", "tool_use_id": long, "content": "ok"}
    assert parse(ToolResultBlock, returned).tool_use_id == long
