"""Compaction: a summary by the model takes the place of the older turns of a conversation.

The web process decides when a request is compacted (``request.Compaction``), the worker does it
(``worker/runtime/compaction.py``), and the result (``CompactedContext``) is stored, sealed, as an
item of the response. Later requests begin with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from inference_site.core.domain.request import (
    AudioPart,
    FilePart,
    GenerationRequest,
    ImagePart,
    Message,
    Part,
    TextPart,
)

SUMMARY_TASK = (
    "Summarise the conversation that follows, so that it can be continued from the summary alone. "
    "Keep names, numbers, decisions, results of tools, what the user asked for, and what is still "
    "to be done."
)
SUMMARY_REQUEST = (
    "<conversation>\n{}\n</conversation>\n\n"
    "Write the summary of this conversation. Do not answer it."
)
"""What the user asks. Small models answer the conversation if nothing follows it."""
SUMMARY_HEADING = "Summary of the conversation so far:\n"
_LEFT_OUT = "[…]"
_LARGEST_SHARE = 4
"""One entry of a transcript has at most this part, a quarter, of the room for all of them."""


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

    def applied_to(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with its own instructions and these messages.

        It may be compacted again, when turns follow.
        """
        compaction = request.compaction
        if compaction is None:
            return replace(request, messages=self.messages)
        own = request.messages[: compaction.instructions]
        again = replace(
            compaction,
            leading=len(own) + len(self.leading),
            has_summary=bool(self.summary),
        )
        return replace(request, messages=(*own, *self.messages), compaction=again)


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


def _part(part: Part) -> str:
    match part:
        case TextPart(text=text):
            return text
        case ImagePart():
            return "[an image]"
        case AudioPart():
            return "[a sound]"
        case FilePart():
            return "[a file]"


def shortened(text: str, most: int) -> str:
    """Return the text without its middle, if it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    half = max(most - len(_LEFT_OUT), 0) // 2
    return f"{text[:half]}{_LEFT_OUT}{text[len(text) - half :]}"
