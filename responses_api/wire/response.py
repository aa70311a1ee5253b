"""The response object and its items as the server sends them. Source: API reference, "Responses".

These describe what ``objects.py`` and ``output.py`` make as plain dictionaries, which is what goes
through the log and the database.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from inference_site.api.payload import WireObject
from responses_api.wire.items import ItemStatus


class LogprobEntry(WireObject):
    """A token and the natural logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[dict[str, Any]]


class OutputText(WireObject):
    """A part of type ``output_text``."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None]
    logprobs: list[LogprobEntry]


class Refusal(WireObject):
    """A part of type ``refusal``."""

    type: Literal["refusal"] = "refusal"
    refusal: str


class TextPart(WireObject):
    """A part of reasoning, or a text of an input."""

    type: Literal["reasoning_text", "summary_text", "input_text"]
    text: str


class InputImage(WireObject):
    """A part of type ``input_image``."""

    type: Literal["input_image"] = "input_image"
    detail: str
    image_url: str | None
    file_id: str | None = None


class InputFile(WireObject):
    """A part of type ``input_file``."""

    type: Literal["input_file"] = "input_file"
    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None


Part = OutputText | Refusal | TextPart | InputImage | InputFile


class Message(WireObject):
    """An item of type ``message``."""

    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant", "user", "system", "developer"]
    content: list[Part]
    phase: str | None = None


class ReasoningItem(WireObject):
    """An item of type ``reasoning``."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus | None = None
    summary: list[TextPart]
    content: list[TextPart] | None = None
    encrypted_content: str | None = None


class FunctionCall(WireObject):
    """An item of type ``function_call``; ``arguments`` is JSON text."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class CustomToolCall(WireObject):
    """An item of type ``custom_tool_call``; ``input`` is plain text."""

    id: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    status: ItemStatus
    call_id: str
    name: str
    input: str


class CallOutput(WireObject):
    """The result of a call."""

    id: str
    type: Literal["function_call_output", "custom_tool_call_output"]
    status: ItemStatus
    call_id: str
    output: str | list[Part]


class Compaction(WireObject):
    """What is left of a compacted conversation."""

    id: str
    type: Literal["compaction"] = "compaction"
    encrypted_content: str


OutputItem = Message | ReasoningItem | FunctionCall | CustomToolCall
AnyItem = OutputItem | CallOutput | Compaction


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
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    metadata: dict[str, str]
    conversation: ConversationId | None = None
    user: str | None = None


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


class ResponseEvent(WireObject):
    """An event of a response's stream. Which of the fields it has depends on its type."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: OutputText | TextPart | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    input: str | None = None
    name: str | None = None
    logprobs: list[LogprobEntry] | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None
    error: dict[str, Any] | None = None
