"""Messages of chat completions as input of responses: calls and results, which are items here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from responses_api.wire import items
from responses_api.wire.items import CallId, Content, Lenient


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


def _expanded(given: list[Any]) -> list[items.InputItem]:
    """Return the items that these items and messages come to."""
    found: list[items.InputItem] = []
    for entry in given:
        match entry:
            case CallingMessage():
                found += _calling(entry)
            case ResultMessage(tool_call_id=call_id, content=content):
                found.append(_result(call_id, content, found))
            case item:
                found.append(item)
    return found


def _calling(message: CallingMessage) -> Iterator[items.InputItem]:
    if message.content:
        yield items.MessageItem(role="assistant", content=message.content)
    for call in message.tool_calls:
        if isinstance(call, ChatCustomCall):
            yield items.CustomToolCallItem(
                type="custom_tool_call",
                call_id=call.id,
                name=call.custom.name,
                input=call.custom.input,
            )
            continue
        yield items.FunctionCallItem(
            type="function_call",
            call_id=call.id,
            name=call.function.name,
            arguments=call.function.arguments,
        )


def _result(call_id: str, content: Content, before: list[items.InputItem]) -> items.InputItem:
    custom = (item for item in before if isinstance(item, items.CustomToolCallItem))
    if any(call.call_id == call_id for call in custom):
        return items.CustomToolCallOutputItem(
            type="custom_tool_call_output", call_id=call_id, output=content
        )
    return items.FunctionCallOutputItem(
        type="function_call_output", call_id=call_id, output=content
    )


if TYPE_CHECKING:
    InputItems = list[items.InputItem]
else:
    # What is given has more shapes than what the validation returns.
    InputItems = Annotated[
        list[
            Annotated[
                Annotated[CallingMessage, Tag("calling")]
                | Annotated[ResultMessage, Tag("result")]
                | Annotated[items.InputItem, Tag("item")],
                Discriminator(_kind),
            ]
        ],
        AfterValidator(_expanded),
    ]
