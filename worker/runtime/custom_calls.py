"""Calls of custom tools, turned back from JSON into their text while they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from inference_site.domain.deltas import Delta, Finish, ToolCallDelta
from inference_site.domain.request import Tool

_HEAD = '{"input":"'
"""How the arguments begin, but for white space, which may be anywhere outside of the quotes."""


_HIGH, _LOW = r"[dD][89abAB][0-9a-fA-F]{2}", r"[dD][c-fC-F][0-9a-fA-F]{2}"


_CHARACTERS = re.compile(rf'[^"\\]+|\\u{_HIGH}\\u{_LOW}|\\u[0-9a-fA-F]{{4}}|\\.', re.DOTALL)
"""Plain characters of a JSON string, or one escape; the two of a surrogate pair are one."""


_HALF = re.compile(rf"\\(u[0-9a-fA-F]{{0,3}})?|\\u{_HIGH}(\\(u([dD]([c-fC-F][0-9a-fA-F]?)?)?)?)?")
"""An escape that more may belong to, when it is all there is yet."""


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
        if delta.is_custom:  # Its arguments are the text already.
            return (delta,)
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
        text, position = "", 0
        while not _HALF.fullmatch(self._held, position):
            characters = _CHARACTERS.match(self._held, position)
            if characters is None:
                break
            text += _decoded(characters[0])
            position = characters.end()
        self._held = self._held[position:]
        if self._held.startswith('"'):
            self._state = "done"
        return text


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


def _decoded(characters: str) -> str:
    """Return what plain characters or one escape stand for; what is no escape is itself."""
    if characters[0] != "\\":
        return characters
    try:
        text: str = json.loads(f'"{characters}"')
    except ValueError:
        return characters
    return text.encode("utf-8", "replace").decode()  # Half a pair is no character.
