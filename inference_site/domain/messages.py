"""Messages: the turns of a conversation, as a chat template receives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made; ``arguments`` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text between media."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image by its URL: http(s) until the worker has fetched it, then ``data:``.

    ``param`` names the field of the request it came from, for errors.
    """

    url: str
    param: str


@dataclass(frozen=True, slots=True)
class AudioPart:
    """A sound, as base64 of a file of this format."""

    audio: str
    format: Literal["wav", "mp3"]
    param: str


Part = TextPart | ImagePart | AudioPart


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of the conversation, as the model's chat template receives it.

    A turn with media has ``parts``, in order, and no ``text``. Otherwise ``text`` is None only for
    an assistant turn that made calls and said nothing. A turn of the role ``tool`` answers the
    call with the id ``tool_call_id``. ``reasoning`` is what came before an assistant's answer.
    """

    role: Role
    text: str | None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    parts: tuple[Part, ...] = ()
    reasoning: str | None = None

    @property
    def all_text(self) -> str:
        """Its text, or the texts between its media."""
        texts = (part.text for part in self.parts if isinstance(part, TextPart))
        return "".join(texts) if self.parts else self.text or ""
