"""Custom tools: the text in the arguments, however the JSON is written and wherever it is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inference_site.core.domain.deltas import Delta, Finish, TextDelta, ToolCallDelta, Usage
from inference_site.core.domain.request import Tool, custom_arguments, custom_tool
from worker.runtime.tool_calls import CustomCalls, CustomInput

SPACES = st.sampled_from(["", " ", "\n\t ", "\r\n"])
PLACES = st.lists(st.integers(min_value=0), max_size=12)
ESCAPED = st.sampled_from(
    [
        *(r"\"", r"\\", r"\/", r"\b", r"\f", r"\n", r"\r", r"\t"),
        *(r"\u00e9", r"\u0000", r"\uD83D\uDE00", r"\ud83d\ude00"),
    ]
)
LONELY = st.sampled_from([r"\ud83d", r"\ude00", r"\ud83d\n", r"\ud83d\u0041", r"\ud83d\ud83d"])
PLAIN = st.characters(exclude_characters='"\\', exclude_categories=["Cs"])


def cut(text: str, places: list[int]) -> list[str]:
    marks = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(marks)]


def read(pieces: Sequence[str]) -> str:
    text = CustomInput()
    return "".join([*(text.feed(piece) for piece in pieces), text.rest()])


@given(st.text(), PLACES, SPACES, st.booleans())
def test_any_cutting_gives_the_same_text(
    text: str, places: list[int], space: str, escape: bool
) -> None:
    value = json.dumps(text, ensure_ascii=escape)
    whole = f'{space}{{{space}"input"{space}:{space}{value}{space}}}{space}'
    assert read(cut(whole, places)) == text


@given(st.lists(st.one_of(ESCAPED, PLAIN)), PLACES)
def test_every_escape_is_read_as_json_reads_it(parts: list[str], places: list[int]) -> None:
    whole = '{"input":"' + "".join(parts) + '"}'
    assert read(cut(whole, places)) == json.loads(whole, strict=False)["input"]


@given(st.lists(st.one_of(LONELY, ESCAPED, PLAIN)), PLACES)
@example([r"\ud83d\n"], [])
@example([r"\ud83d", '\\"', "abcd"], [])
@example([r"\ud83d", r"\ud83d", r"\ude00"], [16, 17])
def test_half_of_a_pair_is_a_character_that_can_be_sent(
    parts: list[str], places: list[int]
) -> None:
    whole = '{"input":"' + "".join(parts) + '"}'
    text = read(cut(whole, places))
    assert text == read([whole]) == read(list(whole))
    text.encode()
    told = json.loads(whole, strict=False)["input"]
    assert text == "".join("?" if "\ud800" <= c <= "\udfff" else c for c in told)


@given(st.text(), PLACES)
def test_text_that_is_not_finished_comes_as_far_as_it_goes(text: str, places: list[int]) -> None:
    whole = custom_arguments(text)
    for end in {len(whole), *(place % (len(whole) + 1) for place in places)}:
        told = read(cut(whole[:end], places))
        assert text.startswith(told) or whole.startswith(told)


@pytest.mark.parametrize(
    "arguments",
    ['{"text": "x"}', '{"input": 5}', '{"input": {"a": "b"}}', "[]", "5", "plain text", "{}", '{"',
     '{"input', '{"input": ', '{"in put": "x"}', '{"inp\\u0075t": "x"}', "", "  "],
)  # fmt: skip
def test_arguments_of_another_shape_are_the_text_themselves(arguments: str) -> None:
    assert read([arguments]) == arguments
    assert read(list(arguments)) == arguments


@pytest.mark.parametrize("bad", [r"\x41", r"\u12g4", r"\ud83d\u12g4", r"\'"])
def test_escape_that_json_does_not_know_stays_as_it_is(bad: str) -> None:
    whole = '{"input":"a' + bad + 'b"}'
    assert read([whole]) == read(list(whole))
    assert read([whole]).startswith("a")
    assert read([whole]).endswith("b")


TOOLS = [custom_tool("run", None), Tool("look", None, {})]


def first(name: str, arguments: str = "", **place: Any) -> ToolCallDelta:
    return ToolCallDelta(place.pop("call", 0), arguments, id=f"call_{name}", name=name, **place)


def taken(*deltas: Delta) -> list[Delta]:
    calls = CustomCalls(TOOLS)
    return [passed for delta in deltas for passed in calls.take(delta)]


def test_call_of_a_custom_tool_is_marked_and_has_plain_text() -> None:
    assert taken(
        first("run"),
        ToolCallDelta(0, '{"inp'),
        ToolCallDelta(0, 'ut":"a\\'),
        ToolCallDelta(0, 'nb"'),
        ToolCallDelta(0, "}"),
        Finish("tool_calls"),
    ) == [
        ToolCallDelta(0, "", id="call_run", name="run", is_custom=True),
        ToolCallDelta(0, "a", is_custom=True),
        ToolCallDelta(0, "\nb", is_custom=True),
        Finish("tool_calls"),
    ]


def test_what_was_held_back_comes_before_the_end_of_its_own_choice() -> None:
    held = [first("run", '{"in', index=n) for n in (0, 1)]
    assert taken(*held, Finish("length", 1), Finish("length", 0))[2:] == [
        ToolCallDelta(0, '{"in', index=1, is_custom=True),
        Finish("length", 1),
        ToolCallDelta(0, '{"in', index=0, is_custom=True),
        Finish("length", 0),
    ]


def test_everything_else_passes_unchanged() -> None:
    deltas: list[Delta] = [
        TextDelta("a"),
        first("look", '{"input":"x"}'),
        ToolCallDelta(0, "{}"),
        Usage(1),
        Finish("stop"),
    ]
    assert taken(*deltas) == deltas


def test_calls_that_alternate_are_kept_apart() -> None:
    passed = taken(
        first("run", '{"input":"a', call=0),
        first("look", '{"at":', call=1),
        first("run", '{"input":"x', index=1),
        ToolCallDelta(0, 'b"}'),
        ToolCallDelta(1, "5}"),
        ToolCallDelta(0, 'y"}', index=1),
    )
    texts: dict[tuple[int, int], str] = {}
    for delta in passed:
        assert isinstance(delta, ToolCallDelta)
        key = (delta.index, delta.call)
        texts[key] = texts.get(key, "") + delta.arguments
    assert texts == {(0, 0): "ab", (0, 1): '{"at":5}', (1, 0): "xy"}
