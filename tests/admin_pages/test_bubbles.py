"""Texts as the admin shows them."""

from __future__ import annotations

import pytest

from inference_site.core.admin_pages.labels import size, text_piece


@pytest.mark.parametrize(
    ("text", "laid_out"),
    [
        ('{"a":[1,"b"]}', '{\n  "a": [\n    1,\n    "b"\n  ]\n}'),
        ("[18446744073709551615]", "[\n  18446744073709551615\n]"),
        ("[0.30000000000000004]", "[\n  0.30000000000000004\n]"),
        (r'["\"123456789012345678901"]', '[\n  "\\"123456789012345678901"\n]'),
    ],
)
def test_json_is_laid_out(text: str, laid_out: str) -> None:
    piece = text_piece(text)
    assert (piece.kind, piece.text) == ("json", laid_out)


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "{not json",
        "[" * 300 + "]" * 300,
        "[18446744073709551616]",
        '{"a":-12345678901234567890}',
        "[0.1234567890123456789]",
    ],
)
def test_what_would_be_altered_is_shown_as_it_came(text: str) -> None:
    piece = text_piece(text)
    assert (piece.kind, piece.text) == ("text", text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "—"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (4400, "4.3 KiB"),
        (2**20, "1.0 MiB"),
        (3 * 2**29, "1.50 GiB"),
    ],
)
def test_a_small_size_is_not_shown_as_none(count: int, text: str) -> None:
    assert size(count) == text
