"""A grammar that gets slower with the text ends its own run, before it slows down the others."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from inference_site.core.domain.errors import GenerationFailed, InvalidRequest
from inference_site.core.domain.request import Constraint
from tests.sinks import RecordingSink
from worker.engines.grammars import check_grammar, regex_as_lark
from worker.engines.llama_cpp.constraints import GrammarMeter, measured

AMBIGUOUS = "root ::= w w w\nw ::= [^\\x00] | [^\\x00] w | [^\\x00] w w | [^\\x00] w w w"


def _late(prefix: str) -> Constraint:
    """A grammar that is ambiguous only after a text that no trial finds."""
    return Constraint(
        "gbnf", AMBIGUOUS.replace("w w w", f'[a-y]* | "{prefix}" w w w', 1), "grammar"
    )


def test_an_ambiguous_grammar_is_stopped_within_some_hundred_bytes() -> None:
    sink = RecordingSink()
    meter = GrammarMeter(sink, _late("zyxwvuzyxwvu"))
    meter.feed(TextDelta("zyxwvuzyxwvu"))
    with pytest.raises(InvalidRequest, match="too many ways") as refused:
        _feed(meter, 300)
    assert refused.value.param == "grammar"
    assert sink.text.startswith("zyxwvuzyxwvuab")


def _feed(meter: GrammarMeter, pieces: int) -> None:
    for _ in range(pieces):
        meter.feed(TextDelta("ab"))


def test_what_is_cheap_passes() -> None:
    sink = RecordingSink()
    meter = GrammarMeter(sink, _late("zyxwvuzyxwvu"))
    text = "abc" * 2_000
    for index in (0, 1):
        meter.feed(TextDelta(text, index))
        meter.feed(Finish("stop", index))
    assert sink.text == text * 2


def test_a_text_that_does_not_fit_the_grammar_is_an_error() -> None:
    sink = RecordingSink()
    meter = GrammarMeter(sink, Constraint("regex", "[a-y]+", "grammar"))
    meter.feed(TextDelta("abc"))
    meter.feed(TextDelta("abc", 1))
    with pytest.raises(GenerationFailed, match="does not fit its constraint"):
        meter.feed(TextDelta("Z, and on without a grammar"))
    assert sink.text == "abcabc"


@pytest.mark.parametrize(
    ("source", "before"),
    [
        ("start: <tool_call> /[a-y]+/", TextDelta("")),
        ("start: /[a-y]+/", ReasoningDelta("Hm.")),
        ("start: /[a-y]+/", ToolCallDelta(0, "{}")),
        ("start: /[^b]+/", TextDelta("\ufffd")),
    ],
)
def test_what_llama_cpp_takes_out_of_the_text_is_no_error(source: str, before: Delta) -> None:
    sink = RecordingSink()
    meter = GrammarMeter(sink, Constraint("lark", source, "grammar"))
    meter.feed(before)
    meter.feed(TextDelta("b, B"))
    assert sink.text.endswith("b, B")


def test_white_space_before_an_answer_that_might_have_thoughts_may_be_missing() -> None:
    for source in ("start: / +[a-y]+/", "start: /\\n?[a-y]+/"):
        sink = RecordingSink()
        meter = GrammarMeter(sink, Constraint("lark", source, "grammar"), may_think=True)
        meter.feed(TextDelta("abc"))
        assert sink.text == "abc"


@pytest.mark.parametrize(
    "limits", ["max_tokens=2", 'capture="a", max_tokens = 2', 'stop="max_tokens=9", max_tokens=2']
)
def test_limit_of_tokens_is_none_of_bytes_and_may_cut_the_text(limits: str) -> None:
    lark = f'start: part "!"\npart[{limits}]: /[a-y]+/'
    listed = json.dumps({"grammars": [{"lark_grammar": lark}]})
    for constraint in (
        Constraint("lark", lark, "grammar"),
        Constraint("llguidance", listed, "grammar"),
    ):
        sink = RecordingSink()
        meter = GrammarMeter(sink, constraint)
        meter.feed(TextDelta("abc"))
        meter.feed(TextDelta("def!"))
        assert sink.text == "abcdef!"


def test_text_that_looks_like_a_limit_of_tokens_is_none() -> None:
    constraint = Constraint("lark", 'start: "max_tokens=2" /[a-y]+/', "grammar")
    meter = GrammarMeter(RecordingSink(), constraint)
    meter.feed(TextDelta("max_tokens=2"))
    with pytest.raises(GenerationFailed, match="does not fit its constraint"):
        meter.feed(TextDelta("Z"))


def test_a_text_that_might_have_thoughts_is_an_error_too() -> None:
    constraint = Constraint("regex", "[a-y]+", "grammar")
    meter = GrammarMeter(RecordingSink(), constraint, may_think=True)
    with pytest.raises(GenerationFailed, match="does not fit its constraint"):
        meter.feed(TextDelta("Z"))


@pytest.mark.parametrize(
    ("deltas", "is_good"),
    [
        ([TextDelta('{"a": '), TextDelta("1}"), Finish("stop")], True),
        ([TextDelta('{"a": and on without'), Finish("stop")], False),
        ([Finish("stop")], False),
        ([TextDelta('{"a": '), Finish("length")], True),
        ([TextDelta('{"a": '), Finish("stop", stop="1")], True),
        ([ToolCallDelta(0, "{}"), Finish("tool_calls")], True),
        ([TextDelta("{"), TextDelta("[]", 1), Finish("stop", 1)], True),
    ],
)
def test_json_that_ends_as_none_is_an_error(deltas: list[Delta], is_good: bool) -> None:
    check = measured(Constraint("json_schema", "{}", "response_format"), RecordingSink())
    *before, last = deltas
    for delta in before:
        check.feed(delta)
    with nullcontext() if is_good else pytest.raises(GenerationFailed, match="does not fit"):
        check.feed(last)


@pytest.mark.parametrize("pattern", ["a/b", r"a\/b", r"a\\/b", r"https?:\/\/[^/]+", "[/]"])
def test_slash_does_not_end_an_expression(pattern: str) -> None:
    check_grammar(Constraint("regex", pattern, "grammar"))
    check_grammar(Constraint("lark", regex_as_lark(pattern), "grammar"))
