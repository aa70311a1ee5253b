"""Tokens of a run, as the server tells them, so that a run stopped at any point is accounted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from inference_site.domain.deltas import Delta, Finish, ReasoningDelta, Usage
from inference_site.domain.messages import TextPart
from inference_site.domain.request import GenerationRequest

_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class _Told:
    input: int
    cached: int
    output: int
    reasoning: int | None


class Counts:
    """A fold over the chunks of one run.

    Servers tell usage in a chunk of its own, in the last one of each choice, or, while they run, in
    every chunk, for the choice that the chunk is of. A count without a choice is that of the whole
    run. When nothing is told, each piece counts as one token.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._told: dict[int | None, _Told] = {}
        self._pieces = self._reasoning = 0
        self._started = time.monotonic()
        self._first_at: float | None = None

    @property
    def begun(self) -> bool:
        """Whether anything of the answer has come."""
        return self._first_at is not None

    @property
    def is_estimate(self) -> bool:
        """Whether the server told nothing."""
        return not self._told

    def restart(self) -> None:
        """Begin anew, with another attempt."""
        self._told.clear()
        self._started = time.monotonic()

    def take(self, chunk: dict[str, Any], index: int | None) -> None:
        """Note what a chunk tells. Raise TypeError for counts that are none."""
        if usage := chunk.get("usage"):
            prompt = usage.get("prompt_tokens_details") or {}
            answer = usage.get("completion_tokens_details") or {}
            self._told[index] = _Told(
                int(usage.get("prompt_tokens") or 0),
                int(prompt.get("cached_tokens") or 0),
                int(usage.get("completion_tokens") or 0),
                answer.get("reasoning_tokens"),
            )
        elif timings := chunk.get("timings"):
            cached = timings["cache_n"]
            told = _Told(cached + timings["prompt_n"], cached, timings["predicted_n"], None)
            self._told[index] = told

    def count(self, first: Delta) -> None:
        """Note a piece of a choice by the first delta that it came to."""
        if self._first_at is None:
            self._first_at = time.monotonic()
        if not isinstance(first, Finish):
            self._pieces += 1
            self._reasoning += isinstance(first, ReasoningDelta)

    def usage(self) -> Usage:
        """Return the sum; a prompt, which its choices share, counts once."""
        now = time.monotonic()
        first = self._first_at or now
        told = self._sum()
        reasoning = self._reasoning if told.reasoning is None else told.reasoning
        return Usage(
            input_tokens=told.input,
            cached_tokens=min(told.cached, told.input),
            output_tokens=told.output,
            reasoning_tokens=min(reasoning, told.output),
            prefill_ms=(first - self._started) * 1000,
            decode_ms=(now - first) * 1000,
        )

    def _sum(self) -> _Told:
        if not self._told:
            return _Told(_estimated_input(self._request), 0, self._pieces, None)
        if None in self._told:
            return self._told[None]
        prompts: dict[int, _Told] = {}
        for index, told in sorted((i or 0, told) for i, told in self._told.items()):
            prompts.setdefault(index // self._request.choices, told)
        reasoning = [told.reasoning for told in self._told.values() if told.reasoning is not None]
        return _Told(
            sum(told.input for told in prompts.values()),
            sum(told.cached for told in prompts.values()),
            sum(told.output for told in self._told.values()),
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
