"""Tools of a request: how the model is taught them, and how calls of the client's become items.

Models know functions only. ``CLIENT_TOOLS`` has, for each tool that the API defines by its type,
the function that stands for it. ``OfferedTools`` are the functions of one request: those of the
client, of its namespaces, and those that stand for its typed tools. A ``Route`` leads back from the
name that the model calls to the tool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from pydantic_core import from_json

from inference_site.core.domain import request
from inference_site.core.domain.request import (
    MAX_FUNCTIONS,
    custom_tool,
)
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.payload import shown_name
from inference_site.gateway.request_fields.mapping import to_grammar
from inference_site.gateway.request_fields.wire import GrammarInput
from inference_site.runs.queue import new_id
from responses_api.site_tools import FirstCall, Route, site_tool_named
from responses_api.wire.input_items import ItemStatus
from responses_api.wire.objects import (
    ApplyPatchCall,
    CustomToolCall,
    FunctionCall,
    LocalShellAction,
    LocalShellCall,
    OutputItem,
    PatchOperation,
    ShellAction,
    ShellCall,
    ToolSearchCall,
)
from responses_api.wire.tools import (
    CustomTool,
    FunctionTool,
    NamedChoice,
    NamespaceTool,
    Tool,
    ToolSearchTool,
    TypedChoice,
    TypedTool,
)

if TYPE_CHECKING:  # The worker imports this module, and needs no context.
    from responses_api.context import ContextItem

_TOOLS: TypeAdapter[list[Tool]] = TypeAdapter(list[Tool])

_STRING = {"type": "string"}
_TIMEOUT = {"type": "integer", "description": "Milliseconds until a command is stopped."}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool of the API as a function.

    ``description`` and ``parameters`` teach a model that never saw the tool. ``to_item`` makes the
    call item from its common fields and the function's arguments; it raises an error if these do
    not fit. ``id_prefix`` begins the item's id.
    """

    type: str
    id_prefix: str
    description: str
    parameters: dict[str, Any]
    to_item: Callable[[dict[str, Any], dict[str, Any]], OutputItem]


def _shell_call(common: dict[str, Any], given: dict[str, Any]) -> ShellCall:
    commands = given["commands"]
    action = ShellAction(
        commands=[commands] if isinstance(commands, str) else commands,
        timeout_ms=given.get("timeout_ms"),
        max_output_length=given.get("max_output_length"),
    )
    return ShellCall(**common, action=action, environment={"type": "local"})


def _local_shell_call(common: dict[str, Any], given: dict[str, Any]) -> LocalShellCall:
    names = ("command", "timeout_ms", "working_directory", "user")
    fields = {name: given[name] for name in names if name in given}
    if isinstance(fields["command"], str):
        fields["command"] = ["bash", "-lc", fields["command"]]
    action = LocalShellAction(**fields, env=given.get("env") or {})
    return LocalShellCall(**common, action=action)


def _apply_patch_call(common: dict[str, Any], given: dict[str, Any]) -> ApplyPatchCall:
    kind, diff = given["type"], given.get("diff")
    operation = PatchOperation(
        type=kind,
        path=given["path"],
        diff=None if kind == "delete_file" else diff or "",
    )
    status = "completed" if common["status"] == "completed" else "in_progress"
    return ApplyPatchCall(**{**common, "status": status}, operation=operation)


