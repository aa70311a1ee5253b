"""Forced tool calls: a schema that only a call can match, and the call read out of the text.

When a call is forced, the whole answer is one JSON object, ``{"name": …, "arguments": {…}}``, and
the grammar of the engine makes it so whatever the weights. What remains is to turn its text, which
comes in pieces cut anywhere, into the pieces of a call.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from inference_site.domain.deltas import ToolCallDelta
from inference_site.domain.request import Constraint, GenerationRequest, Tool
from worker.engines.chat.tool_schemas import arguments_schema

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
