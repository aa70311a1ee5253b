"""Tool calls in the deltas of a generation, between the engine and the hooks.

``TextCallParser`` recognises calls that the model wrote as its text. Many models know no syntax of
calls, or do not use that of their template: their whole answer is
``{"name": …, "arguments": {…}}``, bare or in a fence of code, one object for each call. If such an
answer names tools of the request and all arguments fit their schemas, it becomes calls; otherwise
it stays text. An answer that may still become calls is held back until its end.

``CustomCalls`` converts the calls of custom tools from JSON arguments to their plain text, while
they arrive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from inference_site.core.domain.deltas import Delta, Finish, TextDelta, ToolCallDelta
from inference_site.core.domain.request import GenerationRequest, Tool
from inference_site.core.json_schemas import arguments_fit
from worker.engines.chat.tools import new_call_id, whole_characters

_MAX_HELD = 64 * 1024
"""Characters of an answer that are held back because it may become calls."""
_ARGUMENTS = ("arguments", "parameters")
_FIRST_KEYS = tuple(f'"{key}"' for key in ("name", *_ARGUMENTS))
_FENCE = re.compile(r"```(?:json|tool_call)?[ \t]*\n")
_INCOMPLETE_FENCE = re.compile(r"`{1,3}[a-z_]{0,9}[ \t]*")


def may_have_text_calls(request: GenerationRequest) -> bool:
    """Whether the text of an answer to this request may be parsed as calls."""
    chooses = request.operation == "chat" and not request.must_call
    return bool(request.tools) and chooses and request.constraint is None


@dataclass
class _Choice:
    """The state of one choice; ``is_text``: it cannot become calls any more."""

    held: list[TextDelta] = field(default_factory=list)
    text: str = ""
    is_text: bool = False


class TextCallParser:
    """Replaces text that is tool calls by tool call deltas."""

    def __init__(self, tools: Collection[Tool], *, parallel: bool) -> None:
        self._tools, self._parallel = {tool.name: tool for tool in tools}, parallel
        self._choices: dict[int, _Choice] = {}

    def take(self, delta: Delta) -> Sequence[Delta]:
        """Return the deltas to pass on in place of this one."""
        match delta:
            case TextDelta(index=index):
                choice = self._choices.setdefault(index, _Choice())
                if choice.is_text:
                    return (delta,)
                choice.held.append(delta)
                choice.text += delta.text
                if len(choice.text) <= _MAX_HELD and _may_become_calls(choice.text):
                    return ()
                return self._release(index)
            case ToolCallDelta(index=index):
                return (*self._release(index), delta)
            case Finish(index=index):
                held = self._release(index)
                if not held or delta.reason != "stop":
                    return (*held, delta)
                try:
                    calls = list(_parse_calls(self._choices[index].text, self._tools))
                except (ValueError, RecursionError):
                    calls = []
                if not calls:
                    return (*held, delta)
                found = [replace(call, call=n, index=index) for n, call in enumerate(calls)]
                end = replace(delta, reason="tool_calls")
                return (*(found if self._parallel else found[:1]), end)
            case _:
                return (delta,)

    def rest(self) -> list[Delta]:
        """Return the deltas held back when the engine stopped before a finish."""
        return [delta for index in self._choices for delta in self._release(index)]

    def _release(self, index: int) -> Sequence[Delta]:
        """Decide that a choice is text; return the deltas that were held back."""
        choice = self._choices.setdefault(index, _Choice())
        held, choice.held, choice.is_text = choice.held, [], True
        return held


def _may_become_calls(text: str) -> bool:
    """Whether text can be the beginning of calls."""
    text = text.lstrip()
    if text.startswith("`"):
        if (fence := _FENCE.match(text)) is None:
            return _INCOMPLETE_FENCE.fullmatch(text) is not None
        text = text[fence.end() :].lstrip()
    if not text.startswith("{"):
        return not text
    text = text[1:].lstrip()
    return any(text.startswith(key) or key.startswith(text) for key in _FIRST_KEYS)


def _parse_calls(text: str, tools: dict[str, Tool]) -> Iterator[ToolCallDelta]:
    """Yield the calls in the text of an answer. Raise ValueError if it is anything else."""
    text = text.strip()
    if fence := _FENCE.match(text):
        text = text[fence.end() :].removesuffix("```").strip()
    calls, encoded = list[tuple[str, dict[str, Any]]](), list[str]()
    at, decoder = 0, json.JSONDecoder(strict=False)
    while at < len(text):
        written, at = decoder.raw_decode(text, at)
        if not isinstance(written, dict) or written.keys() - {"name", *_ARGUMENTS}:
            raise ValueError("it has other keys")
        name = str(written.get("name"))
        given = [written[key] for key in _ARGUMENTS if key in written] or [{}]
        if name not in tools or len(given) > 1 or not isinstance(given[0], dict):
            raise ValueError("it is no call of these tools")
        calls.append((name, given[0]))
        encoded.append(json.dumps(given[0], ensure_ascii=False, allow_nan=False))
        while at < len(text) and text[at].isspace():
            at += 1
    if calls and not arguments_fit({name: tools[name].parameters for name, _ in calls}, calls):
        raise ValueError("the arguments do not fit the tool's schema")
    for (name, _), arguments in zip(calls, encoded, strict=True):
        yield ToolCallDelta(0, whole_characters(arguments), id=new_call_id(), name=name)


_HEAD = '{"input":"'
"""How the arguments of a custom call begin, apart from white space outside of the quotes."""
_HIGH, _LOW = r"[dD][89abAB][0-9a-fA-F]{2}", r"[dD][c-fC-F][0-9a-fA-F]{2}"
_CHARACTERS = re.compile(rf'[^"\\]+|\\u{_HIGH}\\u{_LOW}|\\u[0-9a-fA-F]{{4}}|\\.', re.DOTALL)
"""Plain characters of a JSON string, or one escape. A surrogate pair is one match."""
_INCOMPLETE_ESCAPE = re.compile(
    rf"\\(u[0-9a-fA-F]{{0,3}})?|\\u{_HIGH}(\\(u([dD]([c-fC-F][0-9a-fA-F]?)?)?)?)?"
)
"""The beginning of an escape whose rest may be in the next piece."""


class CustomCalls:
    """Converts the arguments of custom tool calls from JSON to plain text."""

    def __init__(self, tools: Collection[Tool]) -> None:
        self._names = {tool.name for tool in tools if tool.is_custom}
        self._inputs: dict[tuple[int, int], CustomInput] = {}

    def take(self, delta: Delta) -> Sequence[Delta]:
        """Return the deltas to pass on in place of this one."""
        match delta:
            case ToolCallDelta(is_custom=True):  # Its arguments are the text already.
                return (delta,)
            case ToolCallDelta():
                key = (delta.index, delta.call)
                if delta.name in self._names:
                    self._inputs[key] = CustomInput()
                if key not in self._inputs:
                    return (delta,)
                text = self._inputs[key].feed(delta.arguments)
                is_first = delta.name is not None
                custom = replace(delta, arguments=text, is_custom=True)
                return (custom,) if text or is_first else ()
            case Finish(index=index):
                rests = [
                    ToolCallDelta(call, rest, index=index, is_custom=True)
                    for (choice, call), text in self._inputs.items()
                    if choice == index and (rest := text.rest())
                ]
                return (*rests, delta)
            case _:
                return (delta,)


class CustomInput:
    """Decodes ``{"input": "…"}`` piece by piece. Arguments of another shape are the text itself."""

    def __init__(self) -> None:
        self._state: Literal["head", "string", "done", "raw"] = "head"
        self._held = ""

    def feed(self, piece: str) -> str:
        """Return the piece of the text that is complete with this piece of the arguments."""
        match self._state:
            case "raw":
                return piece
            case "done":
                return ""
            case "head":
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
            case "string":
                return self._feed_string(piece)

    def rest(self) -> str:
        """Return what was held back as a possible head."""
        return self._held if self._state == "head" else ""

    def _feed_string(self, piece: str) -> str:
        self._held += piece
        text, position = "", 0
        while not _INCOMPLETE_ESCAPE.fullmatch(self._held, position):
            characters = _CHARACTERS.match(self._held, position)
            if characters is None:
                break
            text += _decode(characters[0])
            position = characters.end()
        self._held = self._held[position:]
        if self._held.startswith('"'):
            self._state = "done"
        return text


def _end_of_head(text: str) -> int | None:
    """Return the position after the head; -1 if there is no head, None if the text is too short."""
    expected = 0
    for position, character in enumerate(text):
        if character == _HEAD[expected]:
            expected += 1
            if expected == len(_HEAD):
                return position + 1
        elif not character.isspace() or 1 < expected < len('{"input"'):
            return -1
    return None


def _decode(characters: str) -> str:
    """Return the text of plain characters or one escape; an invalid escape stays as it is."""
    if characters[0] != "\\":
        return characters
    try:
        text: str = json.loads(f'"{characters}"')
    except ValueError:
        return characters
    return whole_characters(text)
