"""What parsers read from and write to: the source, the output, and the syntax of a model."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from inference_site.domain.deltas import ReasoningDelta, TextDelta, TokenLogprob, ToolCallDelta
from inference_site.domain.request import Tool
from worker.engines.chat.tools import new_call_id

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A reader that comes to a T."""

_SPACES = re.compile(r"\s*")


class Markers:
    """A set of texts to look for. Of two that begin alike the shorter one wins."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(texts) - {""}
        ordered = sorted(self.texts, key=lambda text: (len(text), text))
        nothing = r"(?!)"
        self.whole = re.compile("|".join(map(re.escape, ordered)) or nothing)
        # Finds the first place where one is, or may be once more text has come.
        self.begun = re.compile("|".join(map(_begun, ordered)) or nothing)


def _begun(text: str) -> str:
    """Return a pattern of the text, or of any beginning of it at the end of what is searched."""
    pattern = ""
    for character in reversed(text[1:]):
        pattern = rf"(?:\Z|{re.escape(character)}{pattern})"
    return re.escape(text[0]) + pattern


class Source:
    """What has come and was not read: ``text``, which begins at the character ``position``.

    ``has_ended``: no more will come.
    """

    __slots__ = ("has_ended", "position", "text")

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.has_ended = False

    def take(self, length: int) -> str:
        """Read so many characters, which must be there."""
        taken, self.text = self.text[:length], self.text[length:]
        self.position += len(taken)
        return taken

    def copy_until(self, markers: Markers, put: Callable[[str], None]) -> Reading[str | None]:
        """Give what comes before the first of the markers to ``put``, as it comes.

        Return the marker, which is read too, or None at the end of the text.
        """
        begun = markers.begun
        while True:
            if text := self.text:
                found = begun.search(text)
                if found is None:
                    self.text = ""
                    self.position += len(text)
                    put(text)
                elif found[0] in markers.texts:
                    return self._copied(found, put)
                elif self.has_ended:
                    break
                elif before := found.start():
                    put(self.take(before))
            if self.has_ended:
                return None
            yield
        # What began like a marker was none, but another one may be inside of it.
        if found := markers.whole.search(self.text):
            return self._copied(found, put)
        put(self.take(len(self.text)))
        return None

    def _copied(self, found: re.Match[str], put: Callable[[str], None]) -> str:
        if before := found.start():
            put(self.take(before))
        return self.take(len(found[0]))

    def starts_with(self, markers: Markers) -> Reading[str | None]:
        """Read one of the markers if it comes next, and return it; read nothing if none does."""
        while True:
            found = markers.begun.match(self.text)
            if found and found[0] in markers.texts:
                return self.take(len(found[0]))
            if self.has_ended or (self.text and found is None):
                found = markers.whole.match(self.text)
                return self.take(len(found[0])) if found else None
            yield

    def spaces(self) -> Reading[str]:
        """Read white space and return it."""
        read = ""
        while True:
            found = _SPACES.match(self.text)
            read += self.take(found.end() if found else 0)
            if self.text or self.has_ended:
                return read
            yield

    def match(self, pattern: re.Pattern[str], limit: int) -> Reading[re.Match[str] | None]:
        """Match the pattern within so many characters; read nothing.

        The pattern must be one whose match cannot change when more text comes.
        """
        while True:
            found = pattern.match(self.text, 0, limit)
            if found or self.has_ended or len(self.text) >= limit:
                return found
            yield

    def character(self, at: int) -> Reading[str]:
        """Return the character so many places ahead, empty past the end; read nothing."""
        while at >= len(self.text):
            if self.has_ended:
                return ""
            yield
        return self.text[at]

    def after_spaces(self, at: int) -> Reading[int]:
        """Return the first place from this one on without white space; read nothing."""
        while True:
            found = _SPACES.match(self.text, at)
            at = found.end() if found else at
            if at < len(self.text) or self.has_ended:
                return at
            yield


ParsedDelta = TextDelta | ReasoningDelta | ToolCallDelta


class Output:
    """Collects deltas, and what is known of the answer so far.

    White space at the end of the content waits for what follows: before a call it is dropped.
    Calls past ``max_calls`` are read and dropped.

    ``calls`` is how many were put out; ``call_is_open``: the last one is not complete;
    ``in_reasoning``: what comes next is reasoning; ``has_text``: there is content.
    """

    def __init__(self, source: Source, index: int, max_calls: int) -> None:
        self._source, self._index, self._max_calls = source, index, max_calls
        self._deltas: list[ParsedDelta] = []
        self._spaces = ""
        self._is_dropping = False
        self._logprobs: deque[tuple[int, tuple[TokenLogprob, ...]]] = deque()
        self._read: tuple[TokenLogprob, ...] = ()
        self.calls = 0
        self.call_is_open = False
        self.in_reasoning = False
        self.has_text = False

    def take(self) -> list[ParsedDelta]:
        """Return what there is, and forget it."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def add_logprobs(self, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Note the log probabilities of what the source got last."""
        self._logprobs.append((self._source.position + len(self._source.text), logprobs))

    def text(self, piece: str) -> None:
        """Put out content that was just read."""
        shown = piece.rstrip()
        if shown:
            self.has_text = True
            self._read_logprobs(len(piece), len(piece) - len(shown))
            self._send(self._spaces + shown)
            self._spaces = ""
        self._spaces += piece[len(shown) :]
        self._read_logprobs(len(piece) - len(shown), 0)

    def reasoning(self, piece: str) -> None:
        """Put out reasoning."""
        self._deltas.append(ReasoningDelta(piece, self._index))

    def begin_call(self, name: str) -> None:
        """Put out the beginning of a call."""
        self._spaces, self._read = "", ()
        self._is_dropping = self.calls >= self._max_calls
        if self._is_dropping:
            return
        self.call_is_open = True
        name = name.encode("utf-8", "replace").decode()  # Half a surrogate pair is no character.
        self._deltas.append(ToolCallDelta(self.calls, "", new_call_id(), name, self._index))
        self.calls += 1

    def arguments(self, piece: str) -> None:
        """Put out a piece of the call's arguments."""
        if piece and not self._is_dropping:
            self._deltas.append(ToolCallDelta(self.calls - 1, piece, index=self._index))

    def end_call(self) -> None:
        """Note that the call is complete."""
        self.call_is_open = False

    def end(self) -> None:
        """Put out the white space that ends the content."""
        if self._spaces:
            self._send(self._spaces)

    def _send(self, text: str) -> None:
        self._deltas.append(TextDelta(text, self._index, self._read))
        self._read = ()

    def _read_logprobs(self, before: int, after: int) -> None:
        """Read those of the tokens that end between so many characters back and so many."""
        position = self._source.position
        while self._logprobs and self._logprobs[0][0] <= position - after:
            end, logprobs = self._logprobs.popleft()
            if end > position - before:
                self._read += logprobs


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The tags of reasoning.

    ``header`` is a text that begins every reasoning and is left out. ``reenters``: reasoning may
    come again once there is content; otherwise its tags are text there. ``has_calls``: calls in the
    reasoning are calls; otherwise they are thoughts.
    """

    start: str = "<think>"
    end: str = "</think>"
    header: str = ""
    reenters: bool = False
    has_calls: bool = False


CallReader = Callable[[Source, Output, Sequence[Tool], str], Reading[bool]]
"""Reads the calls after a start, its last argument; empty for calls that have none.

