"""Messages of a request. Source: API reference, "Chat completions", ``messages``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from completions.wire.tools import RequestFunctionCall, RequestToolCall
from inference_site.api.payload import WireRequest


class TextPart(WireRequest):
    """A content part of type ``text``."""

    type: Literal["text"]
    text: str


class RefusalPart(WireRequest):
    """A content part of type ``refusal``: what an assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


class ImageUrl(WireRequest):
    """``image_url`` of an image part: a ``data:`` or http(s) URL. ``detail`` is a hint."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(WireRequest):
    """A content part of type ``image_url``."""

    type: Literal["image_url"]
    image_url: ImageUrl


class InputAudio(WireRequest):
    """``input_audio`` of an audio part: base64 of a file."""

    data: str
    format: Literal["wav", "mp3"]


class AudioPart(WireRequest):
    """A content part of type ``input_audio``."""

    type: Literal["input_audio"]
    input_audio: InputAudio


class InputFile(WireRequest):
    """``file`` of a file part: base64 or a ``data:`` URL."""

    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class FilePart(WireRequest):
    """A content part of type ``file``."""

    type: Literal["file"]
    file: InputFile


Part = Annotated[
    TextPart | ImagePart | AudioPart | FilePart | RefusalPart, Field(discriminator="type")
]


def _content_kind(value: object) -> str:
    return "parts" if isinstance(value, list) else "text"


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Tag("parts")],
    Discriminator(_content_kind),
]


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
