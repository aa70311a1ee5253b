"""Tool calls in the deltas of a generation: found in text, and turned back from JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jsonschema_rs

from inference_site.domain.deltas import Delta, Finish, TextDelta, ToolCallDelta
from inference_site.domain.request import GenerationRequest, Tool
from worker.engines.chat.forced_call import new_call_id

_MOST_HELD = 64 * 1024
"""Characters of an answer that may be calls."""
_ARGUMENTS = ("arguments", "parameters")
_FIRST_KEYS = tuple(f'"{key}"' for key in ("name", *_ARGUMENTS))
_FENCE = re.compile(r"```(?:json|tool_call)?[ \t]*\n")
_BEGUN_FENCE = re.compile(r"`{1,3}[a-z_]{0,9}[ \t]*")
_FENCED = re.compile(rf"{_FENCE.pattern}(?P<calls>.*?)(?:\s*```)?\s*", re.DOTALL)


def may_write_calls(request: GenerationRequest) -> bool:
    """Whether an answer to the request may be calls that are written so."""
    chooses = request.operation == "chat" and not request.must_call
    return bool(request.tools) and chooses and request.constraint is None


@dataclass
class _Choice:
    """What is held back of one choice; ``is_text``: it is clear that it is no call."""

    held: list[TextDelta] = field(default_factory=list)
    text: str = ""
    is_text: bool = False


class WrittenCalls:
    """Turns the answers of a generation that are calls into calls."""

    def __init__(self, tools: Collection[Tool], *, parallel: bool) -> None:
        self._tools, self._parallel = {tool.name: tool for tool in tools}, parallel
        self._choices: dict[int, _Choice] = {}

    def take(self, delta: Delta) -> Sequence[Delta]:
        """Return what becomes of the next delta."""
        match delta:
            case TextDelta(index=index):
                return self._text(self._choices.setdefault(index, _Choice()), delta)
            case ToolCallDelta(index=index):
                return (*self._as_text(index), delta)
            case Finish(index=index):
                return self._finish(index, delta)
            case _:
                return (delta,)

    def rest(self) -> list[Delta]:
        """Return what is held back of an answer that has ended before its end."""
        return [delta for index in self._choices for delta in self._as_text(index)]

    def _text(self, choice: _Choice, delta: TextDelta) -> Sequence[Delta]:
        if choice.is_text:
            return (delta,)
        choice.held.append(delta)
        choice.text += delta.text
        if len(choice.text) <= _MOST_HELD and _may_begin(choice.text):
            return ()
        return self._as_text(delta.index)

    def _as_text(self, index: int) -> Sequence[Delta]:
        choice = self._choices.setdefault(index, _Choice())
        held, choice.held, choice.is_text = choice.held, [], True
        return held

    def _finish(self, index: int, end: Finish) -> Sequence[Delta]:
        held = self._as_text(index)
        if not held or end.reason != "stop":
            return (*held, end)
        try:
            calls = list(_calls(self._choices[index].text, self._tools))
        except (ValueError, RecursionError):
            calls = []
        if not calls:
            return (*held, end)
        found = [replace(call, call=n, index=index) for n, call in enumerate(calls)]
        return (*(found if self._parallel else found[:1]), replace(end, reason="tool_calls"))


def _may_begin(text: str) -> bool:
    """Whether an answer that begins so may be calls."""
    text = text.lstrip()
    if text.startswith("`"):
        if (fence := _FENCE.match(text)) is None:
            return _BEGUN_FENCE.fullmatch(text) is not None
        text = text[fence.end() :].lstrip()
    if not text.startswith("{"):
        return not text
    text = text[1:].lstrip()
    return any(text.startswith(key) or key.startswith(text) for key in _FIRST_KEYS)


def _calls(text: str, tools: dict[str, Tool]) -> Iterator[ToolCallDelta]:
    """Yield the calls of an answer. Raise ValueError if it is anything else."""
    text = text.strip()
    if fenced := _FENCED.fullmatch(text):
        text = fenced["calls"].strip()
    at, decoder = 0, json.JSONDecoder(strict=False)
    while at < len(text):
        written, at = decoder.raw_decode(text, at)
        yield _call(written, tools)
        while at < len(text) and text[at].isspace():
            at += 1


def _call(written: Any, tools: dict[str, Tool]) -> ToolCallDelta:
    if not isinstance(written, dict) or written.keys() - {"name", *_ARGUMENTS}:
        raise ValueError("it has other keys")
    name = str(written.get("name"))
    given = [written[key] for key in _ARGUMENTS if key in written] or [{}]
    if name not in tools or len(given) > 1 or not _fits(given[0], tools[name]):
        raise ValueError("it is no call of these tools")
    arguments = json.dumps(given[0], ensure_ascii=False)
    return ToolCallDelta(0, arguments, id=new_call_id(), name=name)


def _fits(arguments: Any, tool: Tool) -> bool:
    """Whether the arguments are as the tool's schema says. A schema reaches nothing elsewhere."""
    validator = jsonschema_rs.validator_for(
        tool.parameters,
        pattern_options=jsonschema_rs.RegexOptions(),  # Their time is linear.
        retriever=_retrieve_nothing,
    )
    return isinstance(arguments, dict) and validator.is_valid(arguments)


def _retrieve_nothing(uri: str) -> Any:
    raise ValueError(f"{uri} is elsewhere")


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
