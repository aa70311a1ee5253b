"""The turns of a response whose tools the site runs: model → calls → results → model.

``Turns`` keeps what a turn of the model has said and called, and makes the request of the next turn
from it. ``max_tool_calls`` and the site's limit bound the calls; what the model calls above that is
ignored, and the tools are not offered any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from inference_site.core.domain.compaction import CompactedContext
from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    ToolCallDelta,
)
from inference_site.core.domain.request import (
    GenerationRequest,
    Message,
    Tool,
    ToolCall,
    custom_arguments,
)
from inference_site.core.domain.site_tools import SiteCall, Source, ToolResult
from responses_api.client_tools import OfferedTools, Route
from responses_api.site_tools import FirstCall, options_of, site_tools

Options = Mapping[str, Any]
_FIRST = "first:"
"""Begins the names of first calls, which are no functions of the model."""


@dataclass(frozen=True, slots=True)
class SitePlan:
    """What the site runs for a response.

    ``options`` are those of its tools. ``first_calls`` come before the first turn of the model.
    ``most_calls`` is how many calls of the model are run.
    """

    options: Sequence[Options]
    first_calls: Sequence[FirstCall] = ()
    most_calls: int = 0

    def fields_of(self, name: str) -> Mapping[str, Any]:
        """Return the fields of the item of a first call, by the name in its delta."""
        if not name.startswith(_FIRST):
            return {}
        return self.first_calls[int(name.removeprefix(_FIRST))].fields

    def options_for(self, name: str, route: Route) -> Mapping[str, Any]:
        """Return the options of the tool of a call, by the name in its delta.

        A first call has been approved, or needs no approval.
        """
        options = options_of(route, self.options)
        return {**options, "ask": []} if name.startswith(_FIRST) else options


@dataclass(slots=True)
class TurnCall:
    """A call of the turn: its name as the model knows it, and the number of one that the site runs.

    ``output`` is None until its result is there; it stays None for calls of the client.
    """

    id: str
    name: str
    route: Route
    number: int | None
    is_custom: bool
    arguments: str = ""
    output: str | None = None


@dataclass(frozen=True, slots=True)
class SavedTurns:
    """The state of ``Turns`` at the end of a turn of the model, before its calls are run.

    ``said`` is what the turn has said before its first call, ``calls`` what came from there on:
    each entry is the name of a class of deltas, and its fields.
    """

    messages: list[Message] = field(default_factory=list)
    said: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    number: int = 0
    made: int = 0
    is_first: bool = False
    discovered: list[Tool] = field(default_factory=list)
    routes: dict[str, Route] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)


SAVED: TypeAdapter[SavedTurns] = TypeAdapter(SavedTurns)
_DELTAS = {cls.__name__: cls for cls in (TextDelta, ReasoningDelta, RefusalDelta, ToolCallDelta)}


class Turns:
    """The turns of one response.

    ``routes`` lead from the names of functions to tools; it is shared with the output, which finds
    the functions there that a first call has discovered.
    """

    def __init__(self, routes: dict[str, Route], plan: SitePlan) -> None:
        self.sources: list[Source] = []
        """The places that the results so far quote, each URL once."""
        self._routes, self._plan, self._most_calls = routes, plan, plan.most_calls
        self._context: CompactedContext | None = None
        """What the newest compaction has left of the messages before it."""
        self._messages: list[Message] = []
        """Those of the ended turns, since the compaction."""
        self._discovered: list[Tool] = []
        self._number = self._made = 0
        self._begin()

    def _begin(self, *, is_first: bool = False) -> None:
        self._said: list[TextDelta | ReasoningDelta | RefusalDelta] = []
        self._from_call: list[TextDelta | ReasoningDelta | RefusalDelta | ToolCallDelta] = []
        self._calls: list[TurnCall] = []
        self._ignores = self._has_ended = False
        self._is_first = is_first
        self._began_at = self._number, self._made

    def first(self, calls: Sequence[FirstCall]) -> list[Delta]:
        """Begin with calls that the model has not made; return their deltas."""
        self._begin(is_first=True)
        deltas: list[Delta] = []
        for number, call in enumerate(calls):
            name = f"{_FIRST}{number}"
            self._routes[name] = call.route
            deltas.append(ToolCallDelta(number, call.arguments, f"call_first_{number}", name))
        return [*deltas, Finish("tool_calls")]

    def compact(self, context: CompactedContext) -> None:
        """Begin this turn and the later ones with the context, which has the turns before."""
        self._context, self._messages = context, []

    def take(self, delta: Delta) -> bool:
        """Record a delta; return False if it is of a call that is ignored."""
        match delta:
            case ToolCallDelta(id=str(id_), name=str(name)):
                route = self._routes.get(name) or Route("function", name)
                type_ = site_tools().get(route.type)
                is_run = type_ is not None and type_.is_run(
                    route, self._plan.options_for(name, route)
                )
                self._ignores = (
                    type_ is not None and not self._is_first and self._made >= self._most_calls
                )
                if not self._ignores:
                    number = self._number if is_run else None
                    call = TurnCall(
                        id_, self._shown_name(name, route), route, number, delta.is_custom
                    )
                    self._calls.append(call)
                    self._number += is_run
                    self._made += type_ is not None and not self._is_first
            case Finish():
                self._has_ended = True
                return True
            case TextDelta() | ReasoningDelta() | RefusalDelta():
                self._ignores = False
            case ToolCallDelta():
                pass
            case _:
                return True
        if self._ignores:
            return False
        if isinstance(delta, ToolCallDelta):
            self._calls[-1].arguments += delta.arguments
        if self._calls or isinstance(delta, ToolCallDelta):
            self._from_call.append(delta)
        else:
            self._said.append(delta)
        return True

    def _shown_name(self, name: str, route: Route) -> str:
        """Return the name of the function; a first call has the name that the model would use."""
        if not self._is_first:
            return name
        names = (n for n, r in self._routes.items() if r == route and not n.startswith(_FIRST))
        return next(names, route.usual_name)

    @property
    def calls(self) -> list[SiteCall]:
        """The calls of the turn that the site must run, once the turn has ended."""
        if not self._has_ended:
            return []
        options = list(self._plan.options)
        return [
            SiteCall(
                call.number,
                options.index(options_of(call.route, options)),
                call.route.name,
                call.arguments,
            )
            for call in self._calls
            if call.number is not None and call.output is None
        ]

    def add_result(self, result: ToolResult) -> None:
        """Record the result of the first of the ``calls``."""
        call = next(c for c in self._calls if c.number is not None and c.output is None)
        call.output = result.output
        known = {source.url for source in self.sources}
        self.sources += [source for source in result.sources if source.url not in known]
        type_ = site_tools()[call.route.type]
        if self._is_first:
            offered = OfferedTools(routes=self._routes)
            options = options_of(call.route, self._plan.options)
            type_.discover(call.route, options, result, offered)
            self._discovered += offered.tools

    @property
    def is_last(self) -> bool:
        """Whether the response ends with this turn.

        It called nothing, or the client must run a call too, or approve one.
        """
        run = [call for call in self._calls if call.number is not None]
        return not self._is_first and (not run or len(run) < len(self._calls))

    def next_request(self, request: GenerationRequest, spent: int) -> GenerationRequest | None:
        """Return the request of the next turn; None if the response ends with this one.

        ``request`` is that of the first turn, not compacted, ``spent`` the output tokens of all
        turns so far.
        Raise TokensSpent if none is left.
        """
        run = [call for call in self._calls if call.output is not None]
        if self.is_last:
            return None
        self._messages += self._turn_messages(run)
        self._begin()
        tools = (*request.tools, *self._discovered)
        if self._made >= self._most_calls:
            own = {name for name, route in self._routes.items() if route.type in site_tools()}
            tools = tuple(tool for tool in tools if tool.name not in own)
        left = request.max_output_tokens
        if left is not None and (left := left - spent) <= 0:
            raise TokensSpent
        if self._context is not None:
            request = self._context.applied_to(request)
        return replace(
            request,
            messages=(*request.messages, *self._messages),
            tools=tools,
            must_call=request.must_call and not self._made,
            max_output_tokens=left,
        )

    def _turn_messages(self, calls: Sequence[TurnCall]) -> list[Message]:
        said = [*self._said, *self._from_call]
        text = "".join(d.text for d in said if isinstance(d, TextDelta | RefusalDelta))
        reasoning = "".join(d.text for d in said if isinstance(d, ReasoningDelta))
        shown = [c for c in calls if site_tools()[c.route.type].is_message(c.route)]
        if not shown:
            return []
        made = tuple(
            ToolCall(
                c.id,
                c.name,
                custom_arguments(c.arguments) if c.is_custom else c.arguments or "{}",
            )
            for c in shown
        )
        results = [Message("tool", c.output, c.name, tool_call_id=c.id) for c in shown]
        first = Message("assistant", text or None, tool_calls=made, reasoning=reasoning or None)
        return [first, *results]

    def save(self) -> dict[str, Any]:
        """Return the state as JSON, for ``restore``."""
        saved = SavedTurns(
            self._messages,
            [(type(d).__name__, _plain(d)) for d in self._said],
            [(type(d).__name__, _plain(d)) for d in self._from_call],
            *self._began_at,
            self._is_first,
            self._discovered,
            self._routes,
            self.sources,
        )
        dumped: dict[str, Any] = SAVED.dump_python(saved, mode="json")
        return dumped

    def restore(
        self, data: Mapping[str, Any], context: CompactedContext | None = None
    ) -> list[Delta]:
        """Continue from a saved state; return the deltas of the turn from its first call on.

        The caller passes them to ``take`` and to the output. ``context`` is that of the newest
        compaction among the saved items.
        """
        saved = SAVED.validate_python(data)
        self._number, self._made = saved.number, saved.made
        self._begin(is_first=saved.is_first)
        self._messages, self._discovered = list(saved.messages), list(saved.discovered)
        self._context = context
        self._routes.update(saved.routes)
        self.sources[:] = saved.sources
        self._said = [_DELTAS[name](**fields) for name, fields in saved.said]  # type: ignore[misc]
        deltas: list[Any] = [_DELTAS[name](**fields) for name, fields in saved.calls]
        return [*deltas, Finish("tool_calls")]


class TokensSpent(Exception):
    """The turns so far have used all tokens of the response."""


def _plain(delta: TextDelta | ReasoningDelta | RefusalDelta | ToolCallDelta) -> dict[str, Any]:
    """Return the fields of a delta as JSON; log probabilities are left out."""
    fields = asdict(delta)
    fields.pop("logprobs", None)
    return fields
