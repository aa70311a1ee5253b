"""From tokens to text: whole characters only, and nothing of a stop text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from inference_site.domain.deltas import TextDelta, TokenLogprob
from worker.engines.stop_texts import StopTexts


class AnswerText:
    """The text of one choice. A fold over its tokens' bytes."""

    def __init__(self, stops: Sequence[str], index: int) -> None:
        self._stops, self._index = StopTexts(stops), index
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._logprobs: list[TokenLogprob] = []

    @property
    def stop(self) -> str | None:
        """The stop text that ended it."""
        return self._stops.found

    def feed(self, piece: bytes, logprob: TokenLogprob | None) -> TextDelta | None:
        """Take the next token's bytes; return what of the text is certain now."""
        if logprob is not None:
            self._logprobs.append(logprob)
        return self._delta(self._stops.feed(self._decoder.decode(piece)))

    def end(self) -> TextDelta | None:
        """Return the rest, once nothing follows."""
        if self.stop is not None:
            return None
        return self._delta(
            self._stops.feed(self._decoder.decode(b"", final=True)) + self._stops.end()
        )

    def _delta(self, text: str) -> TextDelta | None:
        if not text:
            return None
        logprobs, self._logprobs = tuple(self._logprobs), []
        return TextDelta(text, self._index, logprobs)
