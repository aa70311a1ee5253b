"""Messages of a request. Source: API reference, "Chat completions", ``messages``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from completions.wire.tools import RequestFunctionCall, RequestToolCall
from inference_site.api.payload import WireRequest
from inference_site.request_fields.wire import Content


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
    """A message of the role ``assistant``; its content may be null when it made calls."""

    role: Literal["assistant"]
    content: Content | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[RequestToolCall] | None = None
    function_call: RequestFunctionCall | None = None


class ToolMessage(WireRequest):
    """A message of the role ``tool``: the result of the call it names."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str


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
