"""Deltas → the events of a message, or the whole message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from completions.anthropic.mapping import client_field, signature_of
from completions.anthropic.server_tools import SiteFunction
from completions.anthropic.wire import (
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
from inference_site.core.domain.site_tools import WebResult
from inference_site.core.errors.exceptions import api_error
from inference_site.core.storage.cipher import seal
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
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
"""The event that Anthropic's API sends after the first event, and in long pauses."""


@dataclass(frozen=True)
class MessageAssembly(Assembly):
    """How a message is written for its client.

    ``routes`` lead from the names of functions to tools of the site, and ``unlisted`` are the
    places of the MCP servers whose tools must be listed first. ``results`` are the results of web
    searches in earlier messages; citations number them from 1. ``shows_listings``: the answer has
    blocks of the type ``mcp_tool_listing``. ``hides_thinking``: thoughts are sealed in the
    signatures of their blocks. ``names`` are the client's names of tools whose names are too long
    for the model, by the shorter ones that it calls. ``has_content``: false if the request only
    reads the prompt into the cache.
    """

    message_id: str
    model: str
    project_id: int
    stream: bool = False
    service_tier: Tier = "standard"
    routes: dict[str, SiteFunction] = field(default_factory=dict)
    unlisted: list[int] = field(default_factory=list)
    max_searches: int | None = None
    results: list[WebResult] = field(default_factory=list)
    shows_listings: bool = False
    hides_thinking: bool = False
    names: dict[str, str] = field(default_factory=dict)
    has_content: bool = True


