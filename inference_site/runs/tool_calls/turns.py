"""The turns of an answer whose tools the site runs: model → calls → results → model.

``Turns`` keeps what a turn of the model has said and which tools of the site it has called, and
makes the request of the next turn from it. What the client is shown is the assembler's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    Usage,
)
from inference_site.core.domain.request import GenerationRequest, Message, ToolCall
from inference_site.core.domain.site_tools import SiteCall, Source, ToolResult


@dataclass(slots=True)
class TurnCall:
    """A call of the turn that the site runs.

    ``number`` and ``tool`` are those of its ``SiteCall``, ``function`` is the name that the tool
    knows; ``id`` and ``name`` are those that the model is shown. ``output`` is None until its
    result is there. Without ``is_shown`` the model is shown neither the call nor its result.
    """

    number: int
    tool: int
    function: str
    id: str
    name: str
    arguments: str = ""
    output: str | None = None
    is_shown: bool = True


@dataclass(slots=True)
class _State:
    """What is saved before the calls of a turn are run."""

    made: int = 0
    number: int = 0
    sources: list[Source] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    calls: list[TurnCall] = field(default_factory=list)


_STATE = TypeAdapter(_State)


class Turns:
    """The turns of one answer, with at most ``most_calls`` calls of the model that the site runs.

    ``sources`` are those that it may cite before its first call.
    """

    def __init__(self, most_calls: int, sources: Sequence[Source] = ()) -> None:
        self.sources = list(sources)
        """The places that the results so far quote, each URL once."""
        self.made = 0
        """How many calls of the model the site has run, or is about to."""
        self._most_calls = most_calls
        self._number = 0
        self._spent = 0
        self._messages: list[Message] = []
        """Those of the ended turns."""
        self._begin()

    def _begin(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[TurnCall] = []
        self._has_ended = False

    @property
    def may_call(self) -> bool:
        """Whether the site runs another call of the model."""
        return self.made < self._most_calls

    def take(self, delta: Delta) -> None:
        """Record what the model says, and the end of its turn."""
        match delta:
            case TextDelta(text) | RefusalDelta(text):
                self._text.append(text)
            case ReasoningDelta(text):
                self._reasoning.append(text)
            case Usage(output_tokens=spent):
                self._spent = spent
            case Finish():
                self._has_ended = True

    def next_number(self) -> int:
        """Return the number of the next call of the site (see ``SiteCall``)."""
        self._number += 1
        return self._number - 1

    def begin_call(
        self, tool: int, function: str, call_id: str, name: str, *, is_shown: bool = True
    ) -> TurnCall:
        """Record a call that the model begins; its arguments are added to it."""
        call = TurnCall(self.next_number(), tool, function, call_id, name, is_shown=is_shown)
        self.calls.append(call)
        self.made += 1
        return call

    @property
    def waiting(self) -> list[SiteCall]:
        """The calls of the turn that have no result, once the turn has ended."""
        return [
            SiteCall(one.number, one.tool, one.function, one.arguments)
            for one in self.calls
            if self._has_ended and one.output is None
        ]

    def add_result(self, result: ToolResult) -> TurnCall:
        """Take the result of the first of those that wait; return its call."""
        call = next(one for one in self.calls if one.output is None)
        call.output = result.output
        known = {source.url for source in self.sources}
        self.sources += [source for source in result.sources if source.url not in known]
        return call

    def next_request(self, request: GenerationRequest) -> GenerationRequest | None:
        """Begin the next turn; return its request, or None if no token is left for it.

        ``request`` is that of the first turn.
        """
        left = request.max_output_tokens
        if left is not None and (left := left - self._spent) <= 0:
            return None
        # What the client has begun belongs to the first turn, and is no beginning of another one.
        prefix = "" if self._messages else request.response_prefix
        text, reasoning = prefix + "".join(self._text), "".join(self._reasoning)
        if shown := [one for one in self.calls if one.is_shown]:
            calls = tuple(ToolCall(one.id, one.name, one.arguments or "{}") for one in shown)
            said = Message("assistant", text or None, tool_calls=calls, reasoning=reasoning or None)
            results = [Message("tool", o.output, o.name, tool_call_id=o.id) for o in shown]
            self._messages += [said, *results]
        self._begin()
        return replace(
            request,
            messages=(*request.messages, *self._messages),
            response_prefix="",
            max_output_tokens=left,
        )

    def save(self) -> dict[str, Any]:
        """Return the state at the end of a turn as JSON, for ``restore``."""
        state = _State(
            self.made,
            self._number,
            self.sources,
            self._messages,
            "".join(self._text),
            "".join(self._reasoning),
            [replace(one, output=None) for one in self.calls],
        )
        dumped: dict[str, Any] = _STATE.dump_python(state, mode="json")
        return dumped

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from a saved state: the calls of its turn have no results yet."""
        state = _STATE.validate_python(saved)
        self.made, self._number = state.made, state.number
        self.sources[:] = state.sources
        self._messages, self.calls = state.messages, state.calls
        self._text, self._reasoning = [state.text], [state.reasoning]
        self._has_ended = True
