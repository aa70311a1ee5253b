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
    CompletionTokensDetails,
    CompletionUsage,
    PromptTokensDetails,
    ResponseMessage,
)
from inference_site.http.errors import api_error
from worker.assembly import Ending
from worker.generation import Delta, Finish, FinishReason, ReasoningDelta, TextDelta, Usage

CHAT = "chat.completion"
"""Name of this kind of generation."""

SYSTEM_FINGERPRINT = "fp_inference_site"

_DONE = b"data: [DONE]\n\n"


class ChatAssembler:
    """Assembles one chat completion (see ``worker.assembly.Assembler``)."""

    def __init__(
        self, completion_id: str, created: int, model: str, stream: bool, include_usage: bool
    ) -> None:
        self._id, self._created, self._model = completion_id, created, model
        self._stream, self._include_usage = stream, include_usage
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._usage = Usage()
        self._finish: FinishReason = "stop"
        self._begun = False
        self._head = self._chunk_head()
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    @classmethod
    def from_assembly(cls, assembly: dict[str, Any]) -> ChatAssembler:
        """Make it from the ``assembly`` of a request document, which has the arguments' names."""
        return cls(**assembly)

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta; return the chunks it makes."""
        match delta:
            case TextDelta(text):
                self._text.append(text)
                return self._chunks(b'{"content":' + orjson.dumps(text) + b"}", b"null")
            case ReasoningDelta(text):
                self._reasoning.append(text)
                return self._chunks(b'{"reasoning_content":' + orjson.dumps(text) + b"}", b"null")
            case Finish(reason):
                self._finish = reason
                return self._chunks(b"{}", orjson.dumps(reason))
            case Usage():
                self._usage = delta
                return ()

    def complete(self) -> Ending:
        """End with usage, if it was asked for, and ``[DONE]``."""
        frames = [self._usage_chunk(), _DONE] if self._include_usage else [_DONE]
        return Ending(frames, 200, self._body(), finish_reason=self._finish)

    def cancel(self) -> Ending:
        """End without a finish reason: whoever listened has left or was told by who cancelled."""
        return Ending([_DONE], 200, self._body())

    def fail(self, error: Exception) -> Ending:
        """End with the error."""
        return replace(failure(error), is_early=not self._begun)

    def _chunks(self, delta: bytes, finish_reason: bytes) -> Sequence[bytes]:
        if not self._stream:
            return ()
        chunk = self._chunk(delta, finish_reason)
        if self._begun:
            return (chunk,)
        self._begun = True
        role = b'{"role":"assistant","content":"","refusal":null}'
        return (self._chunk(role, b"null"), chunk)

    def _chunk(self, delta: bytes, finish_reason: bytes) -> bytes:
        return b'%b%b,"logprobs":null,"finish_reason":%b}]%b' % (
            self._head,
            delta,
            finish_reason,
            self._tail,
        )

    def _chunk_head(self) -> bytes:
        """Everything up to the delta of the only choice, index 0."""
        return b"data: " + self._chunk_start() + b',"choices":[{"index":0,"delta":'

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
        usage = orjson.dumps(self._wire_usage().model_dump())
        return b"data: " + self._chunk_start() + b',"choices":[],"usage":' + usage + b"}\n\n"

    def _body(self) -> bytes:
        if self._stream:
            return b""
        message = ResponseMessage(
            content="".join(self._text), reasoning_content="".join(self._reasoning) or None
        )
        completion = ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[Choice(index=0, message=message, finish_reason=self._finish)],
            usage=self._wire_usage(),
            system_fingerprint=SYSTEM_FINGERPRINT,
        )
        body = completion.model_dump()
        if message.reasoning_content is None:
            del body["choices"][0]["message"]["reasoning_content"]
        return orjson.dumps(body)

    def _wire_usage(self) -> CompletionUsage:
        usage = self._usage
        return CompletionUsage(
            prompt_tokens=usage.input_tokens,
            completion_tokens=usage.output_tokens,
            total_tokens=usage.input_tokens + usage.output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=usage.reasoning_tokens
            ),
        )


def failure(error: Exception) -> Ending:
    """End a chat completion with an error: a status before the first byte, an event after it."""
    told = api_error(error)
    event = b"data: " + told.body + b"\n\n"
    retry_after = told.headers.get("Retry-After")
    return Ending(
        [event, _DONE],
        told.status,
        told.body,
        error_code=told.code or told.type,
        is_early=True,
        retry_after_s=int(retry_after) if retry_after else None,
    )
