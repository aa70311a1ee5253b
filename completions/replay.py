"""A stored chat completion as its client was to get it, once its event log is lost or has expired.

The completion and how it was cut into deltas give the deltas that the assembler took, and the same
assembler makes the same frames of them, with the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import orjson

from completions.assemblers.chat import ChatAssembler, ChatAssembly
from completions.models import StoredCompletion
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
from inference_site.generations.models import Generation
from inference_site.streams.batches import Batch, Ending, StoredStream

_LEFT_OUT = b": left out\n\n"
_FRAME_BYTES = 300
"""Bytes of a chunk beside its text."""


def replay_of(public_id: str, *, is_begun: bool = False) -> StoredStream | None:
    """Return how, by the completion's id; None when it is not stored, or was deleted.

    Also None for a stream of which it is unknown how it was cut.
    """
    del is_begun  # Its frames have the numbers that they had.
    stored = StoredCompletion.objects.filter(public_id=public_id).first()
    if stored is None:
        return None
    if stored.streamed is None and _was_streamed(public_id):
        return None
    deltas = sum(len(run[2]) for run in (stored.streamed or {}).get("deltas", ()))
    size = 2 * len(str(stored.completion)) + _FRAME_BYTES * deltas
    return StoredStream(size, partial(replay, stored))


def _was_streamed(public_id: str) -> bool:
    return Generation.objects.filter(public_id=public_id, streamed=True).exists()


def replay(stored: StoredCompletion) -> list[Batch]:
    """Return the whole stream. What reported the progress of the prompt is left out: a comment
    stands for each of these chunks."""
    body = orjson.dumps(stored.completion)
    if stored.streamed is None:
        return [Batch(0, (), Ending((), 200, body))]
    assembler = ChatAssembler(_assembly(stored.completion, stored.streamed))
    frames: list[bytes] = []
    for delta in _deltas(stored.completion["choices"], stored.streamed["deltas"]):
        frames += [_LEFT_OUT] if delta is None else assembler.feed(delta)
    assembler.feed(_usage(stored.completion))
    frames += assembler.complete().frames
    return [Batch(0, frames, Ending((), 200, body))]


def _assembly(completion: dict[str, Any], streamed: dict[str, Any]) -> ChatAssembly:
    choices = completion["choices"]
    return ChatAssembly(
        completion["id"],
        completion["created"],
        completion["model"],
        stream=True,
        include_usage=streamed["usage"],
        choices=len(choices),
        logprobs=any(choice["logprobs"] is not None for choice in choices),
        is_legacy=streamed["legacy"],
        service_tier=completion["service_tier"],
        timings="timings" in completion,
    )


def _usage(completion: dict[str, Any]) -> Usage:
    usage, timings = completion["usage"], completion.get("timings", {})
    return Usage(
        input_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        reasoning_tokens=usage["completion_tokens_details"]["reasoning_tokens"],
        prefill_ms=timings.get("prompt_ms", 0.0),
        decode_ms=timings.get("predicted_ms", 0.0),
    )


class _Choice:
    """Gives the parts of a stored choice piece by piece."""

    def __init__(self, choice: dict[str, Any]) -> None:
        self.index: int = choice["index"]
        message = choice["message"]
        self._texts: dict[str, str] = {
            "text": message["content"] or "",
            "reasoning": message.get("reasoning_content") or "",
        }
        self._calls: list[dict[str, Any]] = message.get("tool_calls") or []
        if legacy := message.get("function_call"):
            self._calls = [{"id": "call", "type": "function", "function": legacy}]
        for number, call in enumerate(self._calls):
            called = call[call["type"]]
            text = called["input"] if call["type"] == "custom" else called["arguments"]
            self._texts[f"call {number}"] = text
        self._logprobs = list((choice["logprobs"] or {}).get("content") or ())
        self._finish, self._stop = choice["finish_reason"], choice.get("stop_str")

    def deltas(self, sort: str, sizes: Sequence[int], counts: Sequence[int]) -> Iterator[Delta]:
        """Yield the deltas of a run (see ``Recording``)."""
        if sort == "finish":
            reason: FinishReason = "tool_calls" if self._finish == "function_call" else self._finish
            yield Finish(reason, self.index, self._stop)
            return
        name, _, number = sort.partition(" ")
        source = f"call {number}" if number else name
        for place, size in enumerate(sizes):
            text, self._texts[source] = self._texts[source][:size], self._texts[source][size:]
            if name == "text":
                count = counts[place] if counts else 0
                taken, self._logprobs = self._logprobs[:count], self._logprobs[count:]
                yield TextDelta(text, self.index, tuple(map(_logprob, taken)))
            elif name == "reasoning":
                yield ReasoningDelta(text, self.index)
            else:
                yield self._call(int(number), text, is_first=name == "call")

    def _call(self, number: int, text: str, *, is_first: bool) -> ToolCallDelta:
        call = self._calls[number]
        is_custom = call["type"] == "custom"
        if not is_first:
            return ToolCallDelta(number, text, index=self.index, is_custom=is_custom)
        name = call[call["type"]]["name"]
        return ToolCallDelta(number, text, call["id"], name, self.index, is_custom)


def _deltas(
    choices: Sequence[dict[str, Any]], runs: Sequence[Sequence[Any]]
) -> Iterator[Delta | None]:
    """Yield the deltas in their order; None for one that is not stored."""
    parts = [_Choice(choice) for choice in choices]
    for sort, index, sizes, *counts in runs:
        if sort == "progress":
            yield from [None] * len(sizes)
        else:
            yield from parts[index].deltas(sort, sizes, counts[0] if counts else ())


def _logprob(entry: dict[str, Any]) -> TokenLogprob:
    top = tuple(map(_logprob, entry.get("top_logprobs", ())))
    return TokenLogprob(entry["token"], entry["logprob"], bytes(entry["bytes"]), top)
