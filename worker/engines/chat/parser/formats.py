"""The tool formats by name, the syntax of a chat template, and prompts that end in reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from inference_site.core.domain.request import Tool
from worker.engines.chat.parser.json_calls import DEEPSEEK, HERMES, LLAMA3_JSON, MISTRAL, Nesting
from worker.engines.chat.parser.output import (
    Markers,
    Output,
    Reading,
    Reasoning,
    Source,
    Syntax,
    ToolFormat,
)
from worker.engines.chat.parser.parser import CHANNEL, REASONING_CHANNELS

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
_PYTHONIC_ENDS = Markers(["<|tool_call_end|>"])


def _read_pythonic(
    source: Source, output: Output, tools: Sequence[Tool], start: str
) -> Reading[bool]:
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
        yield from source.starts_with(_PYTHONIC_ENDS)
    return is_call


def _call(source: Source, output: Output, at: int, names: set[str] | None) -> Reading[str | None]:
    """Read the call at this offset and the separator after it; return that, or None for no call."""
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
        # Text that cannot become a function's name, such as JSON, is not held back.
        may_be_head = len(text) < _MAX_HEAD and re.fullmatch(r"[\w.\s]*", text)
        if found or source.has_ended or not may_be_head:
            return found
        yield


def _end(source: Source, begin: int) -> Reading[int | None]:
    """Return the offset after the bracket that ends the arguments at this offset."""
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
        value = json.loads(" ".join(pieces) + "}")
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None


def _piece(token: re.Match[str], depth: int) -> str | None:
    """Return one token as JSON; None if it is not part of a plain value."""
    match token.lastgroup:
        case "text":
            return json.dumps(_ESCAPE.sub(_unescaped, token["text"][1:-1]), ensure_ascii=False)
        case "number":
            # JSON has digits on both sides of a point.
            number = re.sub(r"\.(?!\d)", ".0", token["number"])
            return re.sub(r"^(-?)\.", r"\g<1>0.", number)
        case "word" if depth == 0 and token.string[token.end() :].startswith("="):
            return json.dumps(token["word"])
        case "word":
            return _WORDS.get(token["word"], "null" if token["word"] == "null" else None)
        case _ if token["mark"] == "=":
            return ":" if depth == 0 else None
        case _:
            return _MARKS.get(token["mark"], token["mark"])


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
    _read_pythonic,
    starts=("<|tool_call_start|>", "<|python_tag|>"),
    tags=("<|tool_call_end|>", "<|eom_id|>"),
    bare_start="[",
)


_START, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"\s*([^\s<>]+)\s*>")
_MAX_NAME = 256
_NEXT = f"\n{_PARAMETER}"
"""Ends a value whose own end tag the model forgot, if it begins a parameter of the tool."""
_FUNCTIONS, _ENDS = Markers([_FUNCTION]), Markers([_END])
_INSIDE = Markers([_PARAMETER, _FUNCTION_END])
_VALUE_ENDS = Markers([_PARAMETER_END, _FUNCTION_END, _NEXT])
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def _read_tags(source: Source, output: Output, tools: Sequence[Tool], start: str) -> Reading[bool]:
    is_call = start == _FUNCTION and (yield from _function(source, output, tools))
    while not (start == _FUNCTION and not is_call):
        at = yield from source.after_spaces(0)
        if (yield from source.character(at)) != "<":
            break
        yield from source.spaces()
        if (yield from source.starts_with(_FUNCTIONS)) is None:
            break
        if not (yield from _function(source, output, tools)):
            break
        is_call = True
    if is_call:
        yield from source.spaces()
        yield from source.starts_with(_ENDS)
    return is_call


def _function(source: Source, output: Output, tools: Sequence[Tool]) -> Reading[bool]:
    """Read a function after its start; return False, with nothing read, if it has no name."""
    head = yield from source.match(_NAME, _MAX_NAME)
    if head is None:
        return False
    source.take(head.end())
    output.begin_call(head[1])
    parameters = next((tool.parameters for tool in tools if tool.name == head[1]), {})
    properties = parameters.get("properties")
    schemas = properties if isinstance(properties, dict) else {}
    is_first, tag = True, None
    while True:
        if tag != _NEXT:
            yield from source.spaces()
            tag = yield from source.starts_with(_INSIDE)
        if tag in (_PARAMETER, _NEXT):
            tag = yield from _parameter(source, output, schemas, is_first)
            is_first = is_first and tag is None
        if tag not in (_PARAMETER_END, _NEXT):
            break
    if tag == _FUNCTION_END or not source.has_ended:
        output.arguments("{}" if is_first else "}")
        output.end_call()
    return True


def _parameter(
    source: Source, output: Output, schemas: dict[str, Any], is_first: bool
) -> Reading[str | None]:
    """Read a parameter into the output; return the tag that ended it, or None without any."""
    head = yield from source.match(_NAME, _MAX_NAME)
    if head is None:
        return None
    source.take(head.end())
    pieces: list[str] = []
    while (end := (yield from source.copy_until(_VALUE_ENDS, pieces.append))) == _NEXT:
        following = yield from source.match(_NAME, _MAX_NAME)
        if following is not None and following[1] in schemas:
            break
        pieces.append(_NEXT)
    if end is not None:
        schema = schemas.get(head[1])
        value = _value("".join(pieces), schema if isinstance(schema, dict) else {})
        key = json.dumps(head[1], ensure_ascii=False)
        output.arguments(f"{'{' if is_first else ', '}{key}: {value}")
    return end


def _value(text: str, schema: dict[str, Any]) -> str:
    """Return the value as JSON, without the line breaks beside its tags."""
    text = text.removeprefix("\n").removesuffix("\n")
    bare = text.strip()
    types = _types(schema)
    if types == {"string", "null"} and bare in ("null", "None"):
        return "null"
    if not types or not types <= {"string", "null"}:
        try:
            value = json.loads(_PYTHON.get(bare, text))
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            pass
        if bare.startswith(("{", "[")) and (found := to_json(f"value={bare}")) is not None:
            return json.dumps(json.loads(found)["value"], ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _types(schema: dict[str, Any]) -> set[str]:
    """Return the types of JSON that a schema allows, as far as it names them; empty for any."""
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    types: set[str] = set()
    for part in alternatives if isinstance(alternatives, list) else [schema]:
        named = part.get("type") if isinstance(part, dict) else None
        if named is None and isinstance(part, dict) and part.keys() & {"enum", "const"}:
            values = part.get("enum", [part.get("const")])
            is_text = isinstance(values, list) and all(isinstance(value, str) for value in values)
            named = "string" if is_text else None
        if not isinstance(named, str | list):
            return set()
        types |= {named} if isinstance(named, str) else {str(name) for name in named}
    return types


QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    _read_tags,
    starts=(_START, _FUNCTION),
    tags=(_END, _FUNCTION_END, _PARAMETER_END),
)


TOOL_FORMATS = {
    tool_format.name: tool_format
    for tool_format in (HERMES, MISTRAL, LLAMA3_JSON, PYTHONIC, QWEN3_CODER, DEEPSEEK)
}
HARMONY = "harmony"
"""A tool format too, but the whole output is in it."""

_TOOL_TRACES = (
    (("<function=", "<parameter="), QWEN3_CODER),
    (("<tool_call>",), HERMES),
    (("[TOOL_CALLS]",), MISTRAL),
    (("tool▁calls▁begin",), DEEPSEEK),
    (("<|tool_call_start|>",), PYTHONIC),
    (("<|python_tag|>",), LLAMA3_JSON),
    (('"parameters":', "<|eot_id|>"), LLAMA3_JSON),
)
_REASONING_TRACES = (
    ("</think>", Reasoning()),
    ("[/THINK]", Reasoning("[THINK]", "[/THINK]")),
    ("</seed:think>", Reasoning("<seed:think>", "</seed:think>")),
)

_TAG = re.compile(r"<[^\s<>]+>|\[/?[A-Z_]{2,}\]")
"""A tag of any format."""
_MAX_BEGUN = 256
"""Characters of a reasoning that a prompt may begin. After more, it is a text about such tags."""
_HARMONY_END = re.compile(r"<\|channel\|>\s*([\w-]+)[^<]*<\|message\|>([^<]*)\Z")
_NAMED_END = re.compile(rf"{re.escape(CHANNEL)}([A-Za-z0-9_-]+)([^<]*)\Z")


def syntax_of(template: str) -> Syntax:
    """Return the syntax that a chat template shows."""
    if "<|channel|>" in template and "<|message|>" in template:
        return Syntax(channels="harmony")
    return Syntax(
        next((reasoning for trace, reasoning in _REASONING_TRACES if trace in template), None),
        next((found for all_, found in _TOOL_TRACES if all(t in template for t in all_)), None),
        "named" if CHANNEL in template else "tags",
    )


def ends_in_reasoning(prompt: str, syntax: Syntax) -> bool:
    """Whether the text after this prompt is reasoning.

    It is when the last start tag comes after the last end tag, at most 256 characters before the
    end, with nothing after it that looks like a tag.
    """
    match syntax.channels:
        case "harmony":
            return _last_channel(_HARMONY_END, prompt)
        case "named":
            return _last_channel(_NAMED_END, prompt)
    if syntax.reasoning is None:
        return False
    tail = prompt[-_MAX_BEGUN - len(syntax.reasoning.start) :]
    start = tail.rfind(syntax.reasoning.start)
    if start < 0:
        return False
    after = tail[start + len(syntax.reasoning.start) :]
    return syntax.reasoning.end not in after and _TAG.search(after) is None


def _last_channel(pattern: re.Pattern[str], prompt: str) -> bool:
    tail = prompt[-2 * _MAX_BEGUN :]
    found = pattern.search(tail)
    return bool(found and found[1].lower() in REASONING_CHANNELS and len(found[2]) <= _MAX_BEGUN)
