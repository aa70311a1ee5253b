"""The tool ``mcp``: the tools of a server, offered as functions, and their calls as items.

The tools of a server are known from the newest ``mcp_list_tools`` item of the history; without one,
they are listed before the first turn of the model, or when a search of tools loads the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from django.conf import settings

from inference_site.core.domain.site_tools import ToolResult
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.request_fields.mcp import (
    ServerFields,
    listed_functions,
    registered_server,
    requested_server,
)
from inference_site.mcp.access import LIST_TOOLS, is_allowed
from inference_site.mcp.models import McpServer
from inference_site.runs.queue import new_id
from responses_api.mcp_approvals import answers_in, approved_calls
from responses_api.site_tools import FirstCall, Route, SiteToolType
from responses_api.wire.objects import (
    McpApprovalRequest,
    McpCall,
    McpListTools,
    SiteCallItem,
    changed,
)
from responses_api.wire.tools import (
    AllowedTools,
    McpApprovals,
    McpFilter,
    McpTool,
    NamedChoice,
    TypedChoice,
    TypedTool,
    tool_object,
)

if TYPE_CHECKING:
    from responses_api.client_tools import OfferedTools

_ASK = "ask"
"""The option that says which tools need an approval: ``default``, and the names of exceptions."""


class McpToolType(SiteToolType):
    """The tools of MCP servers."""

    type = "mcp"
    names = frozenset({"mcp"})

    def offer(
        self, tool: TypedTool, offered: OfferedTools, project_id: int
    ) -> dict[str, Any] | None:
        """Offer the tools of a server that are known; see ``SiteToolType``.

        A site without registered servers and without allowed hosts runs no MCP tools.
        """
        assert isinstance(tool, McpTool)
        if not settings.MCP_ALLOWED_HOSTS and not McpServer.objects.exists():
            return None
        options = _options(tool, offered.param, project_id)
        if any(one.get("server_label") == tool.server_label for one in offered.site_tools):
            raise InvalidRequestError(
                f"Invalid '{offered.param}.server_label': another tool has it too.",
                param=f"{offered.param}.server_label",
            )
        listed = [  # Clients may have written these items.
            item
            for item in offered.items
            if item.get("type") == "mcp_list_tools"
            and item.get("server_label") == tool.server_label
            and not item.get("error")
            and isinstance(item.get("tools"), list)
        ]
        if listed:
            offer_listed(listed[-1]["tools"], options, offered)
        elif tool.defer_loading and offered.is_hosted:
            server = {"tool": tool_object(tool), "options": options}
            offered.deferred_servers[tool.server_label] = server
        else:
            offered.first_calls.append(FirstCall(Route("mcp", LIST_TOOLS, tool.server_label)))
        answers = answers_in(offered.new_items, offered.items)
        for call in approved_calls(answers, tool.server_label, project_id):
            if not is_allowed(options, call.name):
                raise InvalidRequestError(
                    f"Invalid '{offered.param}.allowed_tools': the approved tool '{call.name}' is "
                    "not among them.",
                    param=f"{offered.param}.allowed_tools",
                )
            fields = {"approval_request_id": call.request_id}
            route = Route("mcp", call.name, tool.server_label)
            offered.first_calls.append(FirstCall(route, call.arguments, fields))
        return options

    def begin(self, route: Route, options: Mapping[str, Any]) -> SiteCallItem:
        """Return the item of a list, of a call, or of the request to approve one."""
        label = route.namespace or ""
        if route.name == LIST_TOOLS:
            return McpListTools(id=new_id("mcpl_"), server_label=label, tools=[])
        if not self.is_run(route, options):
            return McpApprovalRequest(
                id=new_id("mcpr_"), server_label=label, name=route.name, arguments=""
            )
        return McpCall(
            id=new_id("mcp_"),
            status="in_progress",
            server_label=label,
            name=route.name,
            arguments="",
        )

    def is_run(self, route: Route, options: Mapping[str, Any]) -> bool:
        """Whether a call needs no approval; the lists of tools need none."""
        ask = options.get(_ASK) or {}
        needs_approval: bool = ask.get("default", False) != (route.name in ask.get("except", ()))
        return route.name == LIST_TOOLS or not needs_approval

    def end(self, item: SiteCallItem, arguments: str, result: ToolResult) -> SiteCallItem:
        """Return the item with the result; see ``SiteToolType``."""
        if isinstance(item, McpListTools):
            if result.is_error:
                return changed(item, error=str(result.fields.get("error") or result.output))
            return changed(item, tools=result.fields["tools"])
        if result.is_error:
            unnamed = {"type": "mcp_protocol_error", "code": -32000, "message": result.output}
            error = result.fields.get("error") or unnamed
            return changed(item, arguments=arguments, status="failed", error=error)
        return changed(item, arguments=arguments, status="completed", output=result.output)

    def discover(
        self,
        route: Route,
        options: Mapping[str, Any],
        result: ToolResult,
        offered: OfferedTools,
    ) -> None:
        """Offer the tools that were listed."""
        if route.name == LIST_TOOLS and not result.is_error:
            offer_listed(result.fields["tools"], options, offered)

    def is_message(self, route: Route) -> bool:
        """Whether the model is shown the call: all but lists."""
        return route.name != LIST_TOOLS


TYPE = McpToolType()


def _options(tool: McpTool, param: str, project_id: int) -> dict[str, Any]:
    """Return the options for the worker. Raise InvalidRequestError if it may not be used."""
    for name in ("connector_id", "tunnel_id"):
        if getattr(tool, name) is not None:
            raise InvalidRequestError(
                f"Unsupported parameter: '{param}.{name}'; name a 'server_url', or a server of "
                "this site by its 'server_label'.",
                param=f"{param}.{name}",
                code="unsupported_parameter",
            )
    allowed = tool.allowed_tools
    if isinstance(allowed, list):
        allowed = McpFilter(tool_names=allowed)
    fields = ServerFields(
        label=f"{param}.server_label",
        url=f"{param}.server_url",
        authorization=f"{param}.{'authorization' if tool.authorization else 'headers'}",
        headers=f"{param}.headers",
    )
    if tool.server_url is None:
        has_credentials = bool(tool.authorization or tool.headers)
        server = registered_server(
            tool.server_label, project_id, fields, has_credentials=has_credentials
        )
    else:
        server = requested_server(
            tool.server_url, tool.headers or {}, tool.authorization, project_id, fields
        )
    if tool.server_description:
        server["description"] = tool.server_description
    return {
        "type": "mcp",
        "server_label": tool.server_label,
        **server,
        "tool_names": allowed and allowed.tool_names,
        "read_only": allowed and allowed.read_only,
        _ASK: _ask(tool, param),
    }


def narrow(offered: OfferedTools, choice: Any) -> None:
    """Apply a ``tool_choice`` to the tools that are not listed yet.

    Without a choice of tools of MCP, no list is needed. A chosen server that is deferred is listed.
    Calls that were approved are made.
    """
    chosen: list[Any] | None = None
    match choice:
        case "none" | NamedChoice():
            chosen = []
        case TypedChoice():
            chosen = [choice]
        case AllowedTools(tools=tools):
            chosen = tools
    if chosen is None:
        return
    named = [one.model_extra or {} for one in chosen if one.type == TYPE.type]
    labels = [one.get("server_label") for one in named]  # A client may have sent anything.
    offered.first_calls += [
        FirstCall(Route(TYPE.type, LIST_TOOLS, label))
        for label in offered.deferred_servers
        if label in labels or None in labels
    ]
    kept = list[FirstCall]()
    for call in offered.first_calls:
        label = call.route.namespace
        names = [one.get("name") for one in named if one.get("server_label") in (None, label)]
        if call.route.type != TYPE.type or call.route.name != LIST_TOOLS:
            kept.append(call)
        elif names:
            kept.append(call)
            options = next(o for o in offered.site_tools if o.get("server_label") == label)
            if None not in names:
                options["tool_names"] = [n for n in names if is_allowed(options, str(n))]
    offered.first_calls[:] = kept


def _ask(tool: McpTool, param: str) -> dict[str, Any]:
    """Return which tools need an approval.

    Without ``require_approval`` all do. Of an object, ``never`` has the exceptions; with ``always``
    alone, its tools are the only ones.
    """
    given = tool.require_approval
    if not isinstance(given, McpApprovals):
        return {"default": given != "never", "except": []}
    for name in ("always", "never"):
        if (one := getattr(given, name)) is not None and one.read_only is not None:
            raise InvalidRequestError(
                f"Unsupported parameter: '{param}.require_approval.{name}.read_only'; name the "
                "tools.",
                param=f"{param}.require_approval.{name}.read_only",
                code="unsupported_parameter",
            )
    always = (given.always and given.always.tool_names) or []
    if given.never is None and given.always is not None:
        return {"default": False, "except": always}
    never = (given.never and given.never.tool_names) or []
    return {"default": True, "except": [name for name in never if name not in always]}


def offer_listed(tools: list[Any], options: Mapping[str, Any], offered: OfferedTools) -> None:
    """Offer those tools of a list that the request allows."""
    for function in listed_functions(tools, options):
        route = Route("mcp", function.name, options["server_label"])
        offered.add_function(route, function)
