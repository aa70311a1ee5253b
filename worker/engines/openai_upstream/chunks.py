"""From the bytes of a stream to deltas in the sink."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from inference_site.domain.deltas import (
    AnswerTokens,
    Delta,
    Finish,
    PromptProgress,
    PromptTokens,
    ReasoningDelta,
    Usage,
)
from inference_site.domain.errors import ConnectionLost, EngineError, GenerationFailed
from inference_site.domain.messages import TextPart
from inference_site.domain.request import GenerationRequest
from worker.engines.base import Sink
from worker.engines.openai_upstream.choices import ChoiceReader
from worker.engines.openai_upstream.errors import ErrorReader
from worker.engines.openai_upstream.event_loop import Cancelled
from worker.engines.openai_upstream.server import Server

logger = logging.getLogger(__name__)

DONE = b"[DONE]"

_IGNORED = (b":", b"event:", b"id:", b"retry:")
_SHOWN = 200
_LONGEST_LINE = 16 * 2**20
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class NoEventStream(Exception):
    """A line is not part of an event stream."""


class EventLines:
    """Cuts the bytes of server-sent events, which come in pieces cut anywhere, into their data.

    Of OpenAI's streams only the lines of ``data:`` matter. Each is an event of its own: no server
    spreads a chunk over several.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of the events that are whole by now. Raise NoEventStream."""
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _LONGEST_LINE:
            raise NoEventStream(f"a line of more than {_LONGEST_LINE} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
            elif line and not line.isspace():
                yield from self._other(line)

    def _other(self, line: bytes) -> Iterator[bytes]:
        if line.startswith(b"error:"):
            yield b'{"error":' + line[6:] + b"}"
        elif not line.startswith(_IGNORED):
            logger.warning("a line of a model's server is no event: %r", line[:_SHOWN])
            raise NoEventStream("it is no stream of events")


class ChunkReader:
    """Reads the answer of one run; is what the event loop watches meanwhile."""

    def __init__(
        self, request: GenerationRequest, sink: Sink, errors: ErrorReader, server: Server
    ) -> None:
        self.request, self._sink, self._errors = request, sink, errors
        self._by_schema = server.flavor.forces_by_schema
        self._cuts = server.flavor.names_tokens and bool(request.stop_token_ids)
        self._ends_after_stop = server.flavor.ends_after_stop
        self._done = False
        self.usage = UsageReader(request)
        self.restart()

    @property
    def cancelled(self) -> bool:
        """Whether nothing more is wanted: the run was cancelled, or its answer is complete."""
        return self._done or self._sink.cancelled

    @property
    def begun(self) -> bool:
        """Whether a part of the answer was passed on: what fails now cannot be tried again."""
        return self.usage.begun

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finished for choice in self._choices)

    def restart(self) -> None:
        """Begin anew, with another attempt."""
        indices = range(self.request.answers)
        self._choices = [
            ChoiceReader(self.request, i, self._by_schema, self._cuts, self._ends_after_stop)
            for i in indices
        ]
        self._lines = EventLines()
        self.usage.restart()

    def feed(self, data: bytes) -> None:
        """Take a piece of the stream. Raise Cancelled, or EngineError for what is no answer."""
        try:
            for event in self._lines.feed(data):
                self._take(event)
        except NoEventStream as exc:
            raise self._unreadable(exc) from exc

    def whole(self, body: bytes) -> None:
        """Take the answer of a server that does not stream."""
        self._take(body)
        self._take(DONE)

    def end(self) -> None:
        """Take the end of the stream. Raise ConnectionLost for one that is cut off."""
        if self._done:
            return
        self.feed(b"\n")  # Ends a last line that nothing ends.
        if not self._done and not self.is_complete:
            raise ConnectionLost("The model's server ended the stream before the answer.")

    def account(self) -> None:
        """Tell what was used, if anything was."""
        if self.begun or not self.usage.is_estimate:
            self._sink.feed(self.usage.total())

    def _take(self, event: bytes) -> None:
        if self._done:
            return
        if self._sink.cancelled:
            raise Cancelled
        if event == DONE:
            self._done = True
            self._finish()
            return
        deltas = self._read(event)
        if self.request.running_usage and self.begun:
            self.account()
        for delta in deltas:
            self._sink.feed(delta)
        if self._cuts and all(choice.is_cut for choice in self._choices):
            raise Cancelled  # The server does not know that this is the end.

    def _finish(self) -> None:
        """End the choices that the server did not: it says that it is done."""
        for choice in self._choices:
            if not choice.finished and self.begun:
                for delta in choice.finish("stop", {}):
                    self._sink.feed(delta)
        if not self.is_complete:
            raise GenerationFailed("The model's server ended the stream without an answer.")

    def _read(self, event: bytes) -> list[Delta]:
        """Return what an event comes to. Raise EngineError."""
        try:
            chunk = orjson.loads(event)
            if chunk is None:  # What llama.cpp begins completions of several prompts with.
                return []
            if error := chunk.get("error"):
                raise self._errors.in_stream(error, self.request)
            return self._deltas(chunk)
        except _UNREADABLE as exc:
            raise self._unreadable(exc) from exc

    def _deltas(self, chunk: dict[str, Any]) -> list[Delta]:
        choices = chunk.get("choices") or ()
        if chunk.get("usage") or "timings" in chunk:
            self._note_usage(chunk, choices[0].get("index", 0) if choices else None)
        if (verbose := chunk.get("__verbose")) and choices:  # llama.cpp, when there are stops.
            choices[0].setdefault("stop_reason", verbose.get("stopping_word"))
            choices[0].setdefault("token_ids", verbose.get("tokens"))
        deltas: list[Delta] = []
        names_prompt = self.request.token_ids and self.request.prompt_logprobs is None
        if names_prompt and (ids := chunk.get("prompt_token_ids")):
            deltas.append(PromptTokens(tuple(ids)))
        if self.request.return_progress and (progress := chunk.get("prompt_progress")):
            read = (progress[name] for name in ("total", "cache", "processed", "time_ms"))
            deltas.append(PromptProgress(*read))
        for choice in choices:
            index = choice.get("index") or 0
            reader = self._choices[index]
            if self.request.token_ids:
                if names_prompt and (ids := choice.get("prompt_token_ids")):
                    deltas.append(PromptTokens(tuple(ids), index))
                if ids := choice.get("token_ids"):
                    deltas.append(AnswerTokens(tuple(ids), index))
            if found := reader.feed(choice):
                self.usage.count(found[0])
                deltas += found
                if reader.finished:
                    self.usage.note_end(index)
        return deltas

    def _note_usage(self, chunk: dict[str, Any], index: int | None) -> None:
        """Note what a chunk reports, but for what comes behind the end of a choice that was cut."""
        if index is None or not self._choices[index].is_cut:
            self.usage.take(chunk, index)

    def _unreadable(self, exc: Exception) -> EngineError:
        # The words of other errors may repeat the answer.
        reason = str(exc) if isinstance(exc, NoEventStream) else type(exc).__name__
        return GenerationFailed(
            f"The model's server sent an answer that cannot be read ({reason})."
        )


_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class _TokenCounts:
    input: int
    cached: int
    output: int
    reasoning: int | None


@dataclass(frozen=True, slots=True)
class _Times:
    """How long the server has worked, in milliseconds."""

    prompt: float
    answer: float


class UsageReader:
    """A fold over the chunks of one run.

    Servers report usage in a chunk of its own, in the last one of each choice, or, while they run,
    in every chunk, for the choice that the chunk is of. A report without a choice is that of the
    whole run, but llama.cpp sends one behind the end of each choice. When a server reports nothing,
    each piece counts as one token. Where it tells no reasoning tokens, those are what was reported
    with the last piece of the reasoning, else as many as there were pieces.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._reported: dict[int | None, _TokenCounts] = {}
        self._times: dict[int | None, _Times] = {}
        self._reasoned: dict[int, int] = {}
        self._ended: list[int] = []
        self._pieces = self._reasoning = 0
        self._started = time.monotonic()
        self._first_at: float | None = None

    @property
    def begun(self) -> bool:
        """Whether anything of the answer has come."""
        return self._first_at is not None

    @property
    def is_estimate(self) -> bool:
        """Whether the server has reported nothing."""
        return not self._reported

    def restart(self) -> None:
        """Begin anew, with another attempt."""
        self._reported.clear()
        self._times.clear()
        self._reasoned.clear()
        self._ended.clear()
        self._started = time.monotonic()

    def take(self, chunk: dict[str, Any], index: int | None) -> None:
        """Note what a chunk reports. Raise TypeError for counts that are none."""
        if index is None and self._request.answers > 1:
            if len(self._ended) == 1:  # Before a report of the run, more would have ended.
                [index] = self._ended
            self._ended.clear()
        if usage := chunk.get("usage"):
            prompt = usage.get("prompt_tokens_details") or {}
            answer = usage.get("completion_tokens_details") or {}
            self._reported[index] = _TokenCounts(
                int(usage.get("prompt_tokens") or 0),
                int(prompt.get("cached_tokens") or 0),
                int(usage.get("completion_tokens") or 0),
                answer.get("reasoning_tokens"),
            )
        if timings := chunk.get("timings"):
            cached = timings["cache_n"]
            prompt, output = cached + timings["prompt_n"], timings["predicted_n"]
            self._times[index] = _Times(timings["prompt_ms"], timings["predicted_ms"])
            if not usage:
                self._reported[index] = _TokenCounts(prompt, cached, output, None)

    def note_end(self, index: int) -> None:
        """Note that a choice has ended."""
        self._ended.append(index)

    def count(self, first: Delta) -> None:
        """Note a piece of a choice by the first delta that it came to."""
        if self._first_at is None:
            self._first_at = time.monotonic()
        if not isinstance(first, Finish):
            self._pieces += 1
        if isinstance(first, ReasoningDelta):
            self._reasoning += 1
            if counts := self._reported.get(first.index):
                self._reasoned[first.index] = counts.output

    def total(self) -> Usage:
        """Return the sum; a prompt, which its choices share, counts once."""
        total, times = self._sum(), self._time_spent()
        reasoning = total.reasoning
        if reasoning is None:
            reasoning = sum(self._reasoned.values()) if self._reasoned else self._reasoning
        return Usage(
            input_tokens=total.input,
            cached_tokens=min(total.cached, total.input),
            output_tokens=total.output,
            reasoning_tokens=min(reasoning, total.output),
            prefill_ms=times.prompt,
            decode_ms=times.answer,
        )

    def _time_spent(self) -> _Times:
        """Return what the server says; without that, what has passed until and since its answer."""
        if not self._times:
            now = time.monotonic()
            first = self._first_at or now
            return _Times((first - self._started) * 1000, (now - first) * 1000)
        if None in self._times:
            return self._times[None]
        prompts: dict[int, float] = {}
        for index, times in sorted((i or 0, times) for i, times in self._times.items()):
            prompts.setdefault(index // self._request.choices, times.prompt)
        return _Times(sum(prompts.values()), max(times.answer for times in self._times.values()))

    def _sum(self) -> _TokenCounts:
        if not self._reported:
            return _TokenCounts(_estimated_input(self._request), 0, self._pieces, None)
        if None in self._reported:
            return self._reported[None]
        prompts: dict[int, _TokenCounts] = {}
        for index, counts in sorted((i or 0, counts) for i, counts in self._reported.items()):
            prompts.setdefault(index // self._request.choices, counts)
        reasoning = [
            counts.reasoning for counts in self._reported.values() if counts.reasoning is not None
        ]
        return _TokenCounts(
            sum(counts.input for counts in prompts.values()),
            sum(counts.cached for counts in prompts.values()),
            sum(counts.output for counts in self._reported.values()),
            sum(reasoning) if reasoning else None,
        )


def _estimated_input(request: GenerationRequest) -> int:
    texts = [len(message.text or "") for message in request.messages]
    texts += [
        len(part.text) for m in request.messages for part in m.parts if isinstance(part, TextPart)
    ]
    texts += [len(prompt) for prompt in request.prompts if isinstance(prompt, str)]
    ids = sum(len(prompt) for prompt in request.prompts if isinstance(prompt, tuple))
    return ids + -(-sum(texts) // _CHARACTERS_PER_TOKEN)
