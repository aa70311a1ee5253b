"""What a body may cost: errors that are built, and memory, whatever is in it."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from completions.wire import completion
from completions.wire.chat import ChatCompletionRequest
from completions.wire.completion import CompletionRequest
from completions.wire.tokens import DetokenizeRequest, EmbeddingRequest
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api import json_bodies
from inference_site.gateway.api.payload import WireRequest, parse
from responses_api.wire.requests import ItemsRequest, ResponseRequest

_MOST_ERRORS = 30
_ENTRIES = 5_000
_BODIES: dict[type[WireRequest], list[dict[str, Any]]] = {
    ChatCompletionRequest: [
        {"model": "m", "messages": "x"},
        {"model": "m", "messages": [{"role": "user", "content": "x"}]},
        {"messages": [{"role": "assistant", "tool_calls": []}, {"role": "user", "content": []}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
    ],
    CompletionRequest: [{"model": "m", "prompt": [[1]]}, {"prompt": [1]}],
    EmbeddingRequest: [{"model": "m", "input": ["x"]}, {"input": [[1]]}],
    DetokenizeRequest: [{"model": "m", "tokens": [1]}],
    ResponseRequest: [
        {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        {"input": [{"type": "reasoning", "summary": [], "content": []}, {"id": "x"}]},
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        {"tools": [{"type": "function", "name": "f", "parameters": {}}], "text": {"format": {}}},
    ],
    ItemsRequest: [{"items": [{"role": "user", "content": []}]}],
}
_JUNK: list[Any] = [0, -1, 1.5, "", "x", None, True, {}, [], [0], {"type": "x"}, {"role": 0}]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a body with a key of it, whose value may be replaced."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(entries):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


@st.composite
def hostile_bodies(draw: st.DrawFn) -> tuple[type[WireRequest], dict[str, Any]]:
    """A body that is good but for one place, which holds thousands of something."""
    model = draw(st.sampled_from(list(_BODIES)))
    body = orjson.loads(orjson.dumps(draw(st.sampled_from(_BODIES[model]))))
    for field in model.model_fields:
        body.setdefault(field, None)
    places = [*_places(body), (body, "unknown")]
    container, key = draw(st.sampled_from(places))
    junk = draw(st.sampled_from(_JUNK))
    many = [junk] * _ENTRIES
    keys = draw(st.sampled_from(["{}", "k{}", "!{}"]))
    as_object = {keys.format(number): entry for number, entry in enumerate(many)}
    container[key] = draw(st.sampled_from([many, as_object, [many], [as_object], {"type": many}]))
    return model, body


@given(hostile_bodies())
def test_few_errors_are_built_of_any_body(
    hostile: tuple[type[WireRequest], dict[str, Any]],
) -> None:
    model, body = hostile
    errors = 0
    try:
        model.model_validate(body)
    except ValidationError as exc:
        errors = exc.error_count()
    assert errors <= _MOST_ERRORS


@given(hostile_bodies())
def test_a_body_takes_at_most_ten_times_its_size(
    hostile: tuple[type[WireRequest], dict[str, Any]],
) -> None:
    model, body = hostile
    size = len(orjson.dumps(body))
    tracemalloc.start()
    try:
        told = str(parse(model, body).ignored_params)
    except InvalidRequestError as exc:
        told = exc.message
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert len(told) < 5_000
    # pydantic takes up to 220 bytes for each integer of a list while it validates that.
    assert peak < 10 * size + 220 * _ENTRIES + 500_000


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": ""}] * 2049}, "messages"),
        (ResponseRequest, {"input": [{"role": "user", "content": ""}] * 2049}, "input"),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2049}]},
            "messages[0].content",
        ),
    ],
)
def test_an_array_has_at_most_2048_entries(
    model: type[WireRequest], body: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parse(model, {"model": "m", **body})
    assert (refused.value.param, refused.value.code) == (param, "array_above_max_length")


@pytest.mark.parametrize("place", ["chat_template_kwargs", "template_vars", None])
def test_an_object_has_at_most_2048_fields(place: str | None) -> None:
    fields = {f"k{number}": 0 for number in range(2049)}
    body = {"model": "m", "messages": "x", **({place: fields} if place else fields)}
    with pytest.raises(InvalidRequestError) as refused:
        parse(ChatCompletionRequest, body)
    assert refused.value.param == place


_TEXTS = st.text(st.sampled_from('"\\[{]},:n\n x'), max_size=8)


@given(st.recursive(_TEXTS, lambda inner: st.lists(inner) | st.dictionaries(_TEXTS, inner)))
def test_arrays_and_objects_are_counted_and_brackets_in_texts_are_not(value: Any) -> None:
    def count(inner: Any) -> int:
        if isinstance(inner, str):
            return 0
        return 1 + sum(map(count, inner.values() if isinstance(inner, dict) else inner))

    # Up to the limit, the count is only an upper bound.
    with patch.object(json_bodies, "_MAX_CONTAINERS", 0):
        for encoded in (orjson.dumps(value), json.dumps(value, indent=1).encode()):
            assert json_bodies._count_containers(encoded) == count(value)


_TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=12)
_NO_TOKENS: st.SearchStrategy[Any] = st.sampled_from(
    [-1, 2**31, 2**32, 2**70, 1.5, True, False, None, "x", [1], {}]
)


@given(_TOKENS, _NO_TOKENS, st.data())
def test_of_a_list_of_tokens_the_first_that_is_none_is_named(
    tokens: list[Any], bad: Any, data: st.DataObject
) -> None:
    at = data.draw(st.integers(1, len(tokens)))
    tokens[at:at] = [bad]
    asked: list[tuple[type[WireRequest], str, list[Any], str]] = [
        (DetokenizeRequest, "tokens", tokens, f"tokens[{at}]"),
        (CompletionRequest, "prompt", [[1], tokens], f"prompt[1][{at}]"),
    ]
    with patch.object(completion, "_PIECE", 4):
        for model, field, value, param in asked:
            with pytest.raises(InvalidRequestError) as refused:
                parse(model, {"model": "m", field: value})
            assert refused.value.param == param
        assert parse(DetokenizeRequest, {"model": "m", "tokens": [*tokens[:at]]})
