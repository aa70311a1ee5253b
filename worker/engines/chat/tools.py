"""Tools of a chat: schemas of forced calls, their readers, and tools in the text of messages."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from inference_site.core.domain.deltas import ToolCallDelta
from inference_site.core.domain.request import (
    Constraint,
    GenerationRequest,
    Message,
    TextPart,
    Tool,
    ToolCall,
    objects_in,
)
from worker.engines.grammars import unnamed_schema

Schema = dict[str, Any]
_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems"}
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_SINGLE = {"items", "additionalProperties", "not", "if", "then", "else", "contains"}
_OPENING = {"$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "unevaluatedProperties"}
"""Keywords that may add properties to those in ``properties``."""
_ESCAPE_OR_CLASS = re.compile(r"\\.|\[\^?|[\].]|[^\x00-\x7f]", re.DOTALL)
_CHARACTERS = {r"\d": "0-9", r"\w": "A-Za-z0-9_", r"\s": " "}
"""White space is the space only: a JSON string has no others without an escape."""
_BESIDE_REFERENCE = {"$ref", "$defs", "definitions", "title", "description", "default", "examples"}
_URI = r"^[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9._~:/?#@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+$"
"""Links as RFC 3986 has them, without IPv6 addresses."""
_WHOLE = "whole-schema"
"""Name of the definition that replaces references to the whole schema."""


def arguments_schema(tool: Tool, pointer: str) -> Schema:
    """Return the schema of a forced call's arguments, to be placed at ``pointer`` of a schema.

    References are adapted to that place. Objects get ``additionalProperties: false`` by default:
    a forced model would invent properties.
    """

    def moved(reference: str) -> str:
        is_pointer = reference == "#" or reference.startswith("#/")
        return pointer + reference[1:] if is_pointer else reference

    given = unnamed_schema(tool.parameters or {"properties": {}})
    parameters = _with_references(given, moved)
    return _closed({"type": "object", **parameters})


def plain_schema(schema: Schema) -> Schema:
    """Return an equivalent schema that llama.cpp's converter can read.

    ``true`` becomes ``{}``; ``items: false`` beside ``prefixItems`` is dropped: it is llama.cpp's
    default; a reference to the whole schema becomes one to a definition; ``allOf`` becomes its
    parts, as llama.cpp takes it for an object, unless a reference leads to one of them; escapes of
    a pattern for classes of characters become these classes.
    """
    merges = not any("/allOf/" in str(inner.get("$ref")) for inner in objects_in(schema))
    plain = _plain(schema, merges=merges)
    named = _with_references(plain, lambda ref: f"#/$defs/{_WHOLE}" if ref == "#" else ref)
    if named == plain:
        return plain
    whole = {name: value for name, value in named.items() if name != "$defs"}
    return {**named, "$defs": {**named.get("$defs", {}), _WHOLE: whole}}


def _plain(schema: Schema, *, merges: bool) -> Schema:
    plain = _with_parts(schema, partial(_plain, merges=merges))
    if merges:
        plain = _merged(plain)
    if "prefixItems" in plain and plain.get("items") is False:
        del plain["items"]
    if isinstance(pattern := plain.get("pattern"), str):
        plain["pattern"] = _plain_pattern(pattern)
    return plain


def _merged(schema: Schema) -> Schema:
    """Return the schema with the keywords of its ``allOf``, if no keyword has two values there.

    One with a reference stays if it has other keywords than notes: llama.cpp would ignore these.
    """
    parts = schema.get("allOf")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return schema
    merged = {name: value for name, value in schema.items() if name != "allOf"}
    for part in parts:
        if any(merged.get(name, value) != value for name, value in part.items()):
            return schema
        merged |= part
    return schema if "$ref" in merged and not merged.keys() <= _BESIDE_REFERENCE else merged


def with_link_patterns(schema: Schema) -> Schema:
    """Return the schema with a pattern in place of each format ``uri`` that has none beside it.

    The llguidance of the wheel xllamacpp does not know this format, unlike the package llguidance.
    """
    changed = _with_parts(schema, with_link_patterns)
    if changed.get("format") == "uri":
        del changed["format"]
        changed.setdefault("pattern", _URI)
    return changed


def _plain_pattern(pattern: str) -> str:
    """Return the pattern without escapes that make llama.cpp's converter ignore it.

    One that allows whatever it does not name stays as it is, ignored: llama.cpp would read the
    quotation mark after the string as a part of it.
    """
    is_inside = is_open = False

    def plain(found: re.Match[str]) -> str:
        nonlocal is_inside, is_open
        match found[0]:
            case r"\d" | r"\w" | r"\s" as escape:
                characters = _CHARACTERS[escape]
                return characters if is_inside else f"[{characters}]"
            case "]":
                is_inside = False
            case "." | "[" | "[^" as piece if not is_inside:
                is_inside, is_open = piece != ".", is_open or piece != "["
            case piece if not (is_inside or piece.isascii()):
                return f"[{piece}]"  # llama.cpp would repeat the last byte of ``é+``.
        return found[0]

    changed = _ESCAPE_OR_CLASS.sub(plain, pattern)
    return pattern if is_open else changed


def _with_parts(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """Return a copy of the schema with ``change`` applied to its direct subschemas."""

    def part(value: Any) -> Any:
        return change(value) if isinstance(value, dict) else {} if value is True else value

    changed = dict(schema)
    for name, value in schema.items():
        if name in _SINGLE and isinstance(value, dict):
            changed[name] = change(value)
        elif name in _LISTS and isinstance(value, list):
            changed[name] = [part(each) for each in value]
        elif name in _BY_NAME and isinstance(value, dict):
            changed[name] = {key: part(each) for key, each in value.items()}
    return changed


def _with_references(schema: Schema, change: Callable[[str], str]) -> Schema:
    """Return the schema with ``change`` applied to each reference in it.

    References in a part with a name, its ``$id``, are relative to that part, and stay.
    """
    if not str(schema.get("$id", "#")).startswith("#"):
        return schema
    changed = _with_parts(schema, lambda part: _with_references(part, change))
    if isinstance(reference := changed.get("$ref"), str):
        changed["$ref"] = change(reference)
    return changed


def _closed(schema: Schema) -> Schema:
    closed = _with_parts(schema, _closed)
    if "properties" in closed and not _OPENING & closed.keys():
        closed.setdefault("additionalProperties", False)
    return closed


_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


def new_call_id() -> str:
    """Return a fresh id of a tool call."""
    return f"call_{secrets.token_hex(12)}"


def whole_characters(text: str) -> str:
    """Return a text of escapes with a question mark for each half of a surrogate pair.

    A model or a client may write half a pair, which UTF-8 cannot encode.
    """
    return text.encode("utf-8", "replace").decode()


def call_schema(tools: tuple[Tool, ...]) -> dict[str, Any]:
    """Return the JSON schema of one call of any of these tools."""
    if len(tools) == 1:
        return _call(tools[0], "#")
    return {"anyOf": [_call(tool, f"#/anyOf/{number}") for number, tool in enumerate(tools)]}


def forced_constraint(request: GenerationRequest) -> Constraint:
    """Return the constraint of an answer that must be a call."""
    schema = json.dumps(call_schema(request.tools))
    return request.forced_grammar or Constraint("json_schema", schema, request.tools_param)


def forced_reader(request: GenerationRequest, index: int) -> ForcedCall | ForcedText:
    """Return the reader of an answer that must be a call."""
    if request.forced_grammar is None:
        return ForcedCall(index)
    return ForcedText(request.tools[0].name, index)


def _call(tool: Tool, pointer: str) -> dict[str, Any]:
    arguments = arguments_schema(tool, f"{pointer}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


class ForcedCall:
    """Reads the call in the answer's text. A fold: the result does not depend on the pieces."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._held = ""
        self._begun = False
        self._depth = 0
        self._in_string = self._escaped = False
        self.is_complete = False

    def feed(self, text: str) -> list[ToolCallDelta]:
        """Take a piece of the text; return the deltas of the call that it completes."""
        if self._begun:
            return self._pieces(self._arguments(text))
        self._held += text
        head = _HEAD.match(self._held)
        if head is None:
            return []
        self._begun = True
        name = json.loads(head[1])
        first = ToolCallDelta(0, "", id=new_call_id(), name=name, index=self._index)
        return [first, *self._pieces(self._arguments(self._held[head.end() :]))]

    def _pieces(self, arguments: str) -> list[ToolCallDelta]:
        return [ToolCallDelta(0, arguments, index=self._index)] if arguments else []

    def _arguments(self, text: str) -> str:
        """Return the part of the text that belongs to the arguments, an object."""
        for position, character in enumerate(text):
            if self.is_complete:
                return text[:position]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                self.is_complete = self._depth == 0
        return text


