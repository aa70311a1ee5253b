"""Feeds a prompt as a part of the answer (``echo``), with the log probabilities of its tokens."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from inference_site.core.domain.deltas import TextDelta, TokenLogprob
from worker.engines.base import Sink

_TOKENS_A_DELTA = 64


def first_entry(piece: bytes) -> TokenLogprob:
    """Return the entry of the first token of a prompt, which has no log probability."""
    return TokenLogprob(piece.decode("utf-8", "replace"), math.nan, piece)


def feed_entries(
    entries: Sequence[TokenLogprob], indices: Iterable[int], sink: Sink, is_scored: bool = True
) -> None:
    """Feed the text of the entries to the choices with these indices.

    The log probabilities are fed only if ``is_scored``.
    """
    for index in indices:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for first in range(0, len(entries), _TOKENS_A_DELTA):
            part = tuple(entries[first : first + _TOKENS_A_DELTA])
            is_last = first + _TOKENS_A_DELTA >= len(entries)
            text = decoder.decode(b"".join(entry.text_bytes for entry in part), final=is_last)
            sink.feed(TextDelta(text, index, part if is_scored else ()))


def with_texts_of(text: str, entries: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """Return the entries, each with its part of this text.

    A tokenizer may add a token or a space before the text; these have no part of it. Text that no
    token covers goes to the last entry.
    """
    rest, aligned = text.encode(), list[TokenLogprob]()
    for entry in entries:
        pieces = (entry.text_bytes, entry.text_bytes.lstrip(b" "))
        part = next((piece for piece in pieces if rest.startswith(piece)), b"")
        token = part.decode("utf-8", "replace") if part else entry.token
        aligned.append(replace(entry, token=token, text_bytes=part))
        rest = rest[len(part) :]
    if rest and aligned:
        aligned[-1] = replace(aligned[-1], text_bytes=aligned[-1].text_bytes + rest)
    return aligned
