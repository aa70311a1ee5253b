"""The text that has come and was not read yet, and ways to read it that wait for more.

The readers are generators: they yield whenever what has come does not decide how to go on, and are
resumed when there is more. So each reads as if all of the text were there, and what it finds cannot
depend on where the text was cut, as long as no decision is taken from the *absence* of text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

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
