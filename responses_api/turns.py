"""The turns of a response whose tools the site runs (see ``runs.tool_calls.turns``).

``max_tool_calls`` and the site's limit bound the calls; what the model calls above that is ignored,
and the tools are not offered any more.
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
from inference_site.core.domain.request import GenerationRequest, Tool
from inference_site.core.domain.site_tools import ToolResult
from inference_site.runs.tool_calls.turns import TurnCall, Turns
from responses_api.client_tools import SITE_SEARCH, OfferedTools
from responses_api.site_tools import FirstCall, Route, site_tools

Options = Mapping[str, Any]
_FIRST = "first:"
"""Begins the names of first calls, which are no functions of the model."""


@dataclass(frozen=True, slots=True)
class SitePlan:
    """What the site runs for a response.

    ``options`` are those of its tools. ``first_calls`` come before the first turn of the model.
    ``most_calls`` is how many calls of the model are run. ``requires_any``: the model must call any
    tool, for which a search of tools does not count.
    """

    options: Sequence[Options]
    first_calls: Sequence[FirstCall] = ()
    most_calls: int = 0
    requires_any: bool = False

    def fields_of(self, name: str) -> Mapping[str, Any]:
        """Return the fields of the item of a first call, by the name in its delta."""
        if not name.startswith(_FIRST):
            return {}
        return self.first_calls[int(name.removeprefix(_FIRST))].fields

    def place_of(self, route: Route) -> int:
        """Return the place among the ``options`` of the tool that a route leads to."""
        wanted = (route.type, route.namespace)
        tools = [(one["type"], one.get("server_label")) for one in self.options]
        return tools.index(wanted)

    def options_for(self, name: str, route: Route) -> Options:
        """Return the options of the tool of a call, by the name in its delta.

        A first call has been approved, or needs no approval.
        """
        options = self.options[self.place_of(route)]
        return {**options, "ask": []} if name.startswith(_FIRST) else options


@dataclass(frozen=True, slots=True)
class _State:
    """What is saved of the turn beside the state of ``Turns``.

    ``from_call`` are its deltas from its first call on: the name of a class, and its fields.
    """

    is_first: bool
    has_other_calls: bool
    discovered: list[Tool] = field(default_factory=list)
    spent: list[str] = field(default_factory=list)
    searches: int = 0
    routes: dict[str, Route] = field(default_factory=dict)
    from_call: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


_STATE = TypeAdapter(_State)
_DELTAS = {cls.__name__: cls for cls in (TextDelta, ReasoningDelta, RefusalDelta, ToolCallDelta)}


class ResponseTurns(Turns):
    """The turns of one response.

    ``routes`` lead from the names of functions to tools; it is shared with the output, which finds
    the functions there that a call has discovered.
    """

    def __init__(self, routes: dict[str, Route], plan: SitePlan) -> None:
        self._routes, self._plan = routes, plan
        self._context: CompactedContext | None = None
        """What the newest compaction has left of the messages before it."""
        self._discovered: list[Tool] = []
        self._spent_types: list[str] = []
        """Types of tools of the site that the model is not offered any more."""
        self._searches = 0
        """How many of the calls were searches of tools."""
        super().__init__(plan.most_calls)

    def _begin(self) -> None:
        super()._begin()
        self._is_first = False
        self._call: TurnCall | None = None
        """The newest call, if the site runs it."""
        self.ignores = False
        """Whether the newest call is above the limit, and ignored."""
        self._has_other_calls = False
        self._from_call: list[TextDelta | ReasoningDelta | RefusalDelta | ToolCallDelta] = []

    def first(self, calls: Sequence[FirstCall]) -> list[Delta]:
        """Begin with calls that the model has not made; return their deltas."""
        self._is_first = True
        deltas: list[Delta] = []
        for number, call in enumerate(calls):
            name = f"{_FIRST}{number}"
            self._routes[name] = call.route
            deltas.append(ToolCallDelta(number, call.arguments, f"call_first_{number}", name))
        return [*deltas, Finish("tool_calls")]

    def compact(self, context: CompactedContext) -> None:
        """Begin this turn and the later ones with the context, which has the turns before."""
        self._context, self._messages = context, []

    def take(self, delta: Delta) -> None:
        """Record a delta, unless it is of a call that is ignored."""
        super().take(delta)
        if isinstance(delta, ToolCallDelta):
            if delta.id is not None and delta.name is not None:
                self._take_call(delta.id, delta.name)
            if self.ignores:
                return
            if self._call is not None:
                self._call.arguments += delta.arguments
            self._from_call.append(delta)
        elif self._from_call and isinstance(delta, TextDelta | ReasoningDelta | RefusalDelta):
            self._from_call.append(delta)

    def _route(self, name: str) -> Route:
        return self._routes.get(name) or Route("function", name)

    def _take_call(self, call_id: str, name: str) -> None:
        self._call, route = None, self._route(name)
        type_ = site_tools().get(route.type)
        self.ignores = type_ is not None and not self._is_first and not self.may_call
        if self.ignores:
            return
        if type_ is None or not type_.is_run(route, self._plan.options_for(name, route)):
            self._has_other_calls = True
            self.made += type_ is not None  # A call that waits for its approval counts.
            return
        place, is_shown = self._plan.place_of(route), type_.is_message(route)
        if self._is_first:  # The model is shown the name that it would use.
            names = (n for n, r in self._routes.items() if r == route and not n.startswith(_FIRST))
            name = next(names, route.usual_name)
        self._call = self.begin_call(place, route.name, call_id, name, is_shown=is_shown)
        self._searches += route == SITE_SEARCH
        if self._is_first:
            self.made = 0  # The model has not made it.

    def add_result(self, result: ToolResult) -> TurnCall:
        """Take the result of the first of those that wait; offer the functions that it brings."""
        call = super().add_result(result)
        first = self._plan.first_calls
        route = first[call.number].route if self._is_first else self._route(call.name)
        names = {route: n for n, route in self._routes.items() if not n.startswith(_FIRST)}
        offered = OfferedTools(routes=self._routes, names=names)
        type_, options = site_tools()[route.type], self._plan.options[call.tool]
        type_.discover(route, options, result, offered)
        self._discovered += offered.tools
        if type_.is_spent(options, result, offered):
            self._spent_types.append(route.type)
        return call

    @property
    def is_last(self) -> bool:
        """Whether the response ends with this turn.

        It called nothing, or the client must run a call too, or approve one.
        """
        return not self._is_first and (self._has_other_calls or not self.calls)

    def next_request(self, request: GenerationRequest) -> GenerationRequest | None:
        """Begin the next turn; return its request, or None if no token is left for it.

        ``request`` is that of the first turn, not compacted.
        """
        tools = (*request.tools, *self._discovered)
        left_out = self._spent_types if self.may_call else site_tools()
        tools = tuple(one for one in tools if self._route(one.name).type not in left_out)
        # Without tools, because no server could be listed, the model answers with text.
        has_called = self.made > (self._searches if self._plan.requires_any else 0)
        must_call = request.must_call and not has_called and bool(tools)
        context = self._context
        following = super().next_request(context.applied_to(request) if context else request)
        return following and replace(following, tools=tools, must_call=must_call)

    def save(self) -> dict[str, Any]:
        """Return the state at the end of a turn as JSON, for ``restore``."""
        from_call = list[tuple[str, dict[str, Any]]]()
        for delta in self._from_call:
            fields = asdict(delta)
            fields.pop("logprobs", None)
            from_call.append((type(delta).__name__, fields))
        state = _State(
            self._is_first,
            self._has_other_calls,
            self._discovered,
            self._spent_types,
            self._searches,
            self._routes,
            from_call,
        )
        return {"turns": super().save(), "turn": _STATE.dump_python(state, mode="json")}

    def restore(self, saved: Mapping[str, Any], context: CompactedContext | None = None) -> None:
        """Continue from a saved state: the calls of its turn have no results yet.

        ``context`` is that of the newest compaction among the saved items.
        """
        super().restore(saved["turns"])
        state = _STATE.validate_python(saved["turn"])
        self._is_first, self._has_other_calls = state.is_first, state.has_other_calls
        self._discovered, self._spent_types = state.discovered, state.spent
        self._searches = state.searches
        self._context = context
        self._routes.update(state.routes)
        self._from_call = [_DELTAS[name](**fields) for name, fields in state.from_call]

    def calling_deltas(self) -> list[Delta]:
        """Return the deltas of the turn, which has ended, from its first call on."""
        return [*self._from_call, Finish("tool_calls")]
