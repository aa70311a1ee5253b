"""Texts that engines share: too long prompts, a prompt as the answer's beginning, stop texts."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from inference_site.core.domain.deltas import TextDelta, TokenLogprob
from inference_site.core.domain.errors import ContextLengthExceeded
from worker.engines.base import Sink

PIECE = 8_192
"""Characters of one piece; the library tokenizes a piece in ten milliseconds at most."""
_SPLIT_TOKENS = 64
"""Upper bound on the additional tokens of a piece because the cuts split tokens."""
TOKENIZE_LIMIT = 65_536
"""Tokens of a text that is only tokenized, even where the context is shorter. The web process
accepts texts of this length for every model."""
_TOKENS_A_DELTA = 64


def is_short_enough(
    text: str,
    limit: int,
    context_length: int,
    count: Callable[[str], int],
    sink: Sink,
    param: str,
) -> bool:
    """Return True if the text has at most ``limit`` tokens, False if the sink is cancelled.

    A library tokenizes a text in one call that cannot be cancelled, and that may take the square of
    the text's length: llama.cpp's SentencePiece tokenizer copies all previous tokens for each
    character that its vocabulary lacks. So the text is tokenized in pieces first; a cut splits a
    few tokens only. ``count`` returns the number of tokens of a piece. Raise ContextLengthExceeded,
    with an estimate of the tokens, if there are more.
    """
    if sink.cancelled:
        return False
    if len(text) <= PIECE:
        return True
    tokens = 0
    for start in range(0, len(text), PIECE):
        if sink.cancelled:
            return False
        end = min(start + PIECE, len(text))
        tokens += max(0, count(text[start:end]) - _SPLIT_TOKENS)
        if tokens > limit:
            estimate = tokens * len(text) // end
            raise ContextLengthExceeded(context_length, estimate, param, is_estimated=True)
    return not sink.cancelled


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


class StopTexts:
    """Cuts a text that comes in pieces before the stop text that ends first.

    Of two that end at the same character, the longer one counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None
        """The stop text that ended the text. Feed nothing after it is set."""

    @property
    def is_holding(self) -> bool:
        """Whether a text that may begin a stop text is held back."""
        return bool(self._held)

    def feed(self, text: str) -> str:
        """Take the next piece; return the text that is certain to be outside of stop texts."""
        text = self._held + text
        matches = [(text.index(stop), stop) for stop in self._stops if stop in text]
        if matches:
            cut, self.found = min(matches, key=lambda match: (match[0] + len(match[1]), match[0]))
            self._held = ""
            return text[:cut]
        cut = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[cut:]
        return text[:cut]

    def end(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text may be the beginning of a stop text.

    A stop text of a client may have a million characters, so not each beginning of it is tried.
    """
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0
