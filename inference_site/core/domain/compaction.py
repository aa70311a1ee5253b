"""Compaction: a summary by the model takes the place of the older turns of a conversation.

    leading  instructions, at the beginning; they stay
    middle   what is summarised
    newest   what the model has not answered yet; it stays

The web process decides when a request is compacted (``Compaction``), the worker does it
(``worker/runtime/compaction.py``), and the result (``CompactedContext``) is stored, sealed, as an
item of the response. Later requests begin with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference_site.core.domain.messages import AudioPart, ImagePart, Message, TextPart

SUMMARY_TASK = (
    "Summarise the conversation that follows, so that it can be continued from the summary alone. "
    "Keep names, numbers, decisions, results of tools, what the user asked for, and what is still "
    "to be done."
)
SUMMARY_HEADING = "Summary of the conversation so far:\n"
_LEFT_OUT = "[…]"
_LARGEST_SHARE = 4
"""One entry of a transcript has at most this part, a quarter, of the room for all of them."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """When a request is compacted, and what of it.

    ``threshold``: the number of tokens of the prompt from which on it is compacted; 0 means now.
    ``summary_tokens`` is the most tokens of the summary. ``instructions`` is the number of first
    messages that belong to this request only; ``leading`` counts them and those after them that
    stay. ``has_summary``: the message after these is an earlier summary. ``keeps_newest``: what
    the model has not answered stays as it is. ``is_whole_answer``: the summary is all that is asked
    for, and the instructions apply to it. ``counts``: the engine can render the prompt, so that its
    tokens can be counted.
    """

    threshold: int
    summary_tokens: int
    instructions: int = 0
    leading: int = 0
    has_summary: bool = False
    keeps_newest: bool = True
    is_whole_answer: bool = False
    counts: bool = False

    def split(self, messages: Sequence[Message]) -> History:
        """Return the three parts of the messages."""
        end = len(messages)
        if self.keeps_newest:
            while end > self.leading and messages[end - 1].role != "assistant":
                end -= 1
            # Results of tools stay with their calls, which are in the message before them.
            if end > self.leading and end < len(messages) and messages[end].role == "tool":
                end -= 1
            if end == self.leading and self.has_summary and end < len(messages):
                end += 1
        leading, rest = messages[: self.leading], messages[self.leading :]
        cut = end - self.leading
        return History(tuple(leading), tuple(rest[:cut]), tuple(rest[cut:]))

    def without_oldest(
        self, messages: Sequence[Message], lengths: Sequence[int], excess: int
    ) -> tuple[Message, ...]:
        """Return the messages without the oldest that would be summarised, ``excess`` of length.

        For a conversation that certainly exceeds the context: it will be compacted, and no summary
        can read all of it. An earlier summary stays.
        """
        history = self.split(messages)
        first = self.leading + (self.has_summary and bool(history.middle))
        end, dropped = first, 0
        while end < self.leading + len(history.middle) and dropped < excess:
            dropped += lengths[end]
            end += 1
        return (*messages[:first], *messages[end:])


@dataclass(frozen=True, slots=True)
class History:
    """The messages of a request in three parts, as the module describes them."""

    leading: tuple[Message, ...]
    middle: tuple[Message, ...]
    newest: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class CompactedContext:
    """What the messages of a conversation have become.

    ``leading`` and ``newest`` are messages that stay. An empty ``summary`` stands for no message.
    """

    summary: str
    leading: tuple[Message, ...] = ()
    newest: tuple[Message, ...] = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages that take the place of the conversation."""
        said = (Message("system", SUMMARY_HEADING + self.summary),) if self.summary else ()
        return (*self.leading, *said, *self.newest)


def transcript(messages: Sequence[Message], most: int, *, keeps_first: bool = False) -> str:
    """Return the messages as text of at most about ``most`` characters.

    Long entries lose their middle, then the oldest are left out, but for the first one if it
    ``keeps_first``.
    """
    entries = [shortened(_entry(message), most // _LARGEST_SHARE) for message in messages]
    first = entries[:1] if keeps_first else []
    room, kept = most - sum(map(len, first)), list[str]()
    for entry in reversed(entries[len(first) :]):
        room -= len(entry) + 1
        if room < 0:
            break
        kept.append(entry)
    left_out = len(entries) - len(first) - len(kept)
    note = [f"[{left_out} earlier messages are left out.]"] if left_out else []
    return "\n".join((*first, *note, *reversed(kept)))


def _entry(message: Message) -> str:
    parts = message.parts or (TextPart(message.text or ""),)
    said = "".join(_part(part) for part in parts)
    lines = [f"assistant calls {call.name}: {call.arguments}" for call in message.tool_calls]
    if message.role == "tool":
        return f"result of {message.name or 'a tool'}: {said}"
    if said or not lines:
        lines.insert(0, f"{message.role}: {said}")
    return "\n".join(lines)


def _part(part: TextPart | ImagePart | AudioPart) -> str:
    match part:
        case TextPart(text=text):
            return text
        case ImagePart():
            return "[an image]"
        case AudioPart():
            return "[a sound]"


def shortened(text: str, most: int) -> str:
    """Return the text without its middle, if it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    half = max(most - len(_LEFT_OUT), 0) // 2
    return f"{text[:half]}{_LEFT_OUT}{text[len(text) - half :]}"
