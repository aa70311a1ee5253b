"""Where a stop token cuts a chunk: its text and what follows are gone, what was before stays."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from worker.engines.openai_upstream.choices import find_token_stop

STOP = 7


def chunk_of(tokens: list[tuple[int, bytes]], content: str) -> dict[str, Any]:
    """A choice of llama.cpp's chunk."""
    entries = [{"id": id_, "bytes": list(text)} for id_, text in tokens]
    return {"delta": {"content": content}, "logprobs": {"content": entries}}


@given(st.lists(st.tuples(st.integers(0, 9), st.text(max_size=3)), min_size=1), st.text())
def test_text_before_the_first_stop_token_is_kept(
    tokens: list[tuple[int, str]], held_before: str
) -> None:
    text = "".join(piece for _, piece in tokens)
    choice = chunk_of([(id_, piece.encode()) for id_, piece in tokens], held_before + text)
    cut = find_token_stop([STOP], choice)
    ids = [id_ for id_, _ in tokens]
    assert (cut is not None) == (STOP in ids)
    if cut is None:
        return
    place = ids.index(STOP)
    kept = "".join(piece for _, piece in tokens[:place])
    assert cut.token == STOP
    assert [entry["id"] for entry in cut.before] == ids[:place]
    assert cut.shorten(choice["delta"]) == {"content": held_before + kept}


@given(st.integers(1, 3))
def test_character_of_which_the_stop_token_is_a_part_is_gone(place: int) -> None:
    fox = "🦊".encode()
    tokens = [(1, b"a"), (2, fox[:place]), (STOP, fox[place:]), (3, b"b")]
    cut = find_token_stop([STOP], chunk_of(tokens, "a🦊b"))
    assert cut is not None
    assert cut.shorten({"content": "a🦊b"}) == {"content": "a"}


def test_reasoning_is_shortened_like_the_answer() -> None:
    cut = find_token_stop([STOP], chunk_of([(1, b"Hm"), (STOP, b"!")], ""))
    assert cut is not None
    assert cut.shorten({"reasoning_content": "Hm!", "role": None}) == {
        "reasoning_content": "Hm",
        "role": None,
    }


def test_arguments_of_a_call_are_shortened_like_the_answer() -> None:
    cut = find_token_stop([STOP], chunk_of([(1, b"ab"), (STOP, b"cd")], ""))
    assert cut is not None
    call = {"index": 0, "function": {"arguments": "xabcd"}}
    assert cut.shorten({"tool_calls": [call]}) == {
        "tool_calls": [{"index": 0, "function": {"arguments": "xab"}}]
    }


def test_chunk_without_log_probabilities_has_no_cut() -> None:
    assert find_token_stop([STOP], {"delta": {"content": "a"}}) is None
    assert find_token_stop([STOP], {"delta": {}, "logprobs": None}) is None
    assert find_token_stop([STOP], {"delta": {}, "logprobs": {"content": None}}) is None