class ForcedText:
    """Reads an answer that is the input of a custom tool's call; like ``ForcedCall``."""

    def __init__(self, name: str, index: int) -> None:
        self._name, self._index = name, index
        self.is_complete = False

    def feed(self, text: str) -> list[ToolCallDelta]:
        """Take a piece of the text; return the delta of the call."""
        if self.is_complete:
            return [ToolCallDelta(0, text, index=self._index, is_custom=True)]
        self.is_complete = True  # The grammar determines the end.
        call_id, name = new_call_id(), self._name
        return [ToolCallDelta(0, text, call_id, name, self._index, is_custom=True)]


_INTRODUCTION = """\
You can call these functions, each described by a JSON object:

{tools}

To call a function, answer with nothing but a JSON object:
{{"name": "...", "arguments": {{...}}}}
{several} If no function is needed, answer as usual."""
_SEVERAL = "To call several, write one object on each line."
_ONE = "Call one function at most."


def with_tools_in_text(request: GenerationRequest) -> GenerationRequest:
    """Return the request with its tools, calls and results in the texts of its messages.

    A forced call keeps its tools, which its constraint needs.
    """
    messages = tuple(_plain_turns(request.messages))
    if not request.tools:
        return replace(request, messages=messages)
    several = _SEVERAL if request.parallel_tool_calls else _ONE
    text = _INTRODUCTION.format(tools="\n".join(map(_described, request.tools)), several=several)
    return replace(
        request,
        messages=_with_system_text(messages, text),
        tools=request.tools if request.must_call else (),
    )


