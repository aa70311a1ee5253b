"""Deltas → the chunks and the final object of a chat completion.

A pure fold: the same deltas give the same bytes, streamed or not. The chunks of one stream differ
in a few places only, so they are formatted around prebuilt ends instead of being encoded whole; a
test proves that they equal the encoded wire models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from completions.wire.chat import (
    ChatCompletion,
    Choice,
    ChoiceLogprobs,
    CompletionTokensDetails,
    CompletionUsage,
    ContentLogprob,
    PromptTokensDetails,
    ResponseMessage,
    TopLogprob,
)
from completions.wire.tools import FunctionCall, MessageToolCall
from inference_site.http.errors import api_error
from worker.assembly import Ending
from worker.generation import (
    Delta,
    Finish,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)

CHAT = "chat.completion"
"""Name of this kind of generation."""

SYSTEM_FINGERPRINT = "fp_inference_site"

DONE = b"data: [DONE]\n\n"
"""The last frame of every stream."""


class _CallFold:
    """What one tool call has come to so far."""

    def __init__(self, call_id: str, name: str) -> None:
        self.id, self.name = call_id, name
        self.arguments: list[str] = []

    def wire(self) -> MessageToolCall:
        function = FunctionCall(name=self.name, arguments="".join(self.arguments))
        return MessageToolCall(id=self.id, function=function)


class _ChoiceFold:
    """What one choice has come to so far."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.calls: list[_CallFold] = []
        self.finish: FinishReason = "stop"

    def take_call(self, delta: ToolCallDelta) -> None:
        """Add a piece of a tool call."""
        if delta.id is not None and delta.name is not None:
            self.calls.append(_CallFold(delta.id, delta.name))
        self.calls[delta.call].arguments.append(delta.arguments)

    def wire(self, with_logprobs: bool) -> dict[str, Any]:
        """Return the choice of an answer; reasoning and calls are there only when there are any."""
        text, reasoning = "".join(self.text), "".join(self.reasoning)
        choice = Choice(
            index=self.index,
            message=ResponseMessage(
                content=None if self.calls and not text else text,
                reasoning_content=reasoning or None,
                tool_calls=[call.wire() for call in self.calls] or None,
            ),
            logprobs=_wire_logprobs(self.logprobs) if with_logprobs else None,
            finish_reason=self.finish,
        ).model_dump()
        for name in ("reasoning_content", "tool_calls"):
            if choice["message"][name] is None:
                del choice["message"][name]
        return choice


