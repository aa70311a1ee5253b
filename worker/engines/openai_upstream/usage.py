"""Token counts of a run, as its server reports them, also of a run that is stopped early."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from inference_site.domain.deltas import Delta, Finish, ReasoningDelta, Usage
from inference_site.domain.messages import TextPart
from inference_site.domain.request import GenerationRequest

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
