"""``[f(a=1), g(b="x")]`` as the whole answer or between tags: Llama 3.2 and 4, LFM2.

A call goes out when it is complete, because it is written anew as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from inference_site.domain.request import Tool
from worker.engines.chat.parser.nesting import Nesting
from worker.engines.chat.parser.output import Output
from worker.engines.chat.parser.source import Markers, Reading, Source
from worker.engines.chat.parser.syntax import ToolFormat

_HEAD = re.compile(r"\s*([A-Za-z_][\w.]*)\s*\(")
_MAX_HEAD, _MAX_HELD = 512, 256 * 1024
_TOKEN = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<number>-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)
    |(?P<word>[A-Za-z_]\w*)|(?P<mark>[=,:()\[\]{}]))\s*""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false"}
_MARKS = {"(": "[", ")": "]"}
_ENDS = Markers(["<|tool_call_end|>"])


def _read(source: Source, output: Output, tools: Sequence[Tool], start: str) -> Reading[bool]:
    at = yield from source.after_spaces(0)
    if (yield from source.character(at)) != "[":
        return False
    names = {tool.name for tool in tools} if not start else None
    bracket, is_call = at + 1, False
    while (end := (yield from _call(source, output, bracket, names))) is not None:
        is_call, bracket = True, 0
        if end != ",":
            break
    if is_call and start:
        yield from source.spaces()
        yield from source.starts_with(_ENDS)
    return is_call


def _call(source: Source, output: Output, at: int, names: set[str] | None) -> Reading[str | None]:
    """Read the call at this place and what follows it, and return the latter; None for no call."""
    head = yield from _head(source, at)
    if head is None or (names is not None and head[1] not in names):
        return None
    begin = head.end()
    end = yield from _end(source, begin)
    if end is None:
        return None
    arguments = to_json(source.text[begin : end - 1])
    if arguments is None:
        return None
    source.take(end)
    output.begin_call(head[1])
    output.arguments(arguments)
    output.end_call()
    yield from source.spaces()
    separator = yield from source.character(0)
    return source.take(1) if separator in (",", "]") and separator else ""


def _head(source: Source, at: int) -> Reading[re.Match[str] | None]:
    while True:
        found = _HEAD.match(source.text, at)
        text = source.text[at : at + _MAX_HEAD]
        if found or source.has_ended or len(text) == _MAX_HEAD or not _may_be_head(text):
            return found
        yield


def _may_be_head(text: str) -> bool:
    """Return whether only word characters have come, so that an answer in JSON does not wait."""
    return re.fullmatch(r"[\w.\s]*", text) is not None


def _end(source: Source, begin: int) -> Reading[int | None]:
    """Return the place after the bracket that ends the arguments from this place on."""
    nesting, seen = Nesting(in_python=True, depth=1), begin
    while True:
        end = nesting.end_in(source.text, seen)
        if end >= 0:
            return end if end <= _MAX_HELD else None
        seen = len(source.text)
        if source.has_ended or seen > _MAX_HELD:
            return None
        yield


def to_json(arguments: str) -> str | None:
    """Return keyword arguments as a JSON object; None if they are not all plain values."""
    pieces, at, depth = ["{"], 0, 0
    while at < len(arguments):
        token = _TOKEN.match(arguments, at)
        if token is None:
            return None
        at = token.end()
        piece = _piece(token, depth)
        if piece is None:
            return None
        if piece in ("]", "}") and pieces[-1] == ",":
            pieces.pop()
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(piece, 0)
        pieces.append(piece)
    if pieces[-1] == ",":
        pieces.pop()
    try:
        return json.dumps(json.loads(" ".join(pieces) + "}"), ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def _piece(token: re.Match[str], depth: int) -> str | None:
    """Return the JSON of one token; None for what no plain value has."""
    match token.lastgroup:
        case "text":
            return json.dumps(_ESCAPE.sub(_unescaped, token["text"][1:-1]), ensure_ascii=False)
        case "number":
            return _number(token["number"])
        case "word" if depth == 0 and token.string[token.end() :].startswith("="):
            return json.dumps(token["word"])
        case "word":
            return _WORDS.get(token["word"], "null" if token["word"] == "null" else None)
        case _ if token["mark"] == "=":
            return ":" if depth == 0 else None
        case _:
            return _MARKS.get(token["mark"], token["mark"])


def _number(text: str) -> str:
    """Return a number as JSON writes it: with digits on both sides of a point."""
    text = re.sub(r"\.(?!\d)", ".0", text)
    return re.sub(r"^(-?)\.", r"\g<1>0.", text)


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1]
    if len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number < 0x110000 and not 0xD800 <= number < 0xE000 else escape[0]
    if code in "\\\"'":
        return code
    return _ESCAPES.get(code, escape[0])


PYTHONIC = ToolFormat(
    "pythonic",
    _read,
    starts=("<|tool_call_start|>", "<|python_tag|>"),
    tags=("<|tool_call_end|>", "<|eom_id|>"),
    bare_start="[",
)
