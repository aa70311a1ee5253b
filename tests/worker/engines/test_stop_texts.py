"""Where a text that comes in pieces ends."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engines.texts import StopTexts


def read(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    """What is shown of a text, and the stop text that ended it."""
    text, shown = StopTexts(stops), ""
    for piece in pieces:
        shown += text.feed(piece)
        if text.found is not None:
            return shown, text.found
    return shown + text.end(), None


@pytest.mark.parametrize(
    ("stops", "shown", "found"),
    [
        ([], "one two three", None),
        (["two"], "one ", "two"),
        (["three", "two"], "one ", "two"),
        (["two", "tw"], "one ", "tw"),
        (["two", "w"], "one t", "w"),
        (["two", "o"], "", "o"),
        (["wo", "two"], "one ", "two"),
        (["four", "three!"], "one two three", None),
    ],
)
def test_text_ends_before_the_stop_text_that_is_complete_first(
    stops: list[str], shown: str, found: str | None
) -> None:
    assert read(["one two three"], stops) == (shown, found)


def test_only_what_may_be_a_stop_text_is_held_back() -> None:
    text = StopTexts(["END."])
    assert [text.feed(piece) for piece in ("a E", "N", "d", " EN", "D")] == [
        "a ",
        "",
        "ENd",
        " ",
        "",
    ]
    assert (text.end(), text.end()) == ("END", "")


@given(
    st.text("ab ", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_no_cut_into_pieces_shows_any_of_a_stop_text(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    shown, found = read([text[a:b] for a, b in pairwise(edges)], stops)
    assert (shown, found) == read([text], stops) == read(list(text), stops)
    assert text.startswith(f"{shown}{found or ''}")
    assert not any(stop in shown for stop in stops)
    assert found is not None or shown == text


def test_long_stop_texts_take_no_long() -> None:
    """Clients may send stop texts of any length, and one loop reads all answers of upstreams."""
    stops = StopTexts(("ab" * 500_000, "a" * 20_000 + "b"))
    began = time.thread_time()
    pieces = [stops.feed("a" * 100) for _ in range(150)]
    assert "".join(pieces) == ""
    assert stops.feed("c" * 100) == "a" * 15_000 + "c" * 100
    assert stops.feed("ab") == ""
    assert stops.end() == "ab"
    assert time.thread_time() - began < 2
