"""The tool ``tool_search`` that the site runs: it loads deferred tools in the middle of a response.

The model is shown the names and descriptions of what is deferred. It calls the search with names;
from the next turn on it has their functions. The tools of an MCP server are listed then.

Source: API guide, "Tool search"; API reference, "Responses", items of a tool search.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from inference_site.core.domain.request import Tool
from inference_site.core.domain.site_tools import ToolResult
from inference_site.runs.queue import new_id
from responses_api.client_tools import SITE_SEARCH, DeferredTool, OfferedTools, load
from responses_api.mcp import offer_listed
from responses_api.site_tools import Route, SiteToolType, arguments_of
from responses_api.wire.objects import (
    HostedToolSearchCall,
    McpListTools,
    OutputItem,
    SiteCallItem,
    ToolSearchOutput,
    changed,
)
from responses_api.wire.tools import CustomTool, FunctionTool, NamespaceTool, TypedTool, tool_object

_MOST_AT_ONCE = 8
"""Names in one call: a small model that is forced to call would go on with the same ones."""
_DESCRIPTION = (
    "Loads functions by the names below; they can be called from then on. Load those that the task "
    "needs before you say that something cannot be done. It can load:"
)
_TOOL: TypeAdapter[FunctionTool | CustomTool | NamespaceTool] = TypeAdapter(
    FunctionTool | CustomTool | NamespaceTool
)


class HostedToolSearch(SiteToolType):
    """See ``SiteToolType``. The worker runs it with ``worker.tools.hosted_tool_search``."""

    type = SITE_SEARCH.type
    names = frozenset({SITE_SEARCH.name})

    def offer(
        self, tool: TypedTool, offered: OfferedTools, project_id: int
    ) -> dict[str, Any] | None:
        """Offer the search, if anything is deferred (see ``SiteToolType.offer``)."""
        servers = offered.deferred_servers
        names = list(dict.fromkeys([*(one.tool.name for one in offered.deferred), *servers]))
        if not names:
            return None
        lines = [one.line for one in offered.deferred]
        lines += [f"- {label}: {one['options']['description']}" for label, one in servers.items()]
        description = "\n".join([_DESCRIPTION, *lines])
        parameters = {
            "type": "object",
            "properties": {
                "paths": {
                    "type": "array",
                    "items": {"type": "string", "enum": names},
                    "minItems": 1,
                    "maxItems": min(len(names), _MOST_AT_ONCE),
                }
            },
            "required": ["paths"],
            "additionalProperties": False,
        }
        offered.add(SITE_SEARCH, lambda name: Tool(name, description, parameters))
        tools = [
            {"param": one.param, "tool": one.tool.model_dump(mode="json")}
            for one in offered.deferred
        ]
        return {"type": self.type, "names": names, "tools": tools, "servers": servers}

    def begin(self, route: Route, options: Mapping[str, Any]) -> HostedToolSearchCall:
        """Return the item of a call that begins (see ``SiteToolType.begin``)."""
        return HostedToolSearchCall(id=new_id("tsc_"), status="in_progress", arguments={})

    def end(self, item: SiteCallItem, arguments: str, result: ToolResult) -> SiteCallItem:
        """Return the item of a call with its arguments (see ``SiteToolType.end``)."""
        return changed(item, status="completed", arguments=arguments_of(arguments))

    def following(
        self, item: SiteCallItem, options: Mapping[str, Any], result: ToolResult
    ) -> Sequence[OutputItem]:
        """Return the item with what was loaded, and the lists of tools of servers.

        Of a namespace it has the tools that are deferred.
        """
        shown = [tool_object(one.deferred_part) for one in _loaded(options, result)]
        lists: Mapping[str, Mapping[str, Any]] = result.fields.get("lists", {})
        shown += [options["servers"][label]["tool"] for label in lists]
        return [
            ToolSearchOutput(id=new_id("tso_"), status="completed", tools=shown),
            *(
                McpListTools(id=new_id("mcpl_"), server_label=label, **listed)
                for label, listed in lists.items()
            ),
        ]

    def discover(
        self,
        route: Route,
        options: Mapping[str, Any],
        result: ToolResult,
        offered: OfferedTools,
    ) -> None:
        """Offer the functions that were loaded."""
        offered.is_hosted = True
        for one in _loaded(options, result):
            load(offered, one)
        for label, listed in result.fields.get("lists", {}).items():
            offer_listed(listed["tools"], options["servers"][label]["options"], offered)

    def is_spent(
        self, options: Mapping[str, Any], result: ToolResult, offered: OfferedTools
    ) -> bool:
        """Whether all is loaded, or nothing new: a small model would repeat the search."""
        names = set(result.fields.get("names", ()))
        return bool(names) and (not offered.tools or names.issuperset(options["names"]))


TYPE = HostedToolSearch()


def _loaded(options: Mapping[str, Any], result: ToolResult) -> Iterator[DeferredTool]:
    names = result.fields.get("names", ())
    for one in options["tools"]:
        if one["tool"]["name"] in names:
            yield DeferredTool(one["param"], _TOOL.validate_python(one["tool"]))
