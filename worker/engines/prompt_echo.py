"""Prompts as a part of the answer, with the log probabilities of their tokens."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from inference_site.domain.deltas import TextDelta, TokenLogprob
from worker.engines.base import Sink

_TOKENS_A_DELTA = 64


def first_entry(piece: bytes) -> TokenLogprob:
    """Return the entry of the token that a prompt begins with, which has no probability."""
    return TokenLogprob(piece.decode("utf-8", "replace"), math.nan, piece)


def feed_entries(
    entries: Sequence[TokenLogprob], indices: Iterable[int], sink: Sink, is_scored: bool = True
) -> None:
    """Feed a prompt to the choices with these indices; its text is that of the entries.

    The entries themselves are fed only if they are scored.
    """
    for index in indices:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for first in range(0, len(entries), _TOKENS_A_DELTA):
            part = tuple(entries[first : first + _TOKENS_A_DELTA])
            is_last = first + _TOKENS_A_DELTA >= len(entries)
            text = decoder.decode(b"".join(entry.text_bytes for entry in part), final=is_last)
            sink.feed(TextDelta(text, index, part if is_scored else ()))


def shared_out(text: str, entries: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """Return the entries with the parts of this text that they stand for.

    A tokenizer may put a token and a space before a text: these are no parts of it. What the tokens
    do not say of the text is a part of the last one.
    """
    rest, shared = text.encode(), []
    for entry in entries:
        size = _size(entry.text_bytes, rest)
        shared.append(_with_text(entry, rest[:size]))
        rest = rest[size:]
    if rest and shared:
        shared[-1] = replace(shared[-1], text_bytes=shared[-1].text_bytes + rest)
    return shared


def _size(piece: bytes, rest: bytes) -> int:
    spaceless = piece.lstrip(b" ")
    return next((len(p) for p in (piece, spaceless) if rest.startswith(p)), 0)


def _with_text(entry: TokenLogprob, text: bytes) -> TokenLogprob:
    token = text.decode("utf-8", "replace") if text else entry.token
    return replace(entry, token=token, text_bytes=text)
