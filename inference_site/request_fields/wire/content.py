"""Content parts of messages. Source: API reference, "Chat completions", ``messages``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from inference_site.api.payload import WireRequest
from inference_site.request_fields.wire.shapes import chat_part


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
    TextPart | ImagePart | AudioPart | FilePart | RefusalPart,
    Field(discriminator="type"),
    BeforeValidator(chat_part),
]


def _content_kind(value: object) -> str:
    return "parts" if isinstance(value, list) else "text"


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Tag("parts")],
    Discriminator(_content_kind),
]
