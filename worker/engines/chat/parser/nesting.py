"""Where a value ends, in text that is cut anywhere: brackets and quotes, and nothing else."""

from __future__ import annotations

import re

_ESCAPE_OR_END = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_SCALAR = re.compile(r"[^\s,\]}]*")


class Nesting:
    """Follows one value. With ``in_python``, single quotes and round brackets count as well.

    ``depth`` is how many brackets are open before the first character.
    """

    def __init__(self, in_python: bool = False, depth: int = 0) -> None:
        self._outside = re.compile(r"[\"'(){}\[\]]" if in_python else r'["{}\[\]]')
        self._depth = depth
        self._quote = ""
        self._escaped = False
        self._scalar = False
        self._begun = depth > 0

    def end_in(self, text: str, at: int = 0) -> int:
        """Follow the text from this place on; return where the value ends, or -1 if it goes on."""
        if not self._begun and at < len(text):
            self._begun = True
            self._scalar = self._outside.match(text, at) is None
        if self._scalar:
            found = _SCALAR.match(text, at)
            end = found.end() if found else at
            return end if end < len(text) else -1
        while at < len(text):
            at = self._step_in_quotes(text, at) if self._quote else self._step(text, at)
            if not self._quote and self._depth <= 0 and at <= len(text):
                return at
        return -1

    def _step_in_quotes(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _ESCAPE_OR_END[self._quote].search(text, at)
        if found is None:
            return len(text) + 1
        if found[0] == "\\":
            self._escaped = True
        else:
            self._quote = ""
        return found.end()

    def _step(self, text: str, at: int) -> int:
        found = self._outside.search(text, at)
        if found is None:
            return len(text) + 1
        if found[0] in "\"'":
            self._quote = found[0]
        else:
            self._depth += 1 if found[0] in "({[" else -1
        return found.end()
