"""From the bytes of a server's event stream to deltas in the sink, and the usage of the run."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from inference_site.core.domain.deltas import (
    AnswerTokens,
    Delta,
    Finish,
    PromptProgress,
    PromptTokens,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from inference_site.core.domain.errors import ConnectionLost, EngineError, GenerationFailed
from inference_site.core.domain.request import GenerationRequest, TextPart
from worker.engines.base import Sink
from worker.engines.openai_upstream.choices import ChoiceReader
from worker.engines.openai_upstream.errors import UNREADABLE, ErrorReader
from worker.engines.openai_upstream.event_loop import Cancelled
from worker.engines.openai_upstream.server import Server

logger = logging.getLogger(__name__)

DONE = b"[DONE]"

_NOT_IN_ORJSON = re.compile(rb"Infinity|NaN|\\u[dD][89a-fA-F]")
"""What a text may have that Python's module reads and orjson does not."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_IGNORED = (b":", b"id:", b"retry:")
_MAX_LOGGED = 200
_MAX_LINE_BYTES = 16 * 2**20
_MAX_CHARACTERS = 32 * 2**20
"""More than any context holds: the answer of a server that heeds no limit would never end, and
fill the memory of Redis."""
CHARACTERS_PER_TOKEN = 4


class NoEventStream(Exception):
    """A line is not part of an event stream."""


class EventLines:
    """Extracts the data of server-sent events from bytes that come in arbitrary pieces.

    Each ``data:`` line is one event: no server spreads a chunk over several lines.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._is_error = False  # Whether the event that is read has the name ``error``.

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of the events that are complete. Raise NoEventStream."""
        *lines, rest = data.split(b"\n")  # Only the new data: a long line comes in many pieces.
        if lines and self._rest:
            lines[0] = bytes(self._rest + lines[0])
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > _MAX_LINE_BYTES:
            raise NoEventStream(f"a line of more than {_MAX_LINE_BYTES} bytes")
        for each in lines:
            line = each.removeprefix(_BYTE_ORDER_MARK)
            if line.startswith(b"data:"):
                if event := line[5:].strip():  # Some gateways keep a connection alive without data.
                    yield _error_event(event) if self._is_error else event
            elif not line or line.isspace():
                self._is_error = False
            elif line.startswith(b"event:"):
                self._is_error = line[6:].strip() == b"error"
            elif line.startswith(b"error:"):
                yield b'{"error":' + line[6:] + b"}"
            elif not line.startswith(_IGNORED):
                logger.warning("a line of a model's server is no event: %r", line[:_MAX_LOGGED])
                raise NoEventStream("it is no stream of events")


def _error_event(data: bytes) -> bytes:
    """Return the data of an event ``error``, a JSON text or words, with the key ``error``."""
    try:
        told = _read_json(data)
    except (TypeError, ValueError):
        told = data = orjson.dumps(data.decode(errors="replace"))
    if isinstance(told, dict) and told.get("error"):
        return data
    return b'{"error":' + (data if told else b'"an event named error"') + b"}"


