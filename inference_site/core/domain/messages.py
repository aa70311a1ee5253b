"""Messages: the turns of a conversation, as a chat template receives them."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Audio: a file of this format, in base64."""

    audio: str
    format: Literal["wav", "mp3"]
    param: str


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file that the worker replaces by its text or image: stored, or sent with the request.

    ``content`` is base64; None for the stored file ``file_id`` of the project.
    """

    param: str
    file_id: str | None = None
    content: str | None = None
    filename: str | None = None


Part = TextPart | ImagePart | AudioPart | FilePart


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of the conversation, as the model's chat template receives it.

    A turn with media has ``parts``, in order, and no ``text``. Otherwise ``text`` is None only for
    an assistant turn with calls and no text. A turn of the role ``tool`` is the result of the call
    ``tool_call_id``. ``reasoning`` is the assistant's reasoning before its answer.
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
        """The text of the turn, or the texts between its media."""
        texts = (part.text for part in self.parts if isinstance(part, TextPart))
        return "".join(texts) if self.parts else self.text or ""


def drop_oldest_turns(
    messages: Sequence[Message], lengths: Sequence[float], excess: float
) -> tuple[Message, ...]:
    """Return the messages without the oldest turns, which together have at least this length.

    Used when a conversation is too long for its model. ``lengths`` are those of the messages in
    any unit: characters, bytes or tokens. At least one turn is dropped, if there is one before the
    last message of the user; that message and all after it stay. System messages stay, too.
    """
    last_turn = max((i for i, m in enumerate(messages) if m.role == "user"), default=0)
    dropped: set[int] = set()
    dropped_length = 0.0
    for position in range(last_turn):
        message = messages[position]
        if message.role == "system":
            continue
        # A turn is dropped up to the next message of the user: templates require that a
        # conversation starts with the user, and a result needs its call.
        if message.role == "user" and dropped and dropped_length >= excess:
            break
        dropped.add(position)
        dropped_length += lengths[position]
    return tuple(message for i, message in enumerate(messages) if i not in dropped)
