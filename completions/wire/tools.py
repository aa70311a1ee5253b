"""Tools on the wire: what may be called, what must be, and the calls of an answer.

Source: API reference, "Function calling".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from inference_site.http.payload import WireObject, WireRequest

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


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


class NamedFunction(WireRequest):
    """A function by its name."""

    name: str


class NamedTool(WireRequest):
    """``tool_choice`` that names the one function to call, and an entry of ``allowed_tools``."""

    type: Literal["function"]
    function: NamedFunction


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
]


class RequestFunctionCall(WireRequest):
    """``messages[].tool_calls[].function``; ``arguments`` is text and may be any."""

    name: str
    arguments: str


class RequestToolCall(WireRequest):
    """``messages[].tool_calls[]``."""

    id: str
    type: Literal["function"]
    function: RequestFunctionCall


class FunctionCall(WireObject):
    """``choices[].message.tool_calls[].function``."""

    name: str
    arguments: str


class MessageToolCall(WireObject):
    """``choices[].message.tool_calls[]``."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
