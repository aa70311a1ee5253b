"""The text that parsers read, the deltas that they write, and the syntax of a model's output."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from inference_site.core.domain.deltas import ReasoningDelta, TextDelta, TokenLogprob, ToolCallDelta
from inference_site.core.domain.request import Tool
from worker.engines.chat.tools import new_call_id, whole_characters

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A generator that yields when it needs more text, and returns a T."""

_SPACES = re.compile(r"\s*")


class Markers:
    """A set of texts to search for. Of two with the same beginning the shorter one matches."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(texts) - {""}
        ordered = sorted(self.texts, key=lambda text: (len(text), text))
        nothing = r"(?!)"
        self.whole = re.compile("|".join(map(re.escape, ordered)) or nothing)
        # Matches a whole marker, or a prefix of one at the end of the text.
        self.begun = re.compile("|".join(map(_begun, ordered)) or nothing)


def _begun(text: str) -> str:
    """Return a pattern that matches the text, or a prefix of it at the end of the subject."""
    pattern = ""
    for character in reversed(text[1:]):
        pattern = rf"(?:\Z|{re.escape(character)}{pattern})"
    return re.escape(text[0]) + pattern


class Source:
    """The received text that was not read yet; it begins at the character ``position``.

    ``has_ended``: no more text will come.
    """

    __slots__ = ("has_ended", "position", "text")

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.has_ended = False

    def take(self, length: int) -> str:
        """Read this number of characters, which must have come."""
        taken, self.text = self.text[:length], self.text[length:]
        self.position += len(taken)
        return taken

    def copy_until(self, markers: Markers, put: Callable[[str], None]) -> Reading[str | None]:
        """Pass the text before the first marker to ``put``, as it comes.

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
        # The beginning of a marker was none, but may contain another marker.
        if found := markers.whole.search(self.text):
            return self._copied(found, put)
        put(self.take(len(self.text)))
        return None

    def _copied(self, found: re.Match[str], put: Callable[[str], None]) -> str:
        if before := found.start():
            put(self.take(before))
        return self.take(len(found[0]))

    def starts_with(self, markers: Markers) -> Reading[str | None]:
        """Read a marker if it comes next, and return it; else read nothing and return None."""
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
        """Match the pattern within ``limit`` characters; read nothing.

        More text must not change a match of the pattern.
        """
        while True:
            found = pattern.match(self.text, 0, limit)
            if found or self.has_ended or len(self.text) >= limit:
                return found
            yield

    def character(self, at: int) -> Reading[str]:
        """Return the character at this offset, empty past the end; read nothing."""
        while at >= len(self.text):
            if self.has_ended:
                return ""
            yield
        return self.text[at]

    def after_spaces(self, at: int) -> Reading[int]:
        """Return the offset of the first non-space character from ``at`` on; read nothing."""
        while True:
            found = _SPACES.match(self.text, at)
            at = found.end() if found else at
            if at < len(self.text) or self.has_ended:
                return at
            yield


ParsedDelta = TextDelta | ReasoningDelta | ToolCallDelta


