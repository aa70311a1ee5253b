"""Deltas → the events of a message, or the whole message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from completions.anthropic.mapping import signature_of
from completions.anthropic.wire import (
    AnswerText,
    AnswerThinking,
    AnswerToolUse,
    InputTokens,
    MessagesAnswer,
    MessagesUsage,
    StopReason,
    Tier,
)
from completions.assemblers.chat import arguments_object
from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from inference_site.core.domain.errors import Cancelled
from inference_site.core.errors.exceptions import api_error
from inference_site.runs.kinds import Assembler, PromptCountAssembler, cancelled, error_ending
from inference_site.runs.streams.batches import Ending, Sent
from inference_site.runs.streams.request_documents import Assembly

MESSAGE, INPUT_TOKENS = "message", "message.input_tokens"
"""Names of these kinds of generations."""

_STOP_REASONS: dict[str, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


@dataclass(frozen=True)
class MessageAssembly(Assembly):
    """How a message is written for its client."""

    message_id: str
    model: str
    project_id: int
    stream: bool = False
    service_tier: Tier = "standard"


class _Block:
    """One block of the message: its type, its text so far, and the id and name of a call."""

    def __init__(self, kind: str, call: int = -1, call_id: str = "", name: str = "") -> None:
        self.kind, self.call, self.call_id, self.name = kind, call, call_id, name
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class MessageAssembler(Assembler):
    """Assembles one message (see ``runs.kinds.Assembler``)."""

    def __init__(self, assembly: MessageAssembly) -> None:
        self._assembly = assembly
        self._blocks: list[_Block] = []
        self._usage = Usage()
        self._end: Finish | None = None
        self._begun = False

    def recover(self, sent: Sent) -> None:
        """Continue after the sent frames; only the number of their deltas is needed."""
        self._begun = bool(sent.frames)
        self.pieces = sum(frame.startswith(b"event: content_block_delta") for frame in sent.frames)

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the events it makes."""
        match delta:
            case TextDelta(text) | RefusalDelta(text) if text:
                return self._piece("text", text, "text_delta", "text")
            case ReasoningDelta(text):
                return self._piece("thinking", text, "thinking_delta", "thinking")
            case ToolCallDelta(call, arguments):
                return self._call_piece(delta, call, arguments)
            case Finish():
                self._end = delta
            case Usage():
                self._usage = delta
        return ()

    def complete(self) -> Ending:
        """End with the reason and the counts."""
        reason = self._stop_reason or "end_turn"
        if not self._assembly.stream:
            body = orjson.dumps(self._message().model_dump())
            return Ending([], 200, body, finish_reason=reason)
        ended = {"stop_reason": reason, "stop_sequence": self._stop_sequence}
        usage = wire_usage(self._usage, self._assembly.service_tier).model_dump()
        frames = [
            *self._start(),
            *self._close(),
            _event("message_delta", delta=ended, usage=usage),
            _event("message_stop"),
        ]
        return Ending(frames, 200, b"", finish_reason=reason)

    def cancel(self) -> Ending:
        """End because it was stopped."""
        return cancelled(failure(Cancelled()))

    def fail(self, error: Exception) -> Ending:
        """End with the error."""
        return replace(failure(error), is_early=not self._begun)

    def _piece(self, kind: str, text: str, delta_type: str, field: str) -> Sequence[bytes]:
        """Add a piece of text or of thoughts to the block that is open, or to a new one."""
        frames = []
        if not self._blocks or self._blocks[-1].kind != kind:
            frames += self._open(_Block(kind))
        self._blocks[-1].pieces.append(text)
        frames.append(self._delta({"type": delta_type, field: text}))
        return frames if self._assembly.stream else ()

    def _call_piece(self, delta: ToolCallDelta, call: int, arguments: str) -> Sequence[bytes]:
        frames = []
        if delta.id is not None and delta.name is not None:
            frames += self._open(_Block("tool_use", call, delta.id, delta.name))
        block = next(block for block in reversed(self._blocks) if block.call == call)
        block.pieces.append(arguments)
        if arguments:
            frames.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return frames if self._assembly.stream else ()

    def _start(self) -> list[bytes]:
        """Return the events that a stream begins with, once."""
        if self._begun or not self._assembly.stream:
            return []
        self._begun = True
        message = self._message().model_dump()
        message |= {"content": [], "stop_reason": None, "stop_sequence": None}
        message["usage"]["output_tokens"] = 0
        return [_event("message_start", message=message), _PING]

    def _open(self, block: _Block) -> list[bytes]:
        """Begin a block, after the one that was open."""
        frames = [*self._start(), *self._close()]
        self._blocks.append(block)
        shown: dict[str, Any] = {"type": block.kind}
        match block.kind:
            case "text":
                shown["text"] = ""
            case "thinking":
                shown |= {"thinking": "", "signature": ""}
            case _:
                shown |= {"id": block.call_id, "name": block.name, "input": {}}
        index = len(self._blocks) - 1
        return [*frames, _event("content_block_start", index=index, content_block=shown)]

    def _close(self) -> Iterator[bytes]:
        """Yield the events that end the block that is open."""
        if not self._blocks:
            return
        block = self._blocks[-1]
        if block.kind == "thinking":
            signature = signature_of(block.text, self._assembly.project_id)
            yield self._delta({"type": "signature_delta", "signature": signature})
        yield _event("content_block_stop", index=len(self._blocks) - 1)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    @property
    def _stop_sequence(self) -> str | None:
        stop = self._end.stop if self._end is not None else None
        return stop if isinstance(stop, str) else None

    @property
    def _stop_reason(self) -> StopReason | None:
        if self._end is None:
            return None
        return "stop_sequence" if self._stop_sequence else _STOP_REASONS[self._end.reason]

    def _message(self) -> MessagesAnswer:
        return MessagesAnswer(
            id=self._assembly.message_id,
            model=self._assembly.model,
            content=[self._wire(block) for block in self._blocks],
            stop_reason=self._stop_reason,
            stop_sequence=self._stop_sequence,
            usage=wire_usage(self._usage, self._assembly.service_tier),
        )

    def _wire(self, block: _Block) -> AnswerText | AnswerThinking | AnswerToolUse:
        match block.kind:
            case "text":
                return AnswerText(text=block.text)
            case "thinking":
                signature = signature_of(block.text, self._assembly.project_id)
                return AnswerThinking(thinking=block.text, signature=signature)
            case _:
                return AnswerToolUse(
                    id=block.call_id, name=block.name, input=arguments_object(block.text)
                )


def wire_usage(usage: Usage, tier: Tier) -> MessagesUsage:
    """Return the counts; ``input_tokens`` excludes the cached ones."""
    return MessagesUsage(
        input_tokens=usage.input_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
        service_tier=tier,
    )


def failure(error: Exception, *, first: int = 0) -> Ending:
    """End with an error in Anthropic's envelope; its events have no numbers."""
    answer = api_error(error)
    body = orjson.dumps(answer.shown_at("/v1/messages"))
    return error_ending(answer, body, [b"event: error\ndata: " + body + b"\n\n"])


class InputTokensAssembler(PromptCountAssembler):
    """Assembles the answer of ``POST /v1/messages/count_tokens``."""

    def answer(self) -> dict[str, Any]:
        """Return the count."""
        return InputTokens(input_tokens=self.count).model_dump()

    def fail(self, error: Exception) -> Ending:
        """End with the error."""
        return failure(error)


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))
