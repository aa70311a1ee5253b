"""The response object as the server sends it. Source: API reference, "Responses"."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from inference_site.api.payload import WireObject
from responses_api.wire.output import AnyItem, Omittable, OutputItem


class InputTokensDetails(WireObject):
    """``usage.input_tokens_details``."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(WireObject):
    """``usage.output_tokens_details``."""

    reasoning_tokens: int


class ResponseUsage(WireObject):
    """``usage``: cached ⊂ input, reasoning ⊂ output."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(WireObject):
    """``error`` of a response that failed."""

    code: str
    message: str


class IncompleteDetails(WireObject):
    """``incomplete_details`` of a response that was cut."""

    reason: Literal["max_output_tokens", "content_filter"]


class ReasoningEcho(WireObject):
    """``reasoning`` as it was asked for."""

    effort: str | None
    summary: str | None


class TextEcho(WireObject):
    """``text`` as it was asked for."""

    format: dict[str, Any]
    verbosity: Omittable[str] = None


class ConversationId(WireObject):
    """``conversation``."""

    id: str


class ResponseObject(WireObject):
    """A response: the same fields in every state."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = Field(description="Set only when the status is `completed`.")
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: Literal["default", "flex"]
    store: bool
    temperature: float
    text: TextEcho
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    metadata: dict[str, str]
    conversation: Omittable[ConversationId] = None
    user: Omittable[str] = None


class DeletedResponse(WireObject):
    """What is left of a deleted response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(WireObject):
    """How many tokens an input has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class CompactedResponse(WireObject):
    """A compacted conversation: the user's messages, and the rest sealed."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[AnyItem]
    usage: ResponseUsage
