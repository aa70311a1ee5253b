"""Long texts that the frames and the document of one generation have in common, kept once.

The events of a response repeat its instructions and tools. The first entry of the event log has
these texts; in documents and frames a reference stands for each: data without references is stored
as it is, other data as a list of pieces and of the numbers of texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

Stored = bytes | list[bytes | int]
_LONG = 4096
"""Bytes of a text from which on it is stored once."""


class TextsUnknown(Exception):
    """The data refers to texts that are not at hand."""


def long_texts(texts: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return those of the texts that are to be stored once, the longest first."""
    return tuple(sorted({text for text in texts if len(text) >= _LONG}, key=len, reverse=True))


def shorten(data: bytes, texts: Sequence[bytes]) -> Stored:
    """Return the data with references in place of the texts."""
    pieces: list[bytes | int] = [data]
    for number, text in enumerate(texts):
        if len(text) <= len(data):
            pieces = list(chain.from_iterable(_cut(piece, text, number) for piece in pieces))
    return data if len(pieces) == 1 else pieces


def _cut(piece: bytes | int, text: bytes, number: int) -> Iterator[bytes | int]:
    if isinstance(piece, int):
        yield piece
        return
    first, *others = piece.split(text)
    yield first
    for other in others:
        yield number
        yield other


def restore(stored: Stored, texts: Sequence[bytes]) -> bytes:
    """Return the data that was shortened with these texts. Raise TextsUnknown if there are none."""
    if isinstance(stored, bytes):
        return stored
    if not texts:
        raise TextsUnknown
    return b"".join(piece if isinstance(piece, bytes) else texts[piece] for piece in stored)