class Block:
    """One block of the message: its type, its text so far, and its other fields.

    ``call`` is the place of a call in its turn.
    """

    def __init__(self, kind: str, call: int = -1, **fields: Any) -> None:
        self.kind, self.call, self.fields = kind, call, fields
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text, the thoughts, or the arguments of a call."""
        return "".join(self.pieces)

    @property
    def is_call(self) -> bool:
        """Whether its text is the arguments of a call."""
        return self.kind.endswith("_use")

    def begun(self) -> dict[str, Any]:
        """Return the block as it begins."""
        begun = {"type": self.kind, **self.fields}
        match self.kind:
            case "text":
                return {**begun, "text": ""}
            case "thinking":
                return {**begun, "thinking": "", "signature": ""}
        return {**begun, "input": {}} if self.is_call else begun

    def whole(self) -> dict[str, Any]:
        """Return the block with all of its text."""
        whole = {"type": self.kind, **self.fields}
        if self.kind in ("text", "thinking"):
            return {**whole, self.kind: self.text}
        return {**whole, "input": arguments_object(self.text)} if self.is_call else whole


class MessageAssembler(Assembler):
    """Assembles one message (see ``runs.kinds.Assembler``)."""

    def __init__(self, assembly: MessageAssembly) -> None:
        self._assembly = assembly
        self._blocks: list[Block] = []
        self._is_open = False
        """Whether the last block may go on."""
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
            case _ if not self._assembly.has_content and not isinstance(delta, Usage):
                return ()
            case TextDelta(text) | RefusalDelta(text) if text:
                return self._shown(self._piece("text", text, "text_delta"))
            case ReasoningDelta(text):
                return self._shown(self._piece("thinking", text, "thinking_delta"))
            case ToolCallDelta():
                begun = self.new_call(delta)
                frames = [] if begun is None else self._open(begun)
                block = next(one for one in reversed(self._blocks) if one.call == delta.call)
                block.pieces.append(delta.arguments)
                if delta.arguments and block is self._blocks[-1]:  # Else it was closed with ``{}``.
                    piece = {"type": "input_json_delta", "partial_json": delta.arguments}
                    frames.append(self._delta(piece))
                return self._shown(frames)
            case Finish():
                self._end = delta
            case Usage():
                self._usage = delta
        return ()

    def new_call(self, delta: ToolCallDelta) -> Block | None:
        """Return the block of the call that the delta begins; None if it begins none."""
        if delta.id is None or delta.name is None:
            return None
        name = self._assembly.names.get(delta.name, delta.name)
        return Block("tool_use", delta.call, id=delta.id, name=name)

    def complete(self) -> Ending:
        """End with the reason and the counts."""
        reason = self.stop_reason or "end_turn"
        closing = [*self._start(), *self._close()]
        message = self._message()
        if not self._assembly.stream:
            return Ending([], 200, orjson.dumps(message.model_dump()), finish_reason=reason)
        ended = {"stop_reason": reason, "stop_sequence": self._stop_sequence}
        frames = [
            *closing,
            _event("message_delta", delta=ended, usage=message.usage.model_dump()),
            _event("message_stop"),
        ]
        return Ending(frames, 200, b"", finish_reason=reason)

    def cancel(self) -> Ending:
        """End because it was stopped."""
        return cancelled(failure(Cancelled()))

    def fail(self, error: Exception) -> Ending:
        """End with the error."""
        return replace(failure(error), is_early=not self._begun)

    def _shown(self, frames: list[bytes]) -> Sequence[bytes]:
        """Return the frames of a stream; a whole answer sends none."""
        return frames if self._assembly.stream else ()

    def _piece(self, kind: str, text: str, delta_type: str) -> list[bytes]:
        """Add a piece of text or of thoughts to the block that is open, or to a new one."""
        frames = []
        if not self._is_open or self._blocks[-1].kind != kind:
            frames = self._open(Block(kind))
        self._blocks[-1].pieces.append(text)
        if kind != "thinking" or not self._assembly.hides_thinking:
            frames.append(self._delta({"type": delta_type, kind: text}))
        return frames

    def _start(self) -> list[bytes]:
        """Return the events that a stream begins with, once."""
        if self._begun or not self._assembly.stream:
            return []
        self._begun = True
        message = self._message().model_dump()
        message |= {"content": [], "stop_reason": None, "stop_sequence": None}
        message["usage"]["output_tokens"] = 0
        return [_event("message_start", message=message), PING]

    def _open(self, block: Block) -> list[bytes]:
        """Begin a block, after the one that was open."""
        frames = [*self._start(), *self._close()]
        self._blocks.append(block)
        self._is_open = True
        index = len(self._blocks) - 1
        return [*frames, _event("content_block_start", index=index, content_block=block.begun())]

    def _close(self) -> list[bytes]:
        """End the block that is open; return its last events."""
        if not self._is_open:
            return []
        self._is_open = False
        last = [self._delta(delta) for delta in self._last_deltas(self._blocks[-1])]
        return [*last, _event("content_block_stop", index=len(self._blocks) - 1)]

    def _last_deltas(self, block: Block) -> Iterator[dict[str, Any]]:
        """Add what a block has at its end; yield its deltas."""
        if block.kind == "thinking":
            project_id = self._assembly.project_id
            if self._assembly.hides_thinking:
                signature = seal(block.text, project_id)
                block.pieces.clear()
            else:
                signature = signature_of(block.text, project_id)
            block.fields["signature"] = signature
            yield {"type": "signature_delta", "signature": signature}

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    @property
    def _stop_sequence(self) -> str | None:
        stop = self._end.stop if self._end is not None else None
        return stop if isinstance(stop, str) else None

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the answer has ended."""
        if not self._assembly.has_content:
            return "max_tokens"
        if self._end is None:
            return None
        return "stop_sequence" if self._stop_sequence else _STOP_REASONS[self._end.reason]

    def usage(self) -> MessagesUsage:
        """Return the counts."""
        return wire_usage(self._usage, self._assembly.service_tier)

    def _message(self) -> MessagesAnswer:
        return MessagesAnswer.model_validate(
            {
                "id": self._assembly.message_id,
                "model": self._assembly.model,
                "content": [block.whole() for block in self._blocks],
                "stop_reason": self.stop_reason,
                "stop_sequence": self._stop_sequence,
                "usage": self.usage(),
            }
        )


def wire_usage(usage: Usage, tier: Tier) -> MessagesUsage:
    """Return the counts; ``input_tokens`` excludes those read from the cache and written to it."""
    cached, written = usage.cached_tokens, usage.cache_write_tokens
    return MessagesUsage(
        input_tokens=max(0, usage.input_tokens - cached - written),
        cache_creation_input_tokens=written,
        cache_read_input_tokens=cached,
        output_tokens=usage.output_tokens,
        service_tier=tier,
    )


def failure(error: Exception, *, first: int = 0) -> Ending:
    """End with an error in Anthropic's envelope; its events have no numbers."""
    answer = api_error(error)
    if answer.param:  # A model server names fields of the request that it got.
        answer.param = client_field(answer.param)
    body = orjson.dumps(answer.anthropic_envelope)
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
