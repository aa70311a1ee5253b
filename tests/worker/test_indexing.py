"""The division of a text into chunks."""

from __future__ import annotations

import time

import pytest

from worker.indexing import _SECTION, sections, split


@pytest.mark.parametrize("text", ["x" * 2_000_000, '{"a":1,"b":[1,2,3]},' * 200_000])
def test_a_text_without_ends_of_lines_is_divided_in_linear_time(text: str) -> None:
    began = time.thread_time()
    parts = [part for section in sections(text) for part in split(section, "a.json", 800, 0)]
    assert "".join(parts) == text
    assert time.thread_time() - began < 20


@pytest.mark.parametrize(
    ("line", "end"), [("word word.\n\n", ".\n\n"), ("a,b,c\n", "c\n"), ("word ", "d "), ("é", "é")]
)
def test_sections_end_where_a_paragraph_a_line_or_a_word_does(line: str, end: str) -> None:
    text = line * (250_000 // len(line))
    found = list(sections(text))
    assert "".join(found) == text
    assert len(found) == 3
    assert all(len(section) <= _SECTION and section.endswith(end) for section in found)


@pytest.mark.parametrize("text", ["", "short", "x" * _SECTION])
def test_a_short_text_is_one_section(text: str) -> None:
    assert list(sections(text)) == [text]
