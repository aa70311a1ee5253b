"""Calls that are JSON objects: ``{"name": …, "arguments": {…}}``, in any order of the keys."""

from __future__ import annotations

import json
from collections.abc import Collection

from worker.engines.chat.parser.nesting import Nesting
from worker.engines.chat.parser.output import Output
from worker.engines.chat.parser.source import Reading, Source

_ARGUMENTS = frozenset({"arguments", "parameters"})
_KNOWN = _ARGUMENTS | {"name", "type", "id"}
_MAX_HELD = 64 * 1024
"""Characters that may come before it is clear whether an object is a call."""


def read_call(
    source: Source, output: Output, names: Collection[str] | None = None
) -> Reading[bool]:
    """Read an object that is a call, after any white space; return whether it was one.

    Nothing is read of what is none. With ``names``, only calls of these are; then an object with
    other keys than a call has is none either, which is clear at its first key.

    The arguments go out as they come when the name comes before them. What is malformed after the
    arguments is left for whoever reads on.
    """
    return (yield from _ObjectCall(source, output, names).read())


class _ObjectCall:
    def __init__(self, source: Source, output: Output, names: Collection[str] | None) -> None:
        self._source, self._output, self._names = source, output, names
        self._name: str | None = None
        self._arguments: str | None = None
        self._is_sent = False

    def read(self) -> Reading[bool]:
        at = yield from self._opened()
        while at >= 0:
            at = yield from self._source.after_spaces(at)
            if (yield from self._source.character(at)) == "}":
                return self._close(at + 1)
            at = yield from self._member(at)
            if at < 0:
                break
            at = yield from self._source.after_spaces(at)
            separator = yield from self._source.character(at)
            if separator == "}":
                return self._close(at + 1)
            at = at + 1 if separator == "," else -1
        return self._is_sent

    def _opened(self) -> Reading[int]:
        at = yield from self._source.after_spaces(0)
        return at + 1 if (yield from self._source.character(at)) == "{" else -1

    def _member(self, at: int) -> Reading[int]:
        """Follow a key and its value; return the place after them, -1 if they make no call."""
        end = yield from self._value_end(at)
        key = _string(self._source.text[at:end]) if end > at else None
        if key is None or (self._names is not None and key not in _KNOWN):
            return -1
        at = yield from self._source.after_spaces(end)
        if (yield from self._source.character(at)) != ":":
            return -1
        at = yield from self._source.after_spaces(at + 1)
        first = yield from self._source.character(at)
        if key in _ARGUMENTS and self._name is not None and first == "{" and not self._is_sent:
            return (yield from self._stream(at))
        end = yield from self._value_end(at)
        if end <= at or not self._note(key, self._source.text[at:end]):
            return -1
        return end

    def _note(self, key: str, value: str) -> bool:
        """Keep what matters of a member; return False if the object is no call."""
        if self._is_sent:
            return True
        if key == "name":
            self._name = _string(value)
            if not self._name or (self._names is not None and self._name not in self._names):
                return False
        elif key in _ARGUMENTS:
            self._arguments = value
        return True

    def _stream(self, at: int) -> Reading[int]:
        """Send the arguments as they come; return the place after them."""
        self._begin()
        self._source.take(at)
        if not (yield from stream_object(self._source, self._output)):
            return -1
        self._output.end_call()
        return 0

    def _begin(self) -> None:
        self._is_sent = True
        self._output.begin_call(self._name or "")

    def _close(self, end: int) -> bool:
        """End the object at its last bracket; return whether it is a call."""
        if not self._is_sent:
            if self._name is None:
                return False
            self._source.take(end)
            self._begin()
            self._output.arguments(_as_object(self._arguments))
            self._output.end_call()
        else:
            self._source.take(end)
        return True

    def _value_end(self, at: int) -> Reading[int]:
        """Return where the value at this place ends, -1 if the text or the patience does first."""
        nesting, seen = Nesting(), at
        while True:
            end = nesting.end_in(self._source.text, seen)
            if end >= 0:
                return end if end <= _MAX_HELD else -1
            seen = len(self._source.text)
            if self._source.has_ended or seen > _MAX_HELD:
                return -1
            yield


def stream_object(source: Source, output: Output) -> Reading[bool]:
    """Send the object that comes next as arguments; return whether it is complete."""
    nesting = Nesting()
    while True:
        end = nesting.end_in(source.text)
        output.arguments(source.take(end if end >= 0 else len(source.text)))
        if end >= 0:
            return True
        if source.has_ended:
            return False
        yield


def _string(value: str) -> str | None:
    """Return what a JSON string says; None for what is no string."""
    try:
        text = json.loads(value, strict=False)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(text, str) else None


def _as_object(value: str | None) -> str:
    """Return arguments that are an object even where the model wrote nothing, or a string of it."""
    if value is None or value == "null":
        return "{}"
    text = _string(value)
    return text if text is not None and text.lstrip().startswith("{") else value