CLIENT_TOOLS = {
    tool.type: tool
    for tool in (
        ClientTool(
            "shell",
            "sh_",
            "Runs shell commands on the user's machine and returns what each one writes and its "
            "exit code. The commands of one call are independent and may run at the same time; "
            "chain commands that build on each other with && in one text.",
            _object(
                {"commands": {"type": "array", "items": _STRING}},
                timeout_ms=_TIMEOUT,
                max_output_length={
                    "type": "integer",
                    "description": "The most characters of output to return.",
                },
            ),
            _shell_call,
        ),
        ClientTool(
            "local_shell",
            "lsh_",
            "Runs one program on the user's machine and returns what it writes. The command is the "
            'program and its arguments, such as ["ls", "-la"]; for a line of shell use '
            '["bash", "-lc", "…"].',
            _object(
                {"command": {"type": "array", "items": _STRING}},
                timeout_ms=_TIMEOUT,
                working_directory=_STRING,
                env={"type": "object", "additionalProperties": _STRING},
            ),
            _local_shell_call,
        ),
        ClientTool(
            "apply_patch",
            "apc_",
            """Creates, updates or deletes one file of the user. `path` is relative. `diff`:
create_file: each line of the new file, after a `+`.
update_file: one or more sections of this grammar; there are no line numbers.
  section: "@@" [" " line of the file above the change, such as the def or class] "\\n" line+
  line: (" " unchanged | "-" removed | "+" added) text "\\n"
Give three unchanged lines before and after each change, exactly as they are in the file. Example:
@@ def greet():
     name = read()
-    print("Hi")
+    print(f"Hi {name}")
     return name
delete_file: no diff.""",
            _object(
                {
                    "type": {"enum": ["create_file", "update_file", "delete_file"]},
                    "path": _STRING,
                },
                diff=_STRING,
            ),
            _apply_patch_call,
        ),
        ClientTool(
            "tool_search",
            "tsc_",
            "Finds more tools and makes them callable. Search when no tool here does what is "
            "needed.",
            _object({"query": _STRING}, limit={"type": "integer"}),
            lambda common, given: ToolSearchCall(**common, arguments=given),
        ),
    )
}
"""The function of each typed tool, by the type of the tool."""


@dataclass(frozen=True, slots=True)
class DeferredTool:
    """What the model is not shown until a search has loaded it: a tool, or those of a namespace.

    ``param`` is its path in the request, for errors.
    """

    param: str
    tool: FunctionTool | CustomTool | NamespaceTool

    @property
    def functions(self) -> list[FunctionTool | CustomTool]:
        """The functions that are deferred: the tool, or some of the namespace."""
        tools = self.tool.tools if isinstance(self.tool, NamespaceTool) else (self.tool,)
        return [one for one in tools if one.defer_loading]

    @property
    def deferred_part(self) -> FunctionTool | CustomTool | NamespaceTool:
        """The tool; a namespace without the functions that are not deferred."""
        if not isinstance(self.tool, NamespaceTool):
            return self.tool
        return self.tool.model_copy(update={"tools": self.functions})

    @property
    def line(self) -> str:
        """Its line in the description of the search."""
        return f"- {self.tool.name}: {self.tool.description or ''}"


SITE_SEARCH = Route("hosted_tool_search", "tool_search")
"""The search of tools that the site runs (see ``responses_api.tool_search``)."""

TOOL_ITEMS = ("additional_tools", "tool_search_output", "mcp_list_tools")
"""Types of items that give the model tools."""


