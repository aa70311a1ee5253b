"""Input items on the wire: what a request brings, and what a response's output comes back as.

Source: API reference, "Responses", ``input``. Clients send items back as they got them, with nulls
and fields of their own libraries; those are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from inference_site.api.payload import WireRequest
from inference_site.request_fields.wire.shapes import response_part

CallId = Annotated[str, Field(min_length=1, max_length=64)]
ObjectId = Annotated[str, Field(max_length=256, pattern=r"^[^\x00]*$")]
"""An id that is looked up; PostgreSQL takes no NUL."""
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class Lenient(WireRequest):
    """Base of items and their parts: what it does not declare is dropped without a word."""

    @property
    def ignored_params(self) -> list[str]:
        """None: the client did not write these fields, its library did."""
        return []

    def _ignored(self) -> Any:
        return iter(())


class InputText(Lenient):
    """A part of type ``input_text``; ``text`` is another name of the type."""

    type: Literal["input_text", "text"]
    text: str


class OutputText(Lenient):
    """A part of type ``output_text``: what an assistant said."""

    type: Literal["output_text"]
    text: str


class Refusal(Lenient):
    """A part of type ``refusal``."""

    type: Literal["refusal"]
    refusal: str


class InputImage(Lenient):
    """A part of type ``input_image``."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


class InputFile(Lenient):
    """A part of type ``input_file``: base64 or a ``data:`` URL."""

    type: Literal["input_file"]
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None
    filename: str | None = None


Part = Annotated[
    InputText | OutputText | Refusal | InputImage | InputFile,
    Field(discriminator="type"),
    BeforeValidator(response_part),
]


def _content_kind(value: object) -> str:
    return "parts" if isinstance(value, list) else "text"


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Tag("parts")],
    Discriminator(_content_kind),
]


class MessageItem(Lenient):
    """A message; its ``type`` may be left out. ``phase`` is kept for the client."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Lenient):
    """A call that the assistant made; one that is ``incomplete`` was cut."""

    type: Literal["function_call"]
    call_id: CallId
    name: str
    arguments: str
    status: ItemStatus | None = None


class FunctionCallOutputItem(Lenient):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Content


class CustomToolCallItem(Lenient):
    """A call of a custom tool, which takes one text."""

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: str
    input: str
    status: ItemStatus | None = None


class CustomToolCallOutputItem(Lenient):
    """The result of a call of a custom tool."""

    type: Literal["custom_tool_call_output"]
    call_id: CallId
    output: Content


class ReasoningText(Lenient):
    """A part of a reasoning item, of its ``content`` or of its ``summary``."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Lenient):
    """What the assistant thought; ``encrypted_content`` is what this server made of it."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class CompactionItem(Lenient):
    """What is left of a compacted conversation."""

    type: Literal["compaction"]
    encrypted_content: str


class ItemReference(Lenient):
    """An item that is stored already; its ``type`` may be left out."""

    type: Literal["item_reference"] | None = None
    id: ObjectId


def _item_kind(value: object) -> str | None:
    if not isinstance(value, dict):
        return "message"
    kind = value.get("type")
    if kind is None:
        return "item_reference" if "id" in value and "role" not in value else "message"
    return kind if isinstance(kind, str) else ""


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CompactionItem, Tag("compaction")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_item_kind),
]


class ChatFunction(Lenient):
    """``tool_calls[].function``."""

    name: str
    arguments: str


class ChatFunctionCall(Lenient):
    """``tool_calls[]`` of a function."""

    id: CallId
    type: Literal["function"] = "function"
    function: ChatFunction


class ChatCustom(Lenient):
    """``tool_calls[].custom``."""

    name: str
    input: str


class ChatCustomCall(Lenient):
    """``tool_calls[]`` of a custom tool."""

    id: CallId
    type: Literal["custom"]
    custom: ChatCustom


def _call_kind(value: object) -> str:
    kind = value.get("type", "function") if isinstance(value, dict) else ""
    return kind if isinstance(kind, str) else ""


ChatCall = Annotated[
    Annotated[ChatFunctionCall, Tag("function")] | Annotated[ChatCustomCall, Tag("custom")],
    Discriminator(_call_kind),
]


class CallingMessage(Lenient):
    """A message of the role ``assistant`` with ``tool_calls``."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ChatCall], Field(min_length=1)]


class ResultMessage(Lenient):
    """A message of the role ``tool``."""

    role: Literal["tool"]
    tool_call_id: CallId
    content: Content


def _kind(value: object) -> str:
    if isinstance(value, dict) and value.get("type") in (None, "message"):
        if value.get("role") == "tool":
            return "result"
        if value.get("role") == "assistant" and value.get("tool_calls"):
            return "calling"
    return "item"


def _expanded(given: list[Any]) -> list[InputItem]:
    """Return the items that these items and messages come to."""
    found: list[InputItem] = []
    for entry in given:
        match entry:
            case CallingMessage():
                found += _calling(entry)
            case ResultMessage(tool_call_id=call_id, content=content):
                found.append(_result(call_id, content, found))
            case item:
                found.append(item)
    return found


def _calling(message: CallingMessage) -> Iterator[InputItem]:
    if message.content:
        yield MessageItem(role="assistant", content=message.content)
    for call in message.tool_calls:
        if isinstance(call, ChatCustomCall):
            yield CustomToolCallItem(
                type="custom_tool_call",
                call_id=call.id,
                name=call.custom.name,
                input=call.custom.input,
            )
            continue
        yield FunctionCallItem(
            type="function_call",
            call_id=call.id,
            name=call.function.name,
            arguments=call.function.arguments,
        )


def _result(call_id: str, content: Content, before: list[InputItem]) -> InputItem:
    custom = (item for item in before if isinstance(item, CustomToolCallItem))
    if any(call.call_id == call_id for call in custom):
        return CustomToolCallOutputItem(
            type="custom_tool_call_output", call_id=call_id, output=content
        )
    return FunctionCallOutputItem(type="function_call_output", call_id=call_id, output=content)


if TYPE_CHECKING:
    InputItems = list[InputItem]
else:
    # What is given has more shapes than what the validation returns.
    InputItems = Annotated[
        list[
            Annotated[
                Annotated[CallingMessage, Tag("calling")]
                | Annotated[ResultMessage, Tag("result")]
                | Annotated[InputItem, Tag("item")],
                Discriminator(_kind),
            ]
        ],
        AfterValidator(_expanded),
    ]
