"""What the frames of a stream were made of, once the worker that has sent them is gone.

Log probabilities are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from inference_site.domain.deltas import Delta, Finish, ReasoningDelta, TextDelta, ToolCallDelta

_DATA = b"data: {"


def chat_deltas(frames: Sequence[bytes]) -> Iterator[Delta]:
    """Yield the deltas of the chunks of a chat completion."""
    for choice in choices_of(frames):
        delta, index = choice["delta"], choice["index"]
        if text := delta.get("content"):
            yield TextDelta(text, index)
        if text := delta.get("reasoning_content"):
            yield ReasoningDelta(text, index)
        for call in delta.get("tool_calls") or ():
            yield _call(call, index)
        if called := delta.get("function_call"):
            call_id = "call" if "name" in called else None
            yield ToolCallDelta(0, called["arguments"], call_id, called.get("name"), index)
        if reason := choice["finish_reason"]:
            ended: Any = "tool_calls" if reason == "function_call" else reason
            yield Finish(ended, index, choice.get("stop_str"))


def _call(call: dict[str, Any], index: int) -> ToolCallDelta:
    is_custom = "custom" in call
    called = call["custom" if is_custom else "function"]
    text = called["input" if is_custom else "arguments"]
    return ToolCallDelta(
        call["index"], text, call.get("id"), called.get("name"), index, is_custom=is_custom
    )


def choices_of(frames: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the choices of the chunks of a completion of either kind."""
    for frame in frames:
        if frame.startswith(_DATA):
            yield from orjson.loads(frame[len(_DATA) - 1 :]).get("choices", ())