It returns whether there were any. What it does not read is content.
"""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    ``starts`` are the tags that begin them. ``tags`` are all others: wherever one of them stands
    without a meaning, it is left out. ``bare_start`` is how calls begin that have no tag; these are
    only looked for at the beginning of the content.
    """

    name: str
    read: CallReader
    starts: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    bare_start: str = ""


@dataclass(frozen=True, slots=True)
class Syntax:
    """What a model's output looks like.

    ``channels``: ``tags`` have one place for reasoning; ``named`` are ``<|channel>NAME``, of which
    some are reasoning; ``harmony`` are the messages of the format of this name, whose calls need no
    ``tool_format``.
    """

    reasoning: Reasoning | None = None
    tool_format: ToolFormat | None = None
    channels: str = "tags"

    @property
    def tags(self) -> tuple[str, ...]:
        """All texts that have a meaning; in some vocabularies they are special tokens.

        Those that end an answer are not among them.
        """
        match self.channels:
            case "harmony":
                return ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")
            case "named":
                tags: tuple[str, ...] = ("<|channel>", "<channel|>")
            case _:
                tags = (self.reasoning.start, self.reasoning.end) if self.reasoning else ()
        return tags + (
            (*self.tool_format.starts, *self.tool_format.tags) if self.tool_format else ()
        )

    @property
    def closing(self) -> str:
        """What ends a reasoning and begins the answer; empty if there is no reasoning."""
        match self.channels:
            case "harmony":
                return "<|end|><|start|>assistant<|channel|>final<|message|>"
            case "named":
                return "<channel|>"
            case _:
                return f"{self.reasoning.end}\n\n" if self.reasoning else ""
