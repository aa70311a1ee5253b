"""Calls that a model writes as its answer, though it was not given or does not use a syntax.

Many models know no syntax of calls, or do not use that of their template: they answer with nothing
but ``{"name": …, "arguments": {…}}``, bare or in a fence of code, an object for each call. Where
such an answer names tools of the request, and all arguments fit their schemas, it is calls; else
it is the text that it was. An answer that may be calls is held back until its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jsonschema_rs

from inference_site.domain.deltas import Delta, Finish, TextDelta, ToolCallDelta
from inference_site.domain.request import GenerationRequest, Tool
from worker.engines.chat.tools import new_call_id

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