@dataclass(slots=True)
class OfferedTools:
    """The functions of one request, in order, by the name that the model calls.

    ``unsupported`` has the types of tools that the model is not offered, because nobody here runs
    them.
    """

    functions: dict[str, request.Tool] = field(default_factory=dict)
    routes: dict[str, Route] = field(default_factory=dict)
    unsupported: list[str] = field(default_factory=list)
    site_tools: list[dict[str, Any]] = field(default_factory=list)
    """The options of the tools that the site runs (see ``responses_api.site_tools``)."""
    first_calls: list[FirstCall] = field(default_factory=list)
    """Calls of these that come before the first turn of the model."""
    deferred: list[DeferredTool] = field(default_factory=list)
    """Tools that a search may load."""
    deferred_servers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """MCP servers whose tools a search of the site may load, by label: the ``tool`` as the API
    shows it, and its ``options``."""
    is_hosted: bool = False
    """Whether the site searches; the client may have to."""
    items: list[dict[str, Any]] = field(default_factory=list)
    """The data of all items of the context, oldest first."""
    include: frozenset[str] = frozenset()
    """``include`` of the request."""
    new_items: list[dict[str, Any]] = field(default_factory=list)
    """Those of them that came with this request."""
    param: str = "tools"
    """The path of the tool that is being offered, in ``tools`` or in an item, for errors."""
    names: dict[Route, str] = field(default_factory=dict)
    """The names by which the model calls the tools."""

    @property
    def tools(self) -> tuple[request.Tool, ...]:
        """All functions."""
        return tuple(self.functions.values())

    @property
    def uncommon_routes(self) -> dict[str, dict[str, Any]]:
        """The routes to tools that have another type or name than the function, as JSON objects."""
        return {
            name: asdict(route)
            for name, route in self.routes.items()
            if route.type not in ("function", "custom")
            or (route.name, route.namespace) != (name, None)
        }

    def name_of(self, type_: str, name: str, namespace: str | None) -> str:
        """Return the name by which the model calls a tool, which may be of an earlier request."""
        route = Route(type_, name, namespace)
        return self.names.get(route) or route.usual_name

    def add(self, route: Route, make: Callable[[str], request.Tool]) -> None:
        """Offer a tool once; ``make`` gets its name. Raise InvalidRequestError for too many."""
        if route in self.names:
            return
        self.require_room(1)
        name = route.usual_name
        if name in self.routes:
            name = route.distinct_name(name)
        self.routes[name], self.names[route], self.functions[name] = route, name, make(name)

    def require_room(self, more: int) -> None:
        """Raise InvalidRequestError if ``more`` functions do not fit into MAX_FUNCTIONS."""
        if len(self.routes) + more > MAX_FUNCTIONS:
            raise InvalidRequestError(
                f"Invalid '{self.param}': with it there are more than {MAX_FUNCTIONS} functions, "
                "those in namespaces and in items included.",
                param=self.param,
                code="array_above_max_length",
            )

    def add_function(self, route: Route, function: request.Tool) -> None:
        """Offer a function as it is, but for its name (see ``add``)."""
        param = self.param
        self.add(route, lambda name: replace(function, name=name, param=param))

    def select(
        self, choices: Iterable[NamedChoice | TypedChoice], param: str = "tool_choice"
    ) -> tuple[request.Tool, ...]:
        """Return the functions of the tools that these choices name; typed tools may be missing.

        A chosen tool that is deferred is loaded. ``param`` is the path of a choice, with ``{}`` for
        its position among several. Raise InvalidRequestError for a name that no tool has.
        """
        chosen: set[str] = set()
        hidden = [(one, _routes_of(one)) for one in self.deferred] if self.is_hosted else []
        for position, choice in enumerate(choices):
            for entry in list(hidden):
                if any(_is_chosen(choice, name, route) for name, route in entry[1].items()):
                    load(self, entry[0])
                    hidden.remove(entry)
            found = {name for name, route in self.routes.items() if _is_chosen(choice, name, route)}
            if not found and isinstance(choice, NamedChoice):
                place = param.format(position)
                raise InvalidRequestError(
                    f"Invalid value for '{place}': there is no tool named "
                    f"'{shown_name(choice.name)}' in 'tools'.",
                    param=place,
                )
            chosen |= found
        return tuple(self.functions[name] for name in self.functions if name in chosen)


def _routes_of(deferred: DeferredTool) -> dict[str, Route]:
    """Return the routes of what is deferred, by the names by which the model would call it."""
    alone = OfferedTools(is_hosted=True)
    load(alone, deferred)
    return alone.routes


def _is_chosen(choice: NamedChoice | TypedChoice, name: str, route: Route) -> bool:
    if isinstance(choice, NamedChoice):
        if choice.namespace is None and route.namespace is not None:
            return choice.name == name
        return (choice.name, choice.namespace) == (route.name, route.namespace)
    if choice.type == "namespace":
        return route.namespace is not None and route.namespace == (choice.model_extra or {}).get(
            "name"
        )
    if choice.type == "mcp":
        named = choice.model_extra or {}
        is_server = named.get("server_label") in (None, route.namespace)
        return route.type == "mcp" and is_server and named.get("name") in (None, route.name)
    site_tool = site_tool_named(choice.type)
    return route.type in (choice.type, site_tool and site_tool.type)


