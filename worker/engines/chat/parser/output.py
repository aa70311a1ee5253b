"""What a parser puts out: deltas of one choice."""

from __future__ import annotations

from collections import deque

from inference_site.domain.deltas import ReasoningDelta, TextDelta, TokenLogprob, ToolCallDelta
from worker.engines.chat.forced_call import new_call_id
from worker.engines.chat.parser.source import Source

ParsedDelta = TextDelta | ReasoningDelta | ToolCallDelta


class Output:
    """Collects deltas, and what is known of the answer so far.

    White space at the end of the content waits for what follows: before a call it is dropped.
    Calls past ``max_calls`` are read and dropped.

    ``calls`` is how many were put out; ``call_is_open``: the last one is not complete;
    ``in_reasoning``: what comes next is reasoning; ``has_text``: there is content.
    """

    def __init__(self, source: Source, index: int, max_calls: int) -> None:
        self._source, self._index, self._max_calls = source, index, max_calls
        self._deltas: list[ParsedDelta] = []
        self._spaces = ""
        self._is_dropping = False
        self._logprobs: deque[tuple[int, tuple[TokenLogprob, ...]]] = deque()
        self._read: tuple[TokenLogprob, ...] = ()
        self.calls = 0
        self.call_is_open = False
        self.in_reasoning = False
        self.has_text = False

    def take(self) -> list[ParsedDelta]:
        """Return what there is, and forget it."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def add_logprobs(self, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Note the log probabilities of what the source got last."""
        self._logprobs.append((self._source.position + len(self._source.text), logprobs))

    def text(self, piece: str) -> None:
        """Put out content that was just read."""
        shown = piece.rstrip()
        if shown:
            self.has_text = True
            self._read_logprobs(len(piece), len(piece) - len(shown))
            self._send(self._spaces + shown)
            self._spaces = ""
        self._spaces += piece[len(shown) :]
        self._read_logprobs(len(piece) - len(shown), 0)

    def reasoning(self, piece: str) -> None:
        """Put out reasoning."""
        self._deltas.append(ReasoningDelta(piece, self._index))

    def begin_call(self, name: str) -> None:
        """Put out the beginning of a call."""
        self._spaces, self._read = "", ()
        self._is_dropping = self.calls >= self._max_calls
        if self._is_dropping:
            return
        self.call_is_open = True
        name = name.encode("utf-8", "replace").decode()  # Half a surrogate pair is no character.
        self._deltas.append(ToolCallDelta(self.calls, "", new_call_id(), name, self._index))
        self.calls += 1

    def arguments(self, piece: str) -> None:
        """Put out a piece of the call's arguments."""
        if piece and not self._is_dropping:
            self._deltas.append(ToolCallDelta(self.calls - 1, piece, index=self._index))

    def end_call(self) -> None:
        """Note that the call is complete."""
        self.call_is_open = False

    def end(self) -> None:
        """Put out the white space that ends the content."""
        if self._spaces:
            self._send(self._spaces)

    def _send(self, text: str) -> None:
        self._deltas.append(TextDelta(text, self._index, self._read))
        self._read = ()

    def _read_logprobs(self, before: int, after: int) -> None:
        """Read those of the tokens that end between so many characters back and so many."""
        position = self._source.position
        while self._logprobs and self._logprobs[0][0] <= position - after:
            end, logprobs = self._logprobs.popleft()
            if end > position - before:
                self._read += logprobs
