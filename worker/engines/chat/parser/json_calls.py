"""Calls that models write as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from inference_site.core.domain.request import Tool
from worker.engines.chat.parser.output import Markers, Output, Reading, Source, ToolFormat

_ESCAPE_OR_END = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_SCALAR = re.compile(r"[^\s,\]}]*")


class Nesting:
    """Finds the end of one value. With ``in_python``, single quotes and round brackets count too.

    ``depth`` is the number of open brackets before the first character.
    """

    def __init__(self, in_python: bool = False, depth: int = 0) -> None:
        self._outside = re.compile(r"[\"'(){}\[\]]" if in_python else r'["{}\[\]]')
        self._depth = depth
        self._quote = ""
        self._escaped = False
        self._scalar = False
        self._begun = depth > 0

    def end_in(self, text: str, at: int = 0) -> int:
        """Scan the text from this offset; return the end of the value, or -1 if it continues."""
        if not self._begun and at < len(text):
            self._begun = True
            self._scalar = self._outside.match(text, at) is None
        if self._scalar:
            found = _SCALAR.match(text, at)
            end = found.end() if found else at
            return end if end < len(text) else -1
        while at < len(text):
            if self._escaped:  # Only in quotes.
                self._escaped = False
                at += 1
                continue
            ends = _ESCAPE_OR_END[self._quote] if self._quote else self._outside
            found = ends.search(text, at)
            if found is None:
                return -1
            at = found.end()
            if found[0] == "\\":
                self._escaped = True
            elif found[0] in "\"'":
                self._quote = "" if self._quote else found[0]
            else:
                self._depth += 1 if found[0] in "({[" else -1
            if not self._quote and self._depth <= 0:
                return at
        return -1


_ARGUMENTS = frozenset({"arguments", "parameters"})
_KNOWN = _ARGUMENTS | {"name", "type", "id"}
_MAX_HELD = 64 * 1024
"""Characters of an object that are held back until it is known whether it is a call."""


def read_call(
    source: Source, output: Output, names: Collection[str] | None = None
) -> Reading[bool]:
    """Read an object that is a call, after any whitespace; return whether it was one.

    If it is no call, nothing is read. With ``names``, only calls of these functions count, and the
    first key that a call does not have decides that the object is none.

    The arguments are streamed if the name comes before them. Malformed text after the arguments is
    left in the source.
    """
    return (yield from _ObjectCall(source, output, names).read())


class _ObjectCall:
    def __init__(self, source: Source, output: Output, names: Collection[str] | None) -> None:
        self._source, self._output, self._names = source, output, names
        self._name: str | None = None
        self._arguments: str | None = None
        self._is_sent = False

    def read(self) -> Reading[bool]:
        at = yield from self._source.after_spaces(0)
        if (yield from self._source.character(at)) != "{":
            return False
        at += 1
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

    def _member(self, at: int) -> Reading[int]:
        """Scan a key and its value, or send the value if it is the arguments of a known name.

        Return the offset after them, -1 if this is no call or the arguments are incomplete.
        """
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
            self._begin()
            self._source.take(at)
            if not (yield from stream_object(self._source, self._output)):
                return -1
            self._output.end_call()
            return 0
        end = yield from self._value_end(at)
        if end <= at:
            return -1
        value = self._source.text[at:end]
        if key == "name" and not self._is_sent:
            self._name = _string(value)
            if not self._name or (self._names is not None and self._name not in self._names):
                return -1
        elif key in _ARGUMENTS and not self._is_sent:
            self._arguments = value
        return end

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
            value = self._arguments
            if value is None or value == "null":
                value = "{}"
            text = _string(value)
            if text is not None and text.lstrip().startswith("{"):  # An object in a string.
                value = text
            self._output.arguments(value)
            self._output.end_call()
        else:
            self._source.take(end)
        return True

    def _value_end(self, at: int) -> Reading[int]:
        """Return the end of the value at this offset, -1 if the text ends or it is too long."""
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
    """Stream the next object as arguments; return whether it is complete."""
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
    """Return the value of a JSON string; None if it is no string."""
    try:
        text = json.loads(value, strict=False)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(text, str) else None


_HERMES_ENDS = Markers(["</tool_call>"])
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_MAX_HEAD = 512


def _read_hermes(
    source: Source, output: Output, tools: Sequence[Tool], start: str
) -> Reading[bool]:
    is_call = False
    while (yield from read_call(source, output)):
        is_call = True
    if is_call:
        yield from source.spaces()
        yield from source.starts_with(_HERMES_ENDS)
    return is_call


HERMES = ToolFormat("hermes", _read_hermes, starts=("<tool_call>",), tags=("</tool_call>",))


def _read_llama3(
    source: Source, output: Output, tools: Sequence[Tool], start: str
) -> Reading[bool]:
    # Without the tag, an answer in JSON is only a call if it names a tool of the request.
    names = None if start else {tool.name for tool in tools}
    is_call = False
    while (yield from read_call(source, output, names)):
        is_call = True
        yield from source.spaces()
        if (yield from source.character(0)) in (";", ","):
            source.take(1)
    return is_call


LLAMA3_JSON = ToolFormat(
    "llama3_json", _read_llama3, starts=("<|python_tag|>",), tags=("<|eom_id|>",), bare_start="{"
)


def _read_mistral(
    source: Source, output: Output, tools: Sequence[Tool], start: str
) -> Reading[bool]:
    at = yield from source.after_spaces(0)
    if (yield from source.character(at)) == "[":
        return (yield from _array(source, output, at + 1))
    head = yield from source.match(_NAMED, _MAX_HEAD)
    if head is None:
        return False
    source.take(head.end())
    output.begin_call(head[1])
    if (yield from stream_object(source, output)):
        output.end_call()
    return True


def _array(source: Source, output: Output, at: int) -> Reading[bool]:
    """Read the calls of an array after its bracket, which ends at this offset."""
    first = yield from source.after_spaces(at)
    if (yield from source.character(first)) != "{":
        return False
    bracket = source.take(at)
    is_call = False
    while (yield from read_call(source, output)):
        is_call = True
        yield from source.spaces()
        separator = yield from source.character(0)
        if separator in (",", "]"):
            source.take(1)
        if separator != ",":
            break
    if not is_call:
        output.text(bracket)
    return is_call


MISTRAL = ToolFormat(
    "mistral", _read_mistral, starts=("[TOOL_CALLS]",), tags=("[ARGS]", "[CALL_ID]")
)


_START, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_HEAD = re.compile(
    rf"\s*(?:function{_SEPARATOR}\s*([^\s<`{{]+)|([^\s<`{{]+){_SEPARATOR})\s*(?:```(?:json)?\s*)?(?={{)"
)
_FENCE = Markers(["```"])
_CALLS, _CALL_ENDS, _ENDS = Markers([_CALL]), Markers([_CALL_END]), Markers([_END])


def _read(source: Source, output: Output, tools: Sequence[Tool], start: str) -> Reading[bool]:
    is_call = start == _CALL and (yield from _call(source, output))
    while start == _START or is_call:
        yield from source.spaces()
        if (yield from source.starts_with(_CALLS)) is None:
            break
        if not (yield from _call(source, output)):
            break
        is_call = True
    if is_call:
        yield from source.starts_with(_ENDS)
    return is_call


def _call(source: Source, output: Output) -> Reading[bool]:
    """Read a call after its start tag; return False, with nothing read, if it is none."""
    head = yield from source.match(_HEAD, _MAX_HEAD)
    if head is None:
        return False
    source.take(head.end())
    output.begin_call(head[1] or head[2])
    if (yield from stream_object(source, output)):
        output.end_call()
        yield from source.spaces()
        yield from source.starts_with(_FENCE)
        yield from source.spaces()
        yield from source.starts_with(_CALL_ENDS)
    return True


DEEPSEEK = ToolFormat(
    "deepseek",
    _read,
    starts=(_START, _CALL),
    tags=(_END, _CALL_END, _SEPARATOR),
)
