"""Where a model's text cites a source."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_site.core.domain.site_tools import Source, find_citations, urls_in

A, B = Source("https://a.example/x?q=1", "A"), Source("https://b.example/wiki/Fjord_(N)", "B")


@pytest.mark.parametrize(
    ("text", "cited"),
    [
        ("It is deep [1].", [("[1]", "A")]),
        ("Both[1][2] say so.", [("[1]", "A"), ("[2]", "B")]),
        ("Both [1, 2].", [("[1, 2]", "A"), ("[1, 2]", "B")]),
        ("Æøå 🏔 [2]", [("[2]", "B")]),
        ("See [the page](https://a.example/x?q=1).",
         [("[the page](https://a.example/x?q=1)", "A")]),
        ('[f](https://b.example/wiki/Fjord_(N) "Fjord")!',
         [('[f](https://b.example/wiki/Fjord_(N) "Fjord")', "B")]),
        ("([b](HTTPS://B.example/wiki/Fjord_(N)#deep))",
         [("[b](HTTPS://B.example/wiki/Fjord_(N)#deep)", "B")]),
        ("From https://a.example/x?q=1, and more.", [("https://a.example/x?q=1", "A")]),
        ("(https://b.example/wiki/Fjord_(N))", [("https://b.example/wiki/Fjord_(N)", "B")]),
        ("**https://a.example/x?q=1**", [("https://a.example/x?q=1", "A")]),
        # No citations:
        ("Zero [0], many [3], [99999] and [1](https://other.example).", []),
        ("https://other.example/x?q=1 https://a.example/x?q=12 http://a.example/x?q=1", []),
        ("`list[1]` and ```\nx[2]\n``` and ```\nx[1]", []),
        ("[not a number] [] [1 [a] (https://)", []),
        ("", []),
    ],
)  # fmt: skip
def test_citations_are_where_the_text_names_a_source(
    text: str, cited: list[tuple[str, str]]
) -> None:
    found = find_citations(text, [A, B])
    assert [(text[c.start : c.end], c.source.title) for c in found] == cited
    assert find_citations(text, []) == []


@given(st.lists(st.sampled_from(
    ["[1]", "[2, 1]", "[", "]", "(", ")", "`", "```", "\n", " ", "https://a.example/x?q=1",
     "https://b.example/wiki/Fjord_(N)", "[x](", "é", ".", '"'])))  # fmt: skip
def test_any_text_has_its_citations_in_order_and_inside(pieces: list[str]) -> None:
    text = "".join(pieces)
    found = find_citations(text, [A, B])
    assert all(0 <= c.start < c.end <= len(text) for c in found)
    starts = [c.start for c in found]
    assert starts == sorted(starts)


@pytest.mark.parametrize(
    "piece", ["[a", "[1,", "`", "```", "https://a(", "[x](https://a(b", "[[1]"]
)
def test_long_text_without_an_end_is_read_in_linear_time(piece: str) -> None:
    assert len(find_citations(piece * 100_000, [A])) <= 100_000


def test_urls_of_a_user_are_found_without_what_follows_them() -> None:
    text = "Read https://a.example/x, <https://b.example/(y)>; [c](http://c.example/z). ftp://d/"
    assert list(urls_in(text)) == [
        "https://a.example/x", "https://b.example/(y)", "http://c.example/z"
    ]  # fmt: skip
