"""Refuses a text that is too long for the context before a library tokenizes all of it.

A library tokenizes a text in one call that cannot be cancelled, and that may take the square of the
text's length: llama.cpp's SentencePiece tokenizer copies all previous tokens for each character
that its vocabulary lacks. So the text is tokenized in pieces first; a cut splits a few tokens only.
"""

from __future__ import annotations

from collections.abc import Callable

from inference_site.core.domain.errors import ContextLengthExceeded
from worker.engines.base import Sink

PIECE = 8_192
"""Characters of one piece; the library tokenizes a piece in ten milliseconds at most."""
_SPLIT_TOKENS = 64
"""Upper bound on the additional tokens of a piece because the cuts split tokens."""
TOKENIZE_LIMIT = 65_536
"""Tokens of a text that is only tokenized, even where the context is shorter. The web process
accepts texts of this length for every model."""


def is_short_enough(
    text: str,
    limit: int,
    context_length: int,
    count: Callable[[str], int],
    sink: Sink,
    param: str,
) -> bool:
    """Return True if the text has at most ``limit`` tokens, False if the sink is cancelled.

    ``count`` returns the number of tokens of a piece. Raise ContextLengthExceeded, with an estimate
    of the tokens, if there are more.
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