class ChatAssembler:
    """Assembles one chat completion (see ``worker.assembly.Assembler``)."""

    def __init__(
        self,
        completion_id: str,
        created: int,
        model: str,
        stream: bool,
        include_usage: bool,
        choices: int = 1,
        logprobs: bool = False,
    ) -> None:
        self._id, self._created, self._model = completion_id, created, model
        self._stream, self._include_usage, self._logprobs = stream, include_usage, logprobs
        self._choices = [_ChoiceFold(index) for index in range(choices)]
        self._usage = Usage()
        self._begun = False
        start = self._chunk_start()
        self._heads = [
            b'data: %b,"choices":[{"index":%d,"delta":' % (start, index) for index in range(choices)
        ]
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    @classmethod
    def from_assembly(cls, assembly: dict[str, Any]) -> ChatAssembler:
        """Make it from the ``assembly`` of a request document, which has the arguments' names."""
        return cls(**assembly)

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the chunks it makes."""
        match delta:
            case TextDelta(text, index, logprobs):
                self._choices[index].text.append(text)
                self._choices[index].logprobs += logprobs
                content = b'{"content":' + orjson.dumps(text) + b"}"
                return self._chunks(index, content, b"null", logprobs)
            case ReasoningDelta(text, index):
                self._choices[index].reasoning.append(text)
                content = b'{"reasoning_content":' + orjson.dumps(text) + b"}"
                return self._chunks(index, content, b"null")
            case ToolCallDelta():
                self._choices[delta.index].take_call(delta)
                return self._chunks(delta.index, _call_piece(delta), b"null")
            case Finish(reason, index):
                self._choices[index].finish = reason
                return self._chunks(index, b"{}", orjson.dumps(reason))
            case Usage():
                self._usage = delta
                return ()

    def complete(self) -> Ending:
        """End with usage, if it was asked for, and ``[DONE]``."""
        frames = [self._usage_chunk(), DONE] if self._include_usage else [DONE]
        return Ending(frames, 200, self._body(), finish_reason=self._choices[0].finish)

    def cancel(self) -> Ending:
        """End without a finish reason: whoever listened has left or was told by who cancelled."""
        return Ending([DONE], 200, self._body())

    def fail(self, error: Exception) -> Ending:
        """End with the error."""
        return replace(failure(error), is_early=not self._begun)

    def _chunks(
        self,
        index: int,
        delta: bytes,
        finish_reason: bytes,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> Sequence[bytes]:
        if not self._stream:
            return ()
        told = orjson.dumps(_wire_logprobs(logprobs).model_dump()) if logprobs else b"null"
        chunk = self._chunk(index, delta, finish_reason, told)
        if self._begun:
            return (chunk,)
        self._begun = True
        # Choice 0 first, whichever speaks first: the SDKs count on it.
        role = b'{"role":"assistant","content":"","refusal":null}'
        roles = [self._chunk(n, role, b"null", b"null") for n in range(len(self._choices))]
        return (*roles, chunk)

    def _chunk(self, index: int, delta: bytes, finish_reason: bytes, logprobs: bytes) -> bytes:
        return b'%b%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._heads[index],
            delta,
            logprobs,
            finish_reason,
            self._tail,
        )

    def _chunk_start(self) -> bytes:
        fields = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "service_tier": "default",
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }
        return orjson.dumps(fields)[:-1]

    def _usage_chunk(self) -> bytes:
        usage = orjson.dumps(wire_usage(self._usage).model_dump())
        return b"data: " + self._chunk_start() + b',"choices":[],"usage":' + usage + b"}\n\n"

    def _body(self) -> bytes:
        return b"" if self._stream else orjson.dumps(self.completion())

    def completion(self) -> dict[str, Any]:
        """Return the whole object, as a client that does not stream gets it."""
        completion = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[],
            usage=wire_usage(self._usage),
            system_fingerprint=SYSTEM_FINGERPRINT,
        ).model_dump()
        completion["choices"] = [choice.wire(self._logprobs) for choice in self._choices]
        return completion


def _call_piece(delta: ToolCallDelta) -> bytes:
    """Return the delta of a chunk: id, type and name once, or the SDKs would add them up."""
    piece: dict[str, Any] = {"index": delta.call}
    function: dict[str, Any] = {"arguments": delta.arguments}
    if delta.id is not None:
        piece |= {"id": delta.id, "type": "function"}
        function = {"name": delta.name, **function}
    return orjson.dumps({"tool_calls": [{**piece, "function": function}]})


def wire_usage(usage: Usage) -> CompletionUsage:
    """Return the counts as chat completions and completions tell them."""
    return CompletionUsage(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        total_tokens=usage.input_tokens + usage.output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=usage.reasoning_tokens),
    )


def _wire_logprobs(logprobs: Sequence[TokenLogprob]) -> ChoiceLogprobs:
    return ChoiceLogprobs(
        content=[
            ContentLogprob(
                token=entry.token,
                logprob=entry.logprob,
                bytes=list(entry.text_bytes),
                top_logprobs=[
                    TopLogprob(token=o.token, logprob=o.logprob, bytes=list(o.text_bytes))
                    for o in entry.top
                ],
            )
            for entry in logprobs
        ]
    )


def failure(error: Exception) -> Ending:
    """End a completion of either kind: a status before the first byte, an event after it."""
    told = api_error(error)
    event = b"data: " + told.body + b"\n\n"
    retry_after = told.headers.get("Retry-After")
    return Ending(
        [event, DONE],
        told.status,
        told.body,
        error_code=told.code or told.type,
        is_early=True,
        retry_after_s=int(retry_after) if retry_after else None,
    )
