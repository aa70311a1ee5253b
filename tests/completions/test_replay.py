"""The stream of a stored chat completion is rebuilt as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from completions.assemblers.chat import ChatAssembler, ChatAssembly
from completions.models import StoredCompletion
from completions.storage import replay
from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)

ASSEMBLY = ChatAssembly("chatcmpl-1", 1_700_000_000, "demo", stream=True, records=True)
LIKELY = (TokenLogprob("a", -0.25, b"a", (TokenLogprob("a", -0.25, b"a"),)),)
USAGE = Usage(7, 3, 5, 2, prefill_ms=12.5, decode_ms=31.25)
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4)


def stored(assembly: ChatAssembly, *deltas: Delta) -> tuple[list[bytes], StoredCompletion]:
    """Return the frames of a stream, and what is stored of it."""
    assembler = ChatAssembler(assembly)
    frames = [frame for delta in deltas for frame in assembler.feed(delta)]
    ending = assembler.complete()
    kept: Any = orjson.loads(
        orjson.dumps({"completion": assembler.completion(), "streamed": assembler.as_streamed()})
    )
    return [*frames, *ending.frames], StoredCompletion(public_id="chatcmpl-1", **kept)


def check(assembly: ChatAssembly, *deltas: Delta) -> None:
    frames, row = stored(assembly, *deltas)
    batch = replay(row)
    assert (batch.first, list(batch.frames)) == (0, frames)
    assert batch.ending is not None
    assert orjson.loads(batch.ending.body) == row.completion


@given(
    st.lists(
        st.one_of(
            st.builds(TextDelta, texts, st.integers(0, 1), st.sampled_from([(), LIKELY])),
            st.builds(ReasoningDelta, texts, st.integers(0, 1)),
        ),
        max_size=8,
    )
)
def test_texts_are_cut_as_they_were(deltas: list[Delta]) -> None:
    assembly = replace(ASSEMBLY, choices=2, logprobs=True, include_usage=True)
    check(assembly, *deltas, Finish("stop", 1, "end"), Finish("length", 0), USAGE)


@pytest.mark.parametrize("is_legacy", [False, True])
def test_calls_are_cut_as_they_were(is_legacy: bool) -> None:
    calls = [
        ToolCallDelta(0, "", "call_1", "get"),
        ToolCallDelta(0, '{"a"'),
        ToolCallDelta(0, ": 1}"),
    ]
    more = [
        ToolCallDelta(1, "x", "call_2", "run", is_custom=True),
        ToolCallDelta(1, "y", is_custom=True),
    ]
    given_calls = calls if is_legacy else [*calls, *more]
    assembly = replace(ASSEMBLY, is_legacy=is_legacy, timings=True)
    check(assembly, TextDelta("I call."), *given_calls, Finish("tool_calls"), USAGE)


def test_a_comment_stands_for_what_is_not_stored() -> None:
    progress = PromptProgress(10, 0, 5, 1.5)
    frames, row = stored(ASSEMBLY, progress, TextDelta("Hi"), Finish("stop"), USAGE)
    batch = replay(row)
    assert list(batch.frames) == [b": left out\n\n", *frames[1:]]


def test_an_answer_in_one_piece_is_the_completion() -> None:
    _, row = stored(replace(ASSEMBLY, stream=False), TextDelta("Hi"), Finish("stop"), USAGE)
    batch = replay(row)
    assert batch.ending is not None
    assert not batch.frames
    assert orjson.loads(batch.ending.body) == row.completion


def test_a_running_count_of_tokens_is_not_kept() -> None:
    _, row = stored(replace(ASSEMBLY, continuous_usage=True), TextDelta("Hi"), Finish("stop"))
    assert row.streamed is None