def offer_tools(
    tools: Sequence[Tool],
    items: Iterable[ContextItem] = (),
    *,
    project_id: int,
    include: Iterable[str] = (),
    new_items: Sequence[dict[str, Any]] = (),
) -> OfferedTools:
    """Return the functions of a request: its tools, and those that its stored items have loaded.

    Tools with ``defer_loading`` are left out until a search has loaded them, if the request has
    one; what an item of an earlier search has loaded is offered. Beside a search of the site, the
    namespace of a deferred function is its own name, as in OpenAI's API: openai-agents finds the
    function by it.
    Raise InvalidRequestError for too many tools; errors about the tools of an item name their place
    in it.
    """
    placed = list(items)
    offered = OfferedTools(
        items=[item.data for item in placed],
        new_items=list(new_items),
        include=frozenset(include),
    )
    given = [*_placed(tools, "tools"), *_tools_of(placed, "additional_tools")]
    loaded = list(_tools_of(placed, "tool_search_output"))
    searches = [(where, tool) for where, tool in given if isinstance(tool, ToolSearchTool)]
    offered.is_hosted = bool(searches) and all(t.execution != "client" for _, t in searches)
    for where, tool in given:
        offered.param = where
        match tool:
            case ToolSearchTool():
                pass
            case TypedTool() if not _may_call(tool):
                offered.unsupported.append(tool.type)
            case TypedTool(type=kind) if kind in CLIENT_TOOLS and not tool.runs_elsewhere:
                known = CLIENT_TOOLS[kind]
                description = "\n".join([known.description, *_skills(tool)])
                _offer_typed(offered, known, description, known.parameters)
            case TypedTool(type=kind) if site_tool := site_tool_named(kind):
                if (options := site_tool.offer(tool, offered, project_id)) is None:
                    offered.unsupported.append(kind)
                else:
                    offered.site_tools.append(options)
            case TypedTool(is_known=True):
                offered.unsupported.append(tool.type)
            case TypedTool():
                pass
            case _:
                _offer_callable(offered, tool, where, is_loaded=not searches)
    if offered.is_hosted:
        # They are loaded as the request has them now: a namespace may have grown.
        names = {getattr(tool, "name", None) for _, tool in loaded}
        for one in offered.deferred:
            if one.tool.name in names:
                load(offered, one)
        offered.deferred = [one for one in offered.deferred if one.tool.name not in names]
    for where, tool in loaded:
        if isinstance(tool, (FunctionTool, CustomTool, NamespaceTool)):
            load(offered, DeferredTool(where, tool))
    if searches:
        _offer_search(offered, searches, project_id)
    return offered


def _offer_search(
    offered: OfferedTools, searches: Sequence[tuple[str, ToolSearchTool]], project_id: int
) -> None:
    """Offer the search that the site runs, or that of the client; then the site runs none."""
    if offered.is_hosted:
        offered.param, search = searches[0]
        offered.require_room(sum(len(one.functions) for one in offered.deferred))
        site_tool = site_tool_named(search.type)
        if site_tool and (options := site_tool.offer(search, offered, project_id)) is not None:
            offered.site_tools.append(options)
        return
    known = CLIENT_TOOLS["tool_search"]
    by_client = [one for one in searches if one[1].execution == "client"]
    offered.unsupported += [known.type] * (len(searches) > len(by_client))
    offered.param, search = by_client[0]
    lines = [search.description or known.description]
    found = dict.fromkeys(one.line for one in offered.deferred)
    lines += ["It can find:", *found] if found else []
    parameters = search.parameters or known.parameters
    _offer_typed(offered, known, "\n".join(lines), parameters)


def load(offered: OfferedTools, deferred: DeferredTool) -> None:
    """Offer what a search has loaded."""
    _offer_callable(offered, deferred.tool, deferred.param, is_loaded=True)


def _placed(tools: Iterable[Tool], where: str) -> Iterator[tuple[str, Tool]]:
    """Yield tools after their paths; ``where`` is that of their list."""
    return ((f"{where}[{position}]", tool) for position, tool in enumerate(tools))


