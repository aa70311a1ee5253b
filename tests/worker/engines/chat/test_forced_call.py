"""Reading a forced call out of text that is cut anywhere."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from inference_site.core.domain.deltas import ToolCallDelta
from inference_site.core.domain.request import Tool
from worker.engines.chat.tools import ForcedCall, call_schema

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def read(pieces: list[str]) -> tuple[list[ToolCallDelta], bool]:
    call = ForcedCall(index=2)
    return [delta for piece in pieces for delta in call.feed(piece)], call.is_complete


def cut(text: str, places: list[int]) -> list[str]:
    marks = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(marks)]


@given(
    arguments=st.dictionaries(st.text(), JSON),
    places=st.lists(st.integers(min_value=0), max_size=12),
    space=st.sampled_from(["", " ", "\n  "]),
    escape=st.booleans(),
)
def test_any_cutting_gives_the_same_call(
    arguments: dict[str, Any], places: list[int], space: str, escape: bool
) -> None:
    body = json.dumps(arguments, ensure_ascii=escape)
    text = f'{space}{{{space}"name":{space}"do_it",{space}"arguments":{space}{body}{space}}}'
    deltas, complete = read(cut(text, places))
    assert complete
    assert "".join(delta.arguments for delta in deltas) == body
    assert [delta.name for delta in deltas if delta.name] == ["do_it"]
    assert deltas[0].id is not None
    assert deltas[0].id.startswith("call_")
    assert {(delta.call, delta.index) for delta in deltas} == {(0, 2)}


def test_call_that_is_cut_short_is_not_complete() -> None:
    deltas, complete = read(['{"name": "do_it", "arguments": {"a": "}'])
    assert not complete
    assert "".join(delta.arguments for delta in deltas) == '{"a": "}'


def test_nothing_comes_before_the_name_is_known() -> None:
    assert read(['{"name": "do_']) == ([], False)


def test_schema_names_each_tool_and_its_arguments() -> None:
    schema = call_schema((Tool("a", None, {}), Tool("b", None, {"properties": {"x": {}}})))
    names = [branch["properties"]["name"]["const"] for branch in schema["anyOf"]]
    assert names == ["a", "b"]
    assert schema["anyOf"][1]["properties"]["arguments"] == {
        "type": "object",
        "properties": {"x": {}},
        "additionalProperties": False,
    }