def _described(tool: Tool) -> str:
    described = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return json.dumps({k: v for k, v in described.items() if v is not None}, ensure_ascii=False)


def _with_system_text(messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """Return the messages with this text at the end of the system message."""
    if not messages or messages[0].role != "system":
        return (Message("system", text), *messages)
    first = messages[0]
    if first.parts:
        return (replace(first, parts=(*first.parts, TextPart(f"\n\n{text}"))), *messages[1:])
    return (replace(first, text=f"{first.text or ''}\n\n{text}".lstrip()), *messages[1:])


def _plain_turns(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages; calls become text, the results of a turn one message of the user."""
    names: dict[str, str] = {}
    results: list[str] = []
    for message in messages:
        if message.role == "tool":
            name = names.get(message.tool_call_id or "", message.name or "a function")
            results.append(f"The result of {name}:\n{message.all_text}")
            continue
        if results:
            yield Message("user", "\n\n".join(results))
            results = []
        names |= {call.id: call.name for call in message.tool_calls}
        if message.tool_calls:
            texts = filter(None, (message.all_text, *map(_call_text, message.tool_calls)))
            yield replace(message, text="\n".join(texts), parts=(), tool_calls=())
        else:
            yield message
    if results:
        yield Message("user", "\n\n".join(results))


def _call_text(call: ToolCall) -> str:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    text = json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)
    return whole_characters(text)
