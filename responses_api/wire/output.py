"""Items and their parts as the server sends them. Source: API reference, "Responses", ``output``.

What a response says, what a request brought (normalised), and what the database keeps of both.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from inference_site.api.payload import WireObject
from responses_api.wire.items import ItemStatus

T = TypeVar("T")
WireT = TypeVar("WireT", bound=WireObject)
Omittable = Annotated[T | None, Field(exclude_if=lambda value: value is None)]
"""A field that is left out when it has no value; the others are sent as null."""


def changed(model: WireT, **fields: Any) -> WireT:
    """Return the same with these fields, checked like all others. Raise ValidationError."""
    return type(model)(**{**model.__dict__, **fields})


class TopLogprob(WireObject):
    """A likely token and the natural logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int]


class LogprobEntry(TopLogprob):
    """The token that was chosen, and the likeliest in its place."""

    top_logprobs: list[TopLogprob]


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
    file_id: Omittable[str] = None


class InputFile(WireObject):
    """A part of type ``input_file``."""

    type: Literal["input_file"] = "input_file"
    filename: Omittable[str] = None
    file_data: Omittable[str] = None
    file_id: Omittable[str] = None
    file_url: Omittable[str] = None


Part = Annotated[
    OutputText | Refusal | TextPart | InputImage | InputFile, Field(discriminator="type")
]


class Message(WireObject):
    """An item of type ``message``."""

    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant", "user", "system", "developer"]
    content: list[Part]
    phase: Omittable[str] = None


class ReasoningItem(WireObject):
    """An item of type ``reasoning``."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Omittable[ItemStatus] = None
    summary: list[TextPart]
    content: Omittable[list[TextPart]] = None
    encrypted_content: Omittable[str] = None


class Call(WireObject):
    """A call of a tool. ``call_id`` is what its output names it by."""

    id: str
    type: Literal["function_call", "custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str


class FunctionCall(Call):
    """An item of type ``function_call``; ``arguments`` is JSON text."""

    type: Literal["function_call"] = "function_call"
    arguments: str


class CustomToolCall(Call):
    """An item of type ``custom_tool_call``; ``input`` is plain text."""

    type: Literal["custom_tool_call"] = "custom_tool_call"
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


OutputItem = Annotated[
    Message | ReasoningItem | FunctionCall | CustomToolCall, Field(discriminator="type")
]
AnyItem = OutputItem | CallOutput | Compaction
