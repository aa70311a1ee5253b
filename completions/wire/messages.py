"""Messages, tools and calls of chats on the wire. Source: API reference, "Chat completions"."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from inference_site.gateway.api.payload import WireObject, WireRequest
from inference_site.gateway.request_fields.wire import (
    Content,
    FunctionName,
    NestedCustomFormat,
    nested_tool,
)


class FunctionDefinition(WireRequest):
    """``tools[].function``. The schema is always enforced for a forced call, ``strict`` or not."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(WireRequest):
    """``tools[]`` of type ``function``."""

    type: Literal["function"]
    function: FunctionDefinition


class CustomDefinition(WireRequest):
    """``tools[].custom``: a tool that takes one text."""

    name: FunctionName
    description: str | None = None
    format: NestedCustomFormat | None = None


class CustomTool(WireRequest):
    """``tools[]`` of type ``custom``."""

    type: Literal["custom"]
    custom: CustomDefinition


RequestTool = Annotated[
    FunctionTool | CustomTool, Field(discriminator="type"), BeforeValidator(nested_tool)
]


class NamedFunction(WireRequest):
    """A function by its name."""

    name: str


class NamedFunctionTool(WireRequest):
    """``tool_choice`` that names the one function to call, and an entry of ``allowed_tools``."""

    type: Literal["function"]
    function: NamedFunction

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.function.name


class NamedCustomTool(WireRequest):
    """The same for a custom tool."""

    type: Literal["custom"]
    custom: NamedFunction

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.custom.name


NamedTool = Annotated[
    NamedFunctionTool | NamedCustomTool, Field(discriminator="type"), BeforeValidator(nested_tool)
]


class AllowedTools(WireRequest):
    """``tool_choice.allowed_tools``: no other tool may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedToolsChoice(WireRequest):
    """``tool_choice`` of type ``allowed_tools``."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind(value: object) -> str:
    if isinstance(value, dict):
        return "allowed" if value.get("type") == "allowed_tools" else "named"
    return "mode"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedToolsChoice, Tag("allowed")],
    Discriminator(_choice_kind),
    BeforeValidator(nested_tool),
]


class RequestFunctionCall(WireRequest):
    """``messages[].tool_calls[].function``; ``arguments`` is text and may be any.

    ``parsed_arguments`` are what the official client has read in it.
    """

    name: str
    arguments: str
    parsed_arguments: Any = None


class _RequestToolCall(WireRequest):
    """``index`` is in calls that a client has put together from a stream."""

    id: str
    index: int | None = None


class RequestFunctionToolCall(_RequestToolCall):
    """``messages[].tool_calls[]`` of a function."""

    type: Literal["function"]
    function: RequestFunctionCall


class RequestCustomCall(WireRequest):
    """``messages[].tool_calls[].custom``."""

    name: str
    input: str


class RequestCustomToolCall(_RequestToolCall):
    """``messages[].tool_calls[]`` of a custom tool."""

    type: Literal["custom"]
    custom: RequestCustomCall


RequestToolCall = Annotated[
    RequestFunctionToolCall | RequestCustomToolCall, Field(discriminator="type")
]

FunctionCallChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("mode")] | Annotated[NamedFunction, Tag("named")],
    Discriminator(lambda value: "named" if isinstance(value, dict) else "mode"),
]
"""``function_call`` of a request: ``tool_choice`` as it was before there were tools."""


class FunctionCall(WireObject):
    """``choices[].message.tool_calls[].function``."""

    name: str
    arguments: str


class MessageFunctionToolCall(WireObject):
    """``choices[].message.tool_calls[]`` of a function."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class CustomCall(WireObject):
    """``choices[].message.tool_calls[].custom``."""

    name: str
    input: str


class MessageCustomToolCall(WireObject):
    """``choices[].message.tool_calls[]`` of a custom tool."""

    id: str
    type: Literal["custom"] = "custom"
    custom: CustomCall


MessageToolCall = MessageFunctionToolCall | MessageCustomToolCall


class InstructionMessage(WireRequest):
    """A message of the role ``system`` or ``developer``."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(WireRequest):
    """A message of the role ``user``."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(WireRequest):
    """A message of the role ``assistant``; its content may be null when it made calls.

    ``reasoning_content`` (an extension; ``reasoning`` in vLLM and OpenRouter) is what it thought
    before; most chat templates show a model its thoughts since the last message of the user alone.
    ``annotations`` come with an answer, and the official client adds ``parsed``; the model is not
    shown them.
    """

    role: Literal["assistant"]
    content: Content | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[RequestToolCall] | None = None
    function_call: RequestFunctionCall | None = None
    annotations: list[Any] | None = None
    parsed: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ToolMessage(WireRequest):
    """A message of the role ``tool``: the result of the call it names by its id.

    Many clients also send the ``name`` of the tool, which the call has.
    """

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


class FunctionMessage(WireRequest):
    """A message of the role ``function``: a result, as it was sent before there were tools."""

    role: Literal["function"]
    content: Content | None
    name: str


RequestMessage = Annotated[
    InstructionMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage,
    Field(discriminator="role"),
]


def wrap_text(value: object) -> object:
    """Take a bare string for one message of the user (an extension)."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value
