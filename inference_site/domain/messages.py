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


# The module's text:
# """Which turns a conversation that is too long for its model loses: the oldest, but no instructions.
#
# The length of a turn is whatever the caller measures: characters, bytes or tokens.
# """


def without_oldest(
    messages: Sequence[Message], lengths: Sequence[float], too_many: float
) -> tuple[Message, ...]:
    """Return the messages without as many of the oldest turns as have this length together.

    At least one turn is dropped, if there is one before the last turn of the user, which always
    stays with all that follows it. Messages of the system stay too.
    """
    last_turn = max((i for i, m in enumerate(messages) if m.role == "user"), default=0)
    dropped: set[int] = set()
    dropped_length = 0.0
    for position in range(last_turn):
        message = messages[position]
        if message.role == "system":
            continue
        # A turn goes with all up to the next message of the user: templates insist that a
        # conversation begins with the user, and no result stays without its call.
        if message.role == "user" and dropped and dropped_length >= too_many:
            break
        dropped.add(position)
        dropped_length += lengths[position]
    return tuple(message for i, message in enumerate(messages) if i not in dropped)
