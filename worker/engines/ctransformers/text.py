"""From tokens to text: whole characters only, and nothing of a stop text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from worker.generation import TextDelta, TokenLogprob


class AnswerText:
    """The text of one choice. A fold over its tokens' bytes."""

    def __init__(self, stops: Sequence[str], index: int) -> None:
        self._stops, self._index = stops, index
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._logprobs: list[TokenLogprob] = []
        self.stop: str | None = None
        """The stop text that ended it."""

    def feed(self, piece: bytes, logprob: TokenLogprob | None) -> TextDelta | None:
        """Take the next token's bytes; return what of the text is certain now."""
        if logprob is not None:
            self._logprobs.append(logprob)
        return self._take(self._decoder.decode(piece))

    def end(self) -> TextDelta | None:
        """Return the rest, once nothing follows."""
        if self.stop is not None:
            return None
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return self._delta(text)

    def _take(self, text: str) -> TextDelta | None:
        text = self._held + text
        found = [(text.index(stop), stop) for stop in self._stops if stop in text]
        if found:
            cut, self.stop = min(found)
            self._held = ""
            return self._delta(text[:cut])
        shown = len(text) - self._half_a_stop(text)
        self._held = text[shown:]
        return self._delta(text[:shown])

    def _half_a_stop(self, text: str) -> int:
        """Return how much of the end may be the beginning of a stop text."""
        starts = (stop[:n] for stop in self._stops for n in range(1, len(stop)))
        return max((len(start) for start in starts if text.endswith(start)), default=0)

    def _delta(self, text: str) -> TextDelta | None:
        if not text:
            return None
        logprobs, self._logprobs = tuple(self._logprobs), []
        return TextDelta(text, self._index, logprobs)
