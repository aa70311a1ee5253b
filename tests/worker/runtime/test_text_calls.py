"""Calls that models write as their answers."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_site.core.domain.deltas import Delta, Finish, FinishReason, TextDelta, ToolCallDelta
from inference_site.core.domain.request import Tool
from worker.runtime.tool_calls import TextCallParser

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOLS = (Tool("weather", None, CITY), Tool("stop", None, {"type": "object"}))
PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
ROME = '{"arguments": {"city": "Rome"}, "name": "weather"}'
CALLS = [
    (PARIS, ["Paris"]),
    (f"\n {ROME} ", ["Rome"]),
    (f"```json\n{PARIS}\n```", ["Paris"]),
    (f"```\n{PARIS}\n{ROME}\n```\n", ["Paris", "Rome"]),
    (f"```json\n{PARIS}", ["Paris"]),
    (PARIS + ROME, ["Paris", "Rome"]),
    (PARIS.replace("arguments", "parameters"), ["Paris"]),
    ('{"name": "stop"}', [None]),
]
TEXTS = [
    "",
    "Hello",
    " ",
    "{",
    "``",
    "`code`",
    "```python\nprint(1)\n```",
    '{"city": "Paris"}',
    PARIS.replace("Paris", "Tokyo"),
    PARIS.replace("weather", "other"),
    PARIS[:-1],
    f"{PARIS} That is it.",
    f"I call {PARIS}",
    '{"name": "weather", "arguments": "Paris"}',
    '{"name": "weather", "arguments": {"city": "Paris"}, "parameters": {"city": "Paris"}}',
    '{"name": "weather", "arguments": {"city": "Paris"}, "note": 1}',
    '{"name": ["weather"], "arguments": {}}',
    '{"name": "stop", "arguments": {"a": NaN}}',
    '{"name": "stop", "arguments": {"a": 1e999}}',
    '{"name": "weather", "arguments": ' + '{"a":' * 5000,
    "```json\n[1]\n```",
]


def taken(
    pieces: list[str],
    *,
    reason: FinishReason = "stop",
    parallel: bool = True,
    tools: tuple[Tool, ...] = TOOLS,
) -> list[Delta]:
    """What becomes of an answer."""
    calls = TextCallParser(tools, parallel=parallel)
    deltas: list[Delta] = [*map(TextDelta, pieces), Finish(reason)]
    return [passed for delta in deltas for passed in calls.take(delta)]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


def cities(deltas: list[Delta]) -> list[str | None]:
    found = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    assert [call.call for call in found] == list(range(len(found)))
    assert len({call.id for call in found}) == len(found)
    return [json.loads(call.arguments).get("city") for call in found]


@pytest.mark.parametrize(("answer", "wanted"), CALLS)
@settings(deadline=None)  # The first call starts the process that validates.
@given(data=st.data())
def test_calls_are_read_however_their_text_is_cut(
    answer: str, wanted: list[str | None], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=6)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    deltas = taken(pieces)
    assert cities(deltas) == wanted
    assert text_of(deltas) == ""
    assert deltas[-1] == Finish("tool_calls")


@pytest.mark.parametrize("answer", TEXTS)
def test_everything_else_is_the_text_that_it_was(answer: str) -> None:
    deltas = taken(list(answer))
    assert text_of(deltas) == answer
    assert cities(deltas) == []
    assert deltas[-1] == Finish("stop")


def test_a_text_that_can_be_no_call_is_not_held_back() -> None:
    calls = TextCallParser(TOOLS, parallel=True)
    for text in ("Hel", '{"name'):
        assert list(calls.take(TextDelta(text))) == [TextDelta(text)]


def test_what_was_cut_off_or_is_too_long_is_text() -> None:
    assert text_of(taken([PARIS], reason="length")) == PARIS
    long = '{"name": "stop", "arguments": {"a": "' + "x" * 70_000
    calls = TextCallParser(TOOLS, parallel=True)
    assert list(calls.take(TextDelta(long))) == [TextDelta(long)]
    calls = TextCallParser(TOOLS, parallel=True)
    assert list(calls.take(TextDelta(PARIS))) == []
    assert calls.rest() == [TextDelta(PARIS)]


def test_white_space_in_a_fence_takes_no_long() -> None:
    spaces = " " * 30_000
    assert cities(taken([f"```json\n{PARIS[:-1]}{spaces}}}{spaces}```"])) == ["Paris"]
    broken = f'```json\n{{"name"{spaces}x'
    began = time.thread_time()
    assert text_of(taken([broken])) == broken
    assert time.thread_time() - began < 2


def test_half_a_surrogate_pair_in_a_call_is_no_character() -> None:
    calls = TextCallParser(TOOLS, parallel=True)
    calls.take(TextDelta(r'{"name": "stop", "arguments": {"why": "\ud83d"}}'))
    call, _ = calls.take(Finish("stop"))
    assert isinstance(call, ToolCallDelta)
    assert call.arguments == '{"why": "?"}'


def test_one_call_at_most_where_no_more_may_come() -> None:
    assert cities(taken([PARIS + ROME], parallel=False)) == ["Paris"]


def test_each_choice_is_read_by_itself() -> None:
    calls = TextCallParser(TOOLS, parallel=True)
    deltas: list[Delta] = [
        TextDelta(PARIS, 1),
        TextDelta("Hi", 0),
        Finish("stop", 0),
        Finish("stop", 1),
    ]
    passed = [one for delta in deltas for one in calls.take(delta)]
    assert [type(one).__name__ for one in passed] == [
        "TextDelta",
        "Finish",
        "ToolCallDelta",
        "Finish",
    ]
    assert passed[1:] == [Finish("stop", 0), passed[2], Finish("tool_calls", 1)]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://127.0.0.1:9/schema"},
        {"type": 5},
        {"properties": {"city": {"pattern": "(?=a)"}}},
        {"properties": {"city": {"pattern": "^(a+)+$"}}},
        {
            "$ref": "#/$defs/d0",
            "$defs": {
                **{f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)},
                "d60": {"type": "object"},
            },
        },
    ],
)
def test_a_hostile_schema_is_fitted_by_nothing(schema: dict[str, object]) -> None:
    answer = json.dumps({"name": "f", "arguments": {"city": "a" * 5000 + "!"}})
    assert text_of(taken([answer], tools=(Tool("f", None, schema),))) == answer


def test_a_fence_is_read_in_linear_time() -> None:
    answer = '```json\n{"name": "weather",' + " " * 65_000 + "and more"
    began = time.process_time()
    assert text_of(taken([answer])) == answer
    assert time.process_time() - began < 1
