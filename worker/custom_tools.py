"""Custom tools: tools that take one text instead of JSON.

A model knows functions only, so it is shown a function whose one argument is the text. What it
calls that function with is JSON again, which comes in pieces cut anywhere, and is turned back into
the pieces of the text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from worker.generation import Delta, Finish, Tool, ToolCallDelta

_HEAD = '{"input":"'
"""How the arguments begin, but for white space, which may be anywhere outside of the quotes."""
_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def custom_tool(name: str, description: str | None) -> Tool:
    """Return the function that stands for a custom tool."""
    return Tool(name, description, _SCHEMA, is_custom=True)


def custom_arguments(text: str) -> str:
    """Return the arguments that this text was in the call of such a function."""
    return json.dumps({"input": text}, ensure_ascii=False)


class CustomCalls:
    """Turns the calls of custom tools in a generation's deltas into calls with plain text."""

    def __init__(self, tools: Collection[Tool]) -> None:
        self._names = {tool.name for tool in tools if tool.is_custom}
        self._inputs: dict[tuple[int, int], InputText] = {}

    def take(self, delta: Delta) -> Sequence[Delta]:
        """Return what becomes of the next delta; those of other tools pass unchanged."""
        match delta:
            case ToolCallDelta():
                return self._call(delta)
            case Finish(index=index):
                return (*self._rest(index), delta)
            case _:
                return (delta,)

    def _call(self, delta: ToolCallDelta) -> Sequence[Delta]:
        key = (delta.index, delta.call)
        if delta.name in self._names:
            self._inputs[key] = InputText()
        if key not in self._inputs:
            return (delta,)
        text = self._inputs[key].feed(delta.arguments)
        is_first = delta.name is not None
        return (replace(delta, arguments=text, is_custom=True),) if text or is_first else ()

    def _rest(self, index: int) -> list[ToolCallDelta]:
        """Return what the calls of a choice that ends still hold back."""
        rests = [
            ToolCallDelta(call, text.rest(), index=index, is_custom=True)
            for (choice, call), text in self._inputs.items()
            if choice == index
        ]
        return [rest for rest in rests if rest.arguments]


class InputText:
    """The text in the arguments of one call. Arguments of another shape are the text themselves."""

    def __init__(self) -> None:
        self._state: Literal["head", "string", "done", "raw"] = "head"
        self._held = ""

    def feed(self, piece: str) -> str:
        """Take a piece of the arguments; return the piece of the text that it completes."""
        match self._state:
            case "raw":
                return piece
            case "done":
                return ""
            case "head":
                return self._feed_head(piece)
            case "string":
                return self._feed_string(piece)

    def rest(self) -> str:
        """Return what never became the beginning of such arguments."""
        return self._held if self._state == "head" else ""

    def _feed_head(self, piece: str) -> str:
        self._held += piece
        position = _end_of_head(self._held)
        if position is None:
            return ""
        held, self._held = self._held, ""
        if position < 0:
            self._state = "raw"
            return held
        self._state = "string"
        return self._feed_string(held[position:])

    def _feed_string(self, piece: str) -> str:
        self._held += piece
        end = _end_of_characters(self._held)
        if self._held[end : end + 1] == '"':
            self._state = "done"
        whole, self._held = self._held[:end], self._held[end:]
        text: str = json.loads(f'"{whole}"', strict=False)
        return text.encode("utf-8", "replace").decode()  # Half a pair is no character.


def _end_of_head(text: str) -> int | None:
    """Return where the head ends; -1 if this is not its beginning, None if more must come."""
    expected = 0
    for position, character in enumerate(text):
        if character == _HEAD[expected]:
            expected += 1
            if expected == len(_HEAD):
                return position + 1
        elif not character.isspace() or 1 < expected < len('{"input"'):
            return -1
    return None


def _end_of_characters(text: str) -> int:
    """Return the end of the characters at the beginning of this string that are complete.

    An escape may be cut anywhere, and half of a surrogate pair is no character yet.
    """
    position = 0
    while position < len(text) and text[position] != '"':
        length = _length_of_character(text[position : position + 7])
        if position + length > len(text):
            break
        position += length
    return position


def _length_of_character(text: str) -> int:
    """Return the length of the first character of a JSON string, from its first seven."""
    if text[0] != "\\":
        return 1
    if text[1:2] != "u":
        return 2
    is_high_surrogate = text[2:4].lower() in ("d8", "d9", "da", "db")
    return 12 if is_high_surrogate and text[6:] in ("", "\\") else 6
