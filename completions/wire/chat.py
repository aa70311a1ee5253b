"""Chat completions on the wire, in the order of the API reference.

Source: API reference, "Chat completions" (create, object, chunk object).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from inference_site.http.payload import WireObject, WireRequest

# --- Request -------------------------------------------------------------------------------------


class TextPart(WireRequest):
    """A content part of type ``text``."""

    type: Literal["text"]
    text: str


def _content_kind(value: object) -> str:
    return "parts" if isinstance(value, list) else "text"


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextPart], Tag("parts")],
    Discriminator(_content_kind),
]


class RequestMessage(WireRequest):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class StreamOptions(WireRequest):
    """``stream_options``."""

    include_usage: bool | None = None


def _stop_kind(value: object) -> str:
    return "texts" if isinstance(value, list) else "text"


_StopText = Annotated[str, Field(min_length=1)]
StopTexts = Annotated[
    Annotated[_StopText, Tag("text")]
    | Annotated[list[_StopText], Field(max_length=4), Tag("texts")],
    Discriminator(_stop_kind),
]


class ChatCompletionRequest(WireRequest):
    """The body of ``POST /v1/chat/completions``. ``ignore_eos`` is an extension."""

    model: str
    messages: Annotated[list[RequestMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: StopTexts | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None


# --- Answer --------------------------------------------------------------------------------------

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(WireObject):
    """``usage.prompt_tokens_details``."""

    cached_tokens: int = 0
    audio_tokens: int = 0


class CompletionTokensDetails(WireObject):
    """``usage.completion_tokens_details``."""

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class CompletionUsage(WireObject):
    """``usage``: reasoning ⊂ completion, cached ⊂ prompt."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ResponseMessage(WireObject):
    """``choices[].message``."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: list[None] = Field(default_factory=list)


class Choice(WireObject):
    """``choices[]`` of an answer."""

    index: int
    message: ResponseMessage
    logprobs: None = None
    finish_reason: FinishReason


class ChatCompletion(WireObject):
    """The answer to a request that does not stream."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: CompletionUsage
    service_tier: Literal["default"] = "default"
    system_fingerprint: str


class ChunkDelta(WireObject):
    """``choices[].delta``: only the keys that are set go out."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    refusal: None = None


class ChunkChoice(WireObject):
    """``choices[]`` of a chunk."""

    index: int
    delta: ChunkDelta
    logprobs: None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(WireObject):
    """One event of a stream. ``usage`` is there only when asked for: null, then the counts."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    service_tier: Literal["default"] = "default"
    system_fingerprint: str
    usage: CompletionUsage | None = None