def _read_json(text: bytes) -> Any:
    """Return the value of a JSON text. Raise ValueError or TypeError.

    A number that JSON does not have, such as the -Infinity that Python's module writes for the log
    probability of an impossible token, is null. Half a surrogate pair, which UTF-8 cannot encode,
    is a question mark.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        if not _NOT_IN_ORJSON.search(text):
            raise
    try:
        encodable = json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace")
        return orjson.loads(orjson.dumps(json.loads(encodable)))
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc


class ChunkReader:
    """Reads the answer of one run into its sink."""

    def __init__(
        self, request: GenerationRequest, sink: Sink, errors: ErrorReader, server: Server
    ) -> None:
        self.request, self._sink, self._errors = request, sink, errors
        self._flavor = server.flavor
        self._done = False
        self.usage = UsageReader(request)
        self.restart()

    @property
    def cancelled(self) -> bool:
        """Whether to stop reading: the run was cancelled, or its answer is complete."""
        return self._done or self._sink.cancelled

    @property
    def begun(self) -> bool:
        """Whether the sink got a part of the answer; if so, the request cannot be retried."""
        return self.usage.begun

    @property
    def lacks_usage(self) -> bool:
        """Whether the answer has begun, and the server has reported no usage."""
        return self.usage.begun and self.usage.is_estimate

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finished for choice in self._choices)

    def restart(self) -> None:
        """Discard the state of a failed attempt, before the next one."""
        self._choices = [
            ChoiceReader(self.request, index, self._flavor) for index in range(self.request.answers)
        ]
        self._lines, self._size = EventLines(), 0
        self.usage.restart()

    def feed(self, data: bytes) -> None:
        """Take a piece of the stream. Raise Cancelled, or EngineError if it cannot be read."""
        try:
            for event in self._lines.feed(data):
                self._take(event)
                if self._done:  # What follows is no part of the answer.
                    return
        except NoEventStream as exc:
            raise self._unreadable(exc) from exc

    def whole(self, body: bytes) -> None:
        """Take the answer of a server that does not stream."""
        self._take(body)
        self._take(DONE)

    def end(self) -> None:
        """Take the end of the stream. Raise ConnectionLost if it came too early."""
        if self._done:
            return
        self.feed(b"\n")  # The last line may have no line break.
        if not self._done and not self.is_complete:
            raise ConnectionLost("The model's server ended the stream before the answer.")

    def account(self) -> None:
        """Feed the usage to the sink, if there is any."""
        if self.begun or not self.usage.is_estimate:
            self._sink.feed(self.usage.total(is_whole=self.is_complete))

    def _take(self, event: bytes) -> None:
        if self._done:
            return
        if self._sink.cancelled:
            raise Cancelled
        if event == DONE:
            self._done = True
            for choice in self._choices:  # The server may leave out the ends of choices.
                if not choice.finished and choice.begun and self.begun:
                    for delta in choice.finish("stop", {}):
                        self._sink.feed(delta)
            if not self.begun and not self.is_complete:
                raise GenerationFailed("The model's server ended the stream without an answer.")
            if not self.is_complete:  # A server may ignore ``n``.
                sent = sum(choice.finished for choice in self._choices)
                raise GenerationFailed(
                    f"The model's server sent {sent} of {len(self._choices)} answers."
                )
            return
        try:
            chunk = _read_json(event)
            if chunk is None:  # llama.cpp's first event for several prompts.
                chunk = {}
            if error := chunk.get("error") or (chunk.get("object") == "error" and chunk):
                raise self._errors.in_stream(error, self.request)
            deltas = self._deltas(chunk)
        except UNREADABLE as exc:
            raise self._unreadable(exc) from exc
        if self.request.running_usage and self.begun:
            self.account()
        for delta in deltas:
            self._measure(delta)
            self._sink.feed(delta)
        is_cut = any(choice.is_cut for choice in self._choices)
        if is_cut and self.is_complete and not self.usage.awaits_report:
            raise Cancelled  # Closing the connection stops the server.

    def _measure(self, delta: Delta) -> None:
        """Add the length of a delta. Raise GenerationFailed for an answer that is too long."""
        if isinstance(delta, TextDelta | ReasoningDelta):
            self._size += len(delta.text)
        elif isinstance(delta, ToolCallDelta):
            self._size += len(delta.arguments)
        if self._size > _MAX_CHARACTERS:
            raise GenerationFailed(
                f"The model's server sent an answer of more than {_MAX_CHARACTERS} characters."
            )

    def _deltas(self, chunk: dict[str, Any]) -> list[Delta]:
        choices = chunk.get("choices") or ()
        if choices and (usage := choices[0].get("usage")):  # As Moonshot's API has it.
            chunk["usage"] = chunk.get("usage") or usage
        if chunk.get("usage") or "timings" in chunk:
            index = int(choices[0].get("index") or 0) if choices else self.usage.ended_choice()
            # After a cut the server goes on generating: do not count that.
            if index is None or not self._choices[index].is_cut:
                self.usage.take(chunk, index)
        if (verbose := chunk.get("__verbose")) and choices:  # llama.cpp, if there are stop texts.
            choices[0].setdefault("stop_reason", verbose.get("stopping_word"))
            choices[0].setdefault("token_ids", verbose.get("tokens"))
        deltas: list[Delta] = []
        names_prompt = self.request.token_ids and self.request.prompt_logprobs is None
        if names_prompt and (ids := chunk.get("prompt_token_ids")):
            deltas.append(PromptTokens(tuple(ids)))
        if self.request.return_progress and (progress := chunk.get("prompt_progress")):
            fields = ("total", "cache", "processed", "time_ms")
            deltas.append(PromptProgress(*(progress[name] for name in fields)))
        for choice in choices:
            index = int(choice.get("index") or 0)
            reader = self._choices[index]
            if self.request.token_ids:
                if names_prompt and (ids := choice.get("prompt_token_ids")):
                    deltas.append(PromptTokens(tuple(ids), index))
                if ids := choice.get("token_ids"):
                    deltas.append(AnswerTokens(tuple(ids), index))
            if choice_deltas := reader.feed(choice):
                self.usage.count(choice_deltas[0])
                deltas += choice_deltas
            if choice.get("finish_reason"):  # Also of a choice that was cut before.
                self.usage.note_end(index)
        return deltas

    def _unreadable(self, exc: Exception) -> EngineError:
        # The messages of other exceptions may quote the answer.
        reason = str(exc) if isinstance(exc, NoEventStream) else type(exc).__name__
        return GenerationFailed(
            f"The model's server sent an answer that cannot be read ({reason})."
        )


@dataclass(frozen=True, slots=True)
class _TokenCounts:
    input: int
    cached: int
    output: int
    reasoning: int | None
    cache_write: int = 0


@dataclass(frozen=True, slots=True)
class _Times:
    """Prefill and decode times of the server, in milliseconds."""

    prompt: float
    answer: float


class UsageReader:
    """A fold over the chunks of one run that adds up its usage.

    Servers report usage in a separate chunk, in the last chunk of each choice, or in every chunk,
    for the choice of that chunk. A report without a choice is for the whole run; but llama.cpp
    sends one after the end of each choice. If a server reports nothing, each delta counts as
    one token. If it reports no reasoning tokens, they are the output tokens at the last delta of
    the reasoning, or the number of its deltas.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._reported: dict[int | None, _TokenCounts] = {}
        self._times: dict[int | None, _Times] = {}
        self._reasoned: dict[int, int] = {}
        self._ended = set[int]()
        self._pieces = self._reasoning = 0
        self._started = time.monotonic()
        self._first_at: float | None = None

    @property
    def begun(self) -> bool:
        """Whether a delta of the answer has come."""
        return self._first_at is not None

    @property
    def is_estimate(self) -> bool:
        """Whether the server has reported nothing."""
        return not self._reported

    def restart(self) -> None:
        """Discard the reports of a failed attempt, before the next one."""
        self._reported.clear()
        self._times.clear()
        self._reasoned.clear()
        self._ended.clear()
        self._started = time.monotonic()

    def take(self, chunk: dict[str, Any], index: int | None) -> None:
        """Take the report of a chunk. Raise TypeError for malformed counts."""
        usage = chunk.get("usage") or {}
        # Some servers report null: the output is estimated then.
        counts_output = usage.get("completion_tokens") is not None
        if counts_output:
            prompt = usage.get("prompt_tokens_details") or {}
            answer = usage.get("completion_tokens_details") or {}
            reasoning = answer.get("reasoning_tokens")
            # DeepSeek's and Moonshot's API have their own names beside or in place of the details.
            cached = prompt.get("cached_tokens") or usage.get("prompt_cache_hit_tokens")
            self._reported[index] = _TokenCounts(
                int(usage.get("prompt_tokens") or 0),
                int(cached or usage.get("cached_tokens") or 0),
                int(usage["completion_tokens"]),
                None if reasoning is None else int(reasoning),
                int(prompt.get("cache_write_tokens") or 0),
            )
        if timings := chunk.get("timings"):
            cached = timings.get("cache_n", 0)  # Builds before September 2025 lack it.
            prompt, output = cached + timings["prompt_n"], timings["predicted_n"]
            self._times[index] = _Times(timings["prompt_ms"], timings["predicted_ms"])
            if not counts_output:
                self._reported[index] = _TokenCounts(prompt, cached, output, None)

    def note_end(self, index: int) -> None:
        """Note that the server has ended a choice."""
        self._ended.add(index)

    @property
    def awaits_report(self) -> bool:
        """Whether the server has ended a choice, and its report may follow."""
        return bool(self._ended)

    def ended_choice(self) -> int | None:
        """Return the choice that a report without one is for; None for one of the whole run.

        A report of the whole run comes after all choices ended.
        """
        ended, self._ended = self._ended, set()
        return ended.pop() if len(ended) == 1 and self._request.answers > 1 else None

    def count(self, first: Delta) -> None:
        """Count a piece of a choice by its first delta."""
        if self._first_at is None:
            self._first_at = time.monotonic()
        if not isinstance(first, Finish):
            self._pieces += 1
        if isinstance(first, ReasoningDelta):
            self._reasoning += 1
            if counts := self._reported.get(first.index):
                self._reasoned[first.index] = counts.output

    def total(self, *, is_whole: bool) -> Usage:
        """Return the usage of the run; a prompt counts once for all its choices.

        Unless the run ``is_whole``, each piece counts: many servers report usage at the end only.
        So it does where the server reports that an answer with text has no tokens.
        """
        total, times = self._sum(), self._time_spent()
        is_counted = is_whole and (total.output > 0 or self._request.echo)
        output = total.output if is_counted else max(total.output, self._pieces)
        reasoning = total.reasoning
        if reasoning is None:
            reasoning = sum(self._reasoned.values()) if self._reasoned else self._reasoning
        return Usage(
            input_tokens=total.input or estimated_input(self._request),
            cached_tokens=min(total.cached, total.input),
            output_tokens=output,
            reasoning_tokens=min(reasoning, output),
            prefill_ms=times.prompt,
            decode_ms=times.answer,
            cache_write_tokens=min(total.cache_write, total.input),
        )

    def _time_spent(self) -> _Times:
        """Return the server's times, or else the times measured here."""
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
            return _TokenCounts(estimated_input(self._request), 0, self._pieces, None)
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
            sum(counts.cache_write for counts in prompts.values()),
        )


def estimated_input(request: GenerationRequest) -> int:
    """Return about how many tokens the input of a request has: four characters count as one."""
    texts = [len(message.text or "") for message in request.messages]
    texts += [
        len(part.text) for m in request.messages for part in m.parts if isinstance(part, TextPart)
    ]
    texts += [len(prompt) for prompt in request.prompts if isinstance(prompt, str)]
    texts += [len(request.suffix or "")] * len(request.prompts)
    texts += [len(text) for _, text in request.other_files]
    texts += [len(query) for query in request.query_of_each]
    ids = sum(len(prompt) for prompt in request.prompts if isinstance(prompt, tuple))
    return ids + -(-sum(texts) // CHARACTERS_PER_TOKEN)
