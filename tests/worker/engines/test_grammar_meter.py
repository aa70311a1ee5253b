"""A grammar that gets slower with the text ends its own run, before it slows down the others."""

from __future__ import annotations

import pytest

from inference_site.domain.deltas import Finish, TextDelta
from inference_site.domain.errors import InvalidRequest
from inference_site.domain.request import Constraint
from tests.sinks import RecordingSink
from worker.engines.llama_cpp.grammar_meter import GrammarMeter

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


@pytest.mark.parametrize("text", ["abc" * 2_000, "ABC" * 10])
def test_what_is_cheap_or_is_no_part_of_the_grammar_passes(text: str) -> None:
    sink = RecordingSink()
    meter = GrammarMeter(sink, _late("zyxwvuzyxwvu"))
    for index in (0, 1):
        meter.feed(TextDelta(text, index))
        meter.feed(Finish("stop", index))
    assert sink.text == text * 2
