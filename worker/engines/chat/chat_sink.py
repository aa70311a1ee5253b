"""Where a completion puts its deltas when it is a chat: they are parsed on the way to the sink."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from inference_site.domain.deltas import (
    Delta,
    Finish,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from inference_site.domain.request import GenerationRequest
from worker.engines.base import Sink
from worker.engines.chat.forced_call import forced_reader


class ChoiceParser(Protocol):
    """Parses one choice (see ``worker.engines.chat.parser.OutputParser``)."""

    @property
    def in_reasoning(self) -> bool: ...

    @property
    def calls(self) -> int: ...

    @property
    def call_is_open(self) -> bool: ...

    @property
    def is_holding(self) -> bool: ...

    def feed(
        self, text: str, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> Sequence[TextDelta | ReasoningDelta | ToolCallDelta]: ...

    def finish(self) -> Sequence[TextDelta | ReasoningDelta | ToolCallDelta]: ...


class ForcedCallParser:
    """Parses a choice that is bound to be one call."""

    in_reasoning = is_holding = False

    def __init__(self, request: GenerationRequest, index: int) -> None:
        self._call = forced_reader(request, index)
        self.calls = 1

    @property
    def call_is_open(self) -> bool:
        """Whether the call is not complete, as it is from the beginning."""
        return not self._call.is_complete

    def feed(self, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> list[ToolCallDelta]:
        """Take the next piece of text; return the pieces of the call it completes."""
        return self._call.feed(text)

    def finish(self) -> list[ToolCallDelta]:
        """Nothing is held back that would be a piece of a call."""
        return []


class ChatUsage:
    """Tokens over the completions that make up one chat.

    A later completion goes on from the text of the one before, so its prompt is none of the chat.
    """

    def __init__(self) -> None:
        self.reasoning = 0
        self._done = Usage()
        self._running: Usage | None = None

    def take(self, usage: Usage) -> Usage:
        """Take what the completion that runs has used so far; return what the chat has."""
        self._running = usage
        return self.total()

    def go_on(self) -> None:
        """Begin the next completion."""
        self._done, self._running = self.total(), None

    def total(self) -> Usage:
        """Return what the chat has used so far."""
        done, running = self._done, self._running or Usage()
        is_first = done.input_tokens == 0
        output = done.output_tokens + running.output_tokens
        return Usage(
            running.input_tokens if is_first else done.input_tokens,
            running.cached_tokens if is_first else done.cached_tokens,
            output,
            min(self.reasoning, output),
            done.prefill_ms + running.prefill_ms,
            done.decode_ms + running.decode_ms,
        )


class ChatSink:
    """Parses the choices of a completion, and says how they end.

    A piece of text counts as one token, or as many as it has log probabilities. ``own_stop`` are
    stop texts that the request does not know of. When ``budget`` tokens of reasoning have come, the
    completion is stopped, and ``is_over_budget``; ``text`` is then what has come of it.
    """

    def __init__(
        self,
        sink: Sink,
        parsers: Sequence[ChoiceParser],
        usage: ChatUsage,
        own_stop: Collection[str] = (),
        budget: int | None = None,
    ) -> None:
        self._sink, self._parsers, self._usage = sink, parsers, usage
        self._own_stop, self._budget = own_stop, budget
        self._pieces: list[str] = []
        self.is_over_budget = budget == 0 and parsers[0].in_reasoning

    @property
    def cancelled(self) -> bool:
        """Whether the completion must stop now."""
        return self.is_over_budget or self._sink.cancelled

    @property
    def text(self) -> str:
        """What has come, tags included; only kept with a budget."""
        return "".join(self._pieces)

    def feed(self, delta: Delta) -> None:
        """Take the completion's next delta."""
        match delta:
            case TextDelta(text, index, logprobs):
                if not self.is_over_budget:
                    self._text(self._parsers[index], text, logprobs)
            case Finish():
                if not self.is_over_budget:
                    self._finish(delta)
            case Usage():
                self._sink.feed(self._usage.take(delta))
            case _:
                self._sink.feed(delta)

    def _text(self, parser: ChoiceParser, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        if parser.in_reasoning:
            self._usage.reasoning += len(logprobs) or 1
        for piece in parser.feed(text, logprobs):
            self._sink.feed(piece)
        if self._budget is not None:
            self._pieces.append(text)
            # What may be the end tag is waited for.
            is_thinking = parser.in_reasoning and not parser.is_holding
            self.is_over_budget = is_thinking and self._usage.reasoning >= self._budget

    def _finish(self, finish: Finish) -> None:
        parser = self._parsers[finish.index]
        for piece in parser.finish():
            self._sink.feed(piece)
        stop = None if finish.stop in self._own_stop else finish.stop
        self._sink.feed(replace(finish, reason=_reason(finish.reason, parser), stop=stop))


def _reason(reason: FinishReason, parser: ChoiceParser) -> FinishReason:
    """Return why a choice ended. A call that is cut off was not made, whatever cut it."""
    if reason == "length" or parser.call_is_open:
        return "length"
    return "tool_calls" if parser.calls else "stop"
