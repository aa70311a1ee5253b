"""What holds for every text and every cutting of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.engines.chat.answers import SYNTAXES, TOOLS, parse
from tests.worker.engines.chat.test_tool_formats import TWO_CALLS
from worker.engines.chat.parser.formats import TOOL_FORMATS
from worker.engines.chat.parser.output import Reasoning, Syntax
from worker.engines.chat.parser.parser import HARMONY_TAGS, OutputParser

EXAMPLES = settings().max_examples

ALL = {
    **SYNTAXES,
    "again": Syntax(Reasoning(header="Hm:", reenters=True, has_calls=True), TOOL_FORMATS["hermes"]),
}
TAGS = (
    *(tag for found in TOOL_FORMATS.values() for tag in (*found.starts, *found.tags)),
    *("<think>", "</think>", "<|channel>", "<channel|>", "<parameter=", *HARMONY_TAGS),
)
INSIDES = (
    *('{"name": "f"', '{"name":"g","arguments":', ', "parameters": {', '"a": "b"', "}", "}}", "{"),
    *("[", "]", "f(", "a=1", ")", ", ", "f", ">", "name", '"', "'", "\\", "```json\n", "function"),
    *(
        " to=functions.f",
        "analysis",
        "thought",
        "final",
        "Hm:",
        " ",
        "\n",
        "word ",
        "ß",
        "{{",
        "\0",
    ),
)
HALVES = st.builds(
    lambda tag, length: tag[: length % len(tag)], st.sampled_from(TAGS), st.integers(1, 40)
)
CALLS = st.sampled_from(list(TWO_CALLS.values()))
FRAGMENTS = st.sampled_from(TAGS) | st.sampled_from(INSIDES) | HALVES | CALLS
TEXTS = st.lists(FRAGMENTS, max_size=14).map("".join)
WORDS = ("QX", "X ", " Z")


def cut(text: str, places: list[int]) -> list[str]:
    marks = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(marks)]


@pytest.mark.parametrize("name", ALL)
@given(
    text=TEXTS,
    places=st.lists(st.integers(min_value=0), max_size=12),
    in_reasoning=st.booleans(),
    has_tools=st.booleans(),
)
@settings(max_examples=EXAMPLES, deadline=None)
def test_any_cutting_gives_the_same_answer(
    name: str, text: str, places: list[int], in_reasoning: bool, has_tools: bool
) -> None:
    tools = TOOLS if has_tools else ()
    whole = parse(ALL[name], text, tools, in_reasoning)  # As a whole, and by characters.
    assert parse(ALL[name], cut(text, places), tools, in_reasoning) == whole


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json", "deepseek"])
@given(pieces=st.lists(st.sampled_from((*TAGS, *WORDS, "\n", "<", "<|", "[T")), max_size=14))
@settings(max_examples=EXAMPLES, deadline=None)
def test_nothing_is_lost_but_tags_and_white_space(name: str, pieces: list[str]) -> None:
    found = ALL[name].tool_format
    assert found is not None
    answer = parse(ALL[name], "".join(pieces))
    assert answer.calls == []  # No object ever comes.
    for tag in (*found.starts, *found.tags):
        assert tag not in answer.text
    kept = [c for c in answer.reasoning + answer.text if c in "QXZ"]
    assert sorted(kept) == sorted(c for piece in pieces if piece in WORDS for c in piece.strip())


@pytest.mark.parametrize("name", ALL)
def test_endless_texts_take_time_in_proportion(name: str) -> None:
    for unit in (
        '{"',
        "<",
        "[",
        "f(",
        '<tool_call>{"name":"f","arguments":{"a":"',
        "<|channel|>x",
        "  ",
    ):
        parser = OutputParser(ALL[name], TOOLS)
        for _ in range(8_000):
            parser.feed(unit)
        parser.finish()  # The test's time limit is the assertion.
