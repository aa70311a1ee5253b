"""Tools of a chat: how a model is shown them, and how a call is forced."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from inference_site.domain.deltas import ToolCallDelta
from inference_site.domain.messages import Message, TextPart, ToolCall
from inference_site.domain.request import Constraint, GenerationRequest, Tool

Schema = dict[str, Any]
_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems"}
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_SINGLE = {"items", "additionalProperties", "not", "if", "then", "else", "contains"}
_OPENING = {"$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "unevaluatedProperties"}
"""Keywords beside which ``properties`` may not be all that an object has."""
_WHOLE = "whole-schema"
"""Name of the definition that a reference to the whole schema leads to."""


def arguments_schema(tool: Tool, pointer: str) -> Schema:
    """Return the schema of a forced call's arguments, for the place ``pointer`` of a schema.

    References lead to where the definitions are then. Objects that name their properties have no
    others, unless they say so: a model that is forced would invent some.
    """
    given = tool.parameters or {"properties": {}}
    return _closed({"type": "object", **_moved(given, pointer)})


def plain_schema(schema: Schema) -> Schema:
    """Return the same schema in the forms that llama.cpp reads.

    The schema ``true`` is ``{}``; ``prefixItems`` alone means what ``items: false`` beside it says
    elsewhere; and a reference to the whole leads to a definition.
    """
    plain = _plain(schema)
    named = _with_references(plain, _to_definition)
    if named == plain:
        return plain
    whole = {name: value for name, value in named.items() if name != "$defs"}
    return {**named, "$defs": {**named.get("$defs", {}), _WHOLE: whole}}


def _plain(schema: Schema) -> Schema:
    found = _with_parts(schema, _plain)
    if "prefixItems" in found and found.get("items") is False:
        del found["items"]
    return found


def _to_definition(reference: str) -> str:
    return f"#/$defs/{_WHOLE}" if reference == "#" else reference


def _with_parts(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """Return a copy of the schema, each of the schemas directly inside it changed."""

    def part(value: Any) -> Any:
        return change(value) if isinstance(value, dict) else {} if value is True else value

    found = dict(schema)
    for name, value in schema.items():
        if name in _SINGLE and isinstance(value, dict):
            found[name] = change(value)
        elif name in _LISTS and isinstance(value, list):
            found[name] = [part(each) for each in value]
        elif name in _BY_NAME and isinstance(value, dict):
            found[name] = {key: part(each) for key, each in value.items()}
    return found


def _moved(schema: Schema, pointer: str) -> Schema:
    """Return the schema with its references leading from the place it will have."""
    return _with_references(
        schema,
        lambda reference: pointer + reference[1:] if _is_pointer(reference) else reference,
    )


def _is_pointer(reference: str) -> bool:
    return reference == "#" or reference.startswith("#/")


def _with_references(schema: Schema, change: Callable[[str], str]) -> Schema:
    """Return the schema with each reference in it changed."""
    found = _with_parts(schema, lambda part: _with_references(part, change))
    if isinstance(reference := found.get("$ref"), str):
        found["$ref"] = change(reference)
    return found


def _closed(schema: Schema) -> Schema:
    found = _with_parts(schema, _closed)
    if "properties" in found and not _OPENING & found.keys():
        found.setdefault("additionalProperties", False)
    return found


_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


def new_call_id() -> str:
    """Return a fresh id of a tool call."""
    return f"call_{secrets.token_hex(12)}"


def call_schema(tools: tuple[Tool, ...]) -> dict[str, Any]:
    """Return the JSON schema that any one call of these tools matches, and nothing else does."""
    if len(tools) == 1:
        return _call(tools[0], "#")
    return {"anyOf": [_call(tool, f"#/anyOf/{number}") for number, tool in enumerate(tools)]}


def forced_constraint(request: GenerationRequest) -> Constraint:
    """Return what the answer must match that must be a call."""
    schema = json.dumps(call_schema(request.tools))
    return request.forced_grammar or Constraint("json_schema", schema, "tools")


def forced_reader(request: GenerationRequest, index: int) -> ForcedCall | ForcedText:
    """Return what reads such an answer."""
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
    """Reads the call out of the answer's text. A fold: any cutting of the text gives one result."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._held = ""
        self._begun = False
        self._depth = 0
        self._in_string = self._escaped = False
        self.is_complete = False

    def feed(self, text: str) -> list[ToolCallDelta]:
        """Take a piece of the text; return the pieces of the call it completes."""
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
            self._step(character)
        return text

    def _step(self, character: str) -> None:
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


class ForcedText:
    """Takes an answer that is nothing but the text of a custom tool's call, like ``ForcedCall``."""

    def __init__(self, name: str, index: int) -> None:
        self._name, self._index = name, index
        self.is_complete = False

    def feed(self, text: str) -> list[ToolCallDelta]:
        """Take a piece of the text; return the piece of the call."""
        if self.is_complete:
            return [ToolCallDelta(0, text, index=self._index, is_custom=True)]
        self.is_complete = True  # Where it ends says the grammar.
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
    """Return the request with its tools, and all calls and results, in the texts of its messages.

    A call that is forced stays so, by what binds the answer.
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
    """Return the messages with this text at the end of the system's first one."""
    if not messages or messages[0].role != "system":
        return (Message("system", text), *messages)
    first = messages[0]
    if first.parts:
        return (replace(first, parts=(*first.parts, TextPart(f"\n\n{text}"))), *messages[1:])
    return (replace(first, text=f"{first.text or ''}\n\n{text}".lstrip()), *messages[1:])


def _plain_turns(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages; the results of a turn's calls become one message of the user."""
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
        yield _without_calls(message) if message.tool_calls else message
    if results:
        yield Message("user", "\n\n".join(results))


def _without_calls(message: Message) -> Message:
    written = [text for text in (message.all_text, *map(_written, message.tool_calls)) if text]
    return replace(message, text="\n".join(written), parts=(), tool_calls=())


def _written(call: ToolCall) -> str:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    return json.dumps({"name": call.name, "arguments": arguments}, ensure_ascii=False)
