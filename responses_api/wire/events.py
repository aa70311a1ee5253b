"""The events of a response's stream. Source: API reference, "Streaming"."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from inference_site.api.payload import WireObject
from inference_site.api.schema import ErrorDetail, LostErrorDetail
from responses_api.wire.output import LogprobEntry, OutputItem, OutputText, TextPart
from responses_api.wire.response import ResponseObject

StateEventType = Literal[
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.completed",
    "response.incomplete",
    "response.failed",
]


class Event(WireObject):
    """What all events have. The first has the number 0, each the next."""

    type: str
    sequence_number: int


class ResponseStateEvent(Event):
    """The response has come into another state."""

    type: StateEventType
    response: ResponseObject


class OutputItemEvent(Event):
    """An item begins, empty, or has ended."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class ItemEvent(Event):
    """Something of an item."""

    item_id: str
    output_index: int


class PartEvent(ItemEvent):
    """Something of a content part."""

    content_index: int


class ContentPartEvent(PartEvent):
    """A content part begins, empty, or has ended."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | TextPart = Field(discriminator="type")


class OutputTextDelta(PartEvent):
    """A piece of a message."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    delta: str
    logprobs: list[LogprobEntry]


class OutputTextDone(PartEvent):
    """The whole text of a message."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    text: str
    logprobs: list[LogprobEntry]


class ReasoningTextDelta(PartEvent):
    """A piece of what the model thinks."""

    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    delta: str


class ReasoningTextDone(PartEvent):
    """All that the model thought."""

    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    text: str


class FunctionCallArgumentsDelta(ItemEvent):
    """A piece of the arguments of a function."""

    type: Literal["response.function_call_arguments.delta"] = (
        "response.function_call_arguments.delta"
    )
    delta: str


class FunctionCallArgumentsDone(ItemEvent):
    """The arguments of a function."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    arguments: str
    name: str


class CustomToolCallInputDelta(ItemEvent):
    """A piece of the input of a custom tool."""

    type: Literal["response.custom_tool_call_input.delta"] = "response.custom_tool_call_input.delta"
    delta: str


class CustomToolCallInputDone(ItemEvent):
    """The input of a custom tool."""

    type: Literal["response.custom_tool_call_input.done"] = "response.custom_tool_call_input.done"
    input: str


class ErrorEvent(Event):
    """The response has failed: the error flat and nested, for readers want the one or the other."""

    type: Literal["error"] = "error"
    code: str
    message: str
    param: str | None
    error: LostErrorDetail | ErrorDetail


DeltaEvent = (
    OutputTextDelta | ReasoningTextDelta | FunctionCallArgumentsDelta | CustomToolCallInputDelta
)
ResponseEvent = Annotated[
    ResponseStateEvent
    | OutputItemEvent
    | ContentPartEvent
    | DeltaEvent
    | OutputTextDone
    | ReasoningTextDone
    | FunctionCallArgumentsDone
    | CustomToolCallInputDone
    | ErrorEvent,
    Field(discriminator="type"),
]