class Output:
    """Collects deltas and the state of the answer.

    Whitespace at the end of the content is held back: before a call it is dropped. Calls after the
    first ``max_calls`` are dropped, and those of other tools than ``names``.

    ``calls`` is the number of calls; ``call_is_open``: the last one is not complete;
    ``in_reasoning``: the next text is reasoning; ``has_text``: there is content.
    """

    def __init__(
        self, source: Source, index: int, max_calls: int, names: Collection[str] | None = None
    ) -> None:
        self._source, self._index = source, index
        self._max_calls, self._names = max_calls, names
        self._deltas: list[ParsedDelta] = []
        self._spaces = ""
        self._is_dropping = self._has_arguments = False
        self._logprobs: deque[tuple[int, tuple[TokenLogprob, ...]]] = deque()
        self._read: tuple[TokenLogprob, ...] = ()
        self.calls = 0
        self.call_is_open = False
        self.in_reasoning = False
        self.has_text = False

    def take(self) -> list[ParsedDelta]:
        """Remove and return the collected deltas."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def add_logprobs(self, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Add the log probabilities of the text that the source received last."""
        self._logprobs.append((self._source.position + len(self._source.text), logprobs))

    def text(self, piece: str) -> None:
        """Add content that was just read."""
        shown = piece.rstrip()
        if shown:
            self.has_text = True
            self._read_logprobs(len(piece), len(piece) - len(shown))
            self._send(self._spaces + shown)
            self._spaces = ""
        self._spaces += piece[len(shown) :]
        self._read_logprobs(len(piece) - len(shown), 0)

    def reasoning(self, piece: str) -> None:
        """Add reasoning."""
        self._deltas.append(ReasoningDelta(piece, self._index))

    def begin_call(self, name: str) -> None:
        """Add the beginning of a call."""
        self._spaces, self._read = "", ()
        name = whole_characters(name)
        is_other = self._names is not None and name not in self._names
        self._is_dropping, self._has_arguments = is_other or self.calls >= self._max_calls, False
        if self._is_dropping:
            return
        self.call_is_open = True
        self._deltas.append(ToolCallDelta(self.calls, "", new_call_id(), name, self._index))
        self.calls += 1

    def arguments(self, piece: str) -> None:
        """Add a piece of the call's arguments."""
        if piece and not self._is_dropping:
            self._has_arguments = True
            piece = whole_characters(piece)
            self._deltas.append(ToolCallDelta(self.calls - 1, piece, index=self._index))

    def end_call(self) -> None:
        """Mark the call, if one is open, as complete; without arguments it has an empty object."""
        if self.call_is_open and not self._has_arguments:
            self.arguments("{}")
        self.call_is_open = False

    def end(self) -> None:
        """Add the whitespace at the end of the content."""
        if self._spaces:
            self._send(self._spaces)

    def _send(self, text: str) -> None:
        self._deltas.append(TextDelta(text, self._index, self._read))
        self._read = ()

    def _read_logprobs(self, before: int, after: int) -> None:
        """Take the entries of the tokens that end within the last ``before`` characters.

        Entries that end within the last ``after`` characters stay for the next call.
        """
        position = self._source.position
        while self._logprobs and self._logprobs[0][0] <= position - after:
            end, logprobs = self._logprobs.popleft()
            if end > position - before:
                self._read += logprobs


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The tags of reasoning.

    ``header`` is a text at the beginning of every reasoning, which is dropped. ``reenters``:
    reasoning may follow content; otherwise its tags are text there. ``has_calls``: calls inside the
    reasoning are calls; otherwise they are reasoning.
    """

    start: str = "<think>"
    end: str = "</think>"
    header: str = ""
    reenters: bool = False
    has_calls: bool = False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of a model's calls.

    ``read`` reads the calls after a start tag, its last argument, which is empty for calls without
    one. It returns whether there were any; text that it does not read is content. ``starts`` are
    the tags that begin calls. ``tags`` are all others; a misplaced one is dropped. ``bare_start``
    is the first character of calls without a tag, which are only recognised at the beginning of
    the content.
    """

    name: str
    read: Callable[[Source, Output, Sequence[Tool], str], Reading[bool]]
    starts: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    bare_start: str = ""


@dataclass(frozen=True, slots=True)
class Syntax:
    """The syntax of a model's output.

    ``channels``: with ``tags``, tags enclose reasoning; with ``named``, ``<|channel>NAME`` begins
    reasoning or content; ``harmony`` is the format of this name, which includes calls, without a
    ``tool_format``.
    """

    reasoning: Reasoning | None = None
    tool_format: ToolFormat | None = None
    channels: str = "tags"

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags of reasoning and calls; in some vocabularies they are special tokens.

        Tags that end an answer are not among them.
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
        """The text that ends a reasoning and begins the answer; empty without reasoning."""
        match self.channels:
            case "harmony":
                return "<|end|><|start|>assistant<|channel|>final<|message|>"
            case "named":
                return "<channel|>"
            case _:
                return f"{self.reasoning.end}\n\n" if self.reasoning else ""