def _tools_of(items: Iterable[ContextItem], type_: str) -> Iterator[tuple[str, Tool]]:
    """Yield the tools of all items of this type, after their paths."""
    for item in items:
        if item.data["type"] == type_:
            yield from _placed(_TOOLS.validate_python(item.data["tools"]), f"{item.param}.tools")


def _offer_typed(
    offered: OfferedTools, tool: ClientTool, description: str, parameters: dict[str, Any]
) -> None:
    param = offered.param
    offered.add(
        Route(tool.type, tool.type),
        lambda name: request.Tool(name, description, parameters, param=param),
    )


def _skills(tool: TypedTool) -> Iterator[str]:
    """Yield a line for each skill that the client's environment has: a folder of instructions."""
    skills = tool.environment.get("skills")
    for skill in skills if isinstance(skills, list) else ():
        if isinstance(skill, dict):
            name, path, note = (skill.get(key) for key in ("name", "path", "description"))
            yield f"Skill {name}, read {path}/SKILL.md before you use it: {note}"


def _offer_callable(
    offered: OfferedTools,
    tool: FunctionTool | CustomTool | NamespaceTool,
    where: str,
    *,
    is_loaded: bool,
) -> None:
    """Offer a tool or those of a namespace, but for what stays deferred.

    ``where`` is the path of the tool. The description of a namespace stands before that of its
    first function.
    """
    deferred = DeferredTool(where, tool)
    if not is_loaded and deferred.functions:
        offered.deferred.append(deferred)
    if isinstance(tool, NamespaceTool):
        note = tool.description
        for number, inner in enumerate(tool.tools):
            if _may_call(inner) and (is_loaded or not inner.defer_loading):
                place = f"{where}.tools[{number}]"
                _offer_function(offered, inner, place, tool.name, note)
                note = None
    elif _may_call(tool) and (is_loaded or not tool.defer_loading):
        is_named = offered.is_hosted and tool.defer_loading and isinstance(tool, FunctionTool)
        _offer_function(offered, tool, where, tool.name if is_named else None, None)


def _may_call(tool: FunctionTool | CustomTool | TypedTool) -> bool:
    """Whether the model may call a tool itself, and not only by a program."""
    callers = getattr(tool, "allowed_callers", None)  # Of most types, an extra field.
    return not isinstance(callers, list) or "direct" in callers


def _offer_function(
    offered: OfferedTools,
    tool: FunctionTool | CustomTool,
    where: str,
    namespace: str | None,
    note: str | None,
) -> None:
    description = " ".join(filter(None, (note and f"({note})", tool.description))) or None

    def make(name: str) -> request.Tool:
        if isinstance(tool, CustomTool):
            grammar = tool.format if isinstance(tool.format, GrammarInput) else None
            constraint = to_grammar(grammar, f"{where}.format.definition")
            return custom_tool(name, description, constraint)
        return request.Tool(
            name,
            description,
            tool.parameters or {},
            is_strict=bool(tool.strict),
            param=f"{where}.parameters",
        )

    offered.param = where
    offered.add(Route(tool.type, tool.name, namespace), make)


def new_call(route: Route, call_id: str, *, is_custom: bool) -> FunctionCall | CustomToolCall:
    """Return the item of a call that begins, without its arguments."""
    common: dict[str, Any] = {
        "status": "in_progress",
        "call_id": call_id,
        "name": route.name,
        "namespace": route.namespace,
    }
    if is_custom:
        return CustomToolCall(id=new_id("ctc_"), input="", **common)
    return FunctionCall(id=new_id("fc_"), arguments="", **common)


def typed_call(tool: ClientTool, call: FunctionCall, status: ItemStatus) -> OutputItem:
    """Return the item of a typed tool for the call of its function, which has ended.

    Arguments that do not fit the tool leave a function call with the arguments as they are: the
    client tells the model that there is no such function, and runs nothing.
    """
    try:
        # Of a call that was interrupted, the text that was cut is dropped: it may be a command.
        given = from_json(call.arguments or "{}", allow_partial=status != "completed")
        common = {"id": new_id(tool.id_prefix), "status": status, "call_id": call.call_id}
        return tool.to_item(common, given)
    except (ValueError, KeyError, TypeError, AttributeError):
        return call
