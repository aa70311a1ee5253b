"""Long texts are counted piece by piece before a library is given the whole of them.

A library tokenizes a text in one call, which nothing can stop, and which may take the square of the
text's length: llama.cpp's SentencePiece tokenizer copies all tokens so far for each character that
its vocabulary does not have. A text that fits into the context has few tokens, so that call is
short. Whether it fits is known from its pieces: to cut a text can only part a few tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from inference_site.domain.errors import ContextLengthExceeded
from worker.engines.base import Sink

PIECE = 8_192
"""Characters of one piece; the library tokenizes a piece in ten milliseconds at most."""
_PARTED = 64
"""How many tokens more a cut may come to: those of the longest tokens that are known, cut in two,
have fewer."""
LEAST_TOKENS = 65_536
"""How many tokens a text that is only tokenized may have, whatever the context: as many as a text
has that the web process accepts whatever the context."""


def is_short_enough(
    text: str,
    most_tokens: int,
    context_length: int,
    count: Callable[[str], int],
    sink: Sink,
    param: str,
) -> bool:
    """Return True once it is known that the text can be given to the library; False if cancelled.

    ``count`` returns the number of tokens of a piece. Raise ContextLengthExceeded if the text has
    more than ``most_tokens``, with an estimate of their number.
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
        tokens += max(0, count(text[start:end]) - _PARTED)
        if tokens > most_tokens:
            estimate = tokens * len(text) // end
            raise ContextLengthExceeded(context_length, estimate, param, is_estimated=True)
    return not sink.cancelled
