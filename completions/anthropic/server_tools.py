"""Tools of a request that the site runs: the web search, and the tools of MCP servers.

The worker runs them with ``worker.tools``; ``server_tool_assembler`` writes what it does into the
answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from completions.anthropic import wire
from completions.anthropic.tool_changes import defined_tools
from inference_site.core.domain.request import Tool, distinct_name, function_name, short_name
from inference_site.core.domain.site_tools import WebResult
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.core.storage.cipher import seal, unreadable, unseal
from inference_site.gateway.request_fields.mcp import (
    MCP,
    ServerFields,
    listed_functions,
    registered_server,
    requested_server,
)
from inference_site.gateway.request_fields.web_search import (
    WEB_SEARCH,
    can_search,
    search_functions,
    search_options,
)

_RESULT = TypeAdapter(WebResult)
CITED_FROM_CHARS = 300
"""How much of a result is kept for what citations repeat of it."""


@dataclass(frozen=True, slots=True)
class SiteFunction:
    """A function that the site runs: the place of its tool among the options, and its name there.

    ``server`` is the MCP server that has it.
    """

    place: int
    name: str
    server: str | None = None


@dataclass(slots=True)
class ServerTools:
    """The tools of one request.

    ``options`` are those of the worker. ``functions`` are known before the queue, by the name that
    the model calls; ``unlisted`` are the places of the servers whose tools must be listed first.
    """

    options: list[dict[str, Any]] = field(default_factory=list)
    functions: dict[str, Tool] = field(default_factory=dict)
    routes: dict[str, SiteFunction] = field(default_factory=dict)
    unlisted: list[int] = field(default_factory=list)
    max_searches: int | None = None
    taken: frozenset[str] = frozenset()
    """The names of functions of the client's."""

    def add(self, function: Tool, place: int, server: str | None = None, param: str = "") -> Tool:
        """Offer a function under a name that no other one has; return it with this name.

        ``param`` is the field of the request that it came from.
        """
        kind = WEB_SEARCH if server is None else MCP
        name = function_name(function.name, server, kind)
        if name in self.routes or name in self.taken:
            name = distinct_name(name, function.name, server, kind)
        self.routes[name] = SiteFunction(place, function.name, server)
        self.functions[name] = offered = replace(function, name=name, param=param)
        return offered

    def narrow(self, choice: wire.ToolChoice | None) -> ServerTools:
        """Return those among which ``tool_choice`` lets the model choose.

        The answer that must be a call of a function of the client's needs none of them.
        """
        if choice is None or choice.type in ("auto", "any"):
            return self
        if choice.type == "tool" and choice.name in self.routes:
            return replace(self, functions={choice.name: self.functions[choice.name]}, unlisted=[])
        return ServerTools()


def server_tools(body: wire.Prompt, project_id: int) -> ServerTools:
    """Return the tools of a request. Raise InvalidRequestError for what may not be used."""
    clients = {tool.name for tool in body.tools or () if isinstance(tool, wire.RequestTool)}
    names = clients | defined_tools(body).keys()
    offered = ServerTools(taken=frozenset(short_name(name) for name in names))
    toolsets: dict[str, tuple[int, wire.McpToolset]] = {}
    for position, tool in enumerate(body.tools or ()):
        param = f"tools.{position}"
        match tool:
            case wire.ServerSearchTool():
                if tool.name in offered.taken or tool.name in offered.routes:
                    raise _invalid(f"{param}.name", f"another tool is named '{tool.name}'")
                _offer_search(offered, tool, param)
            case wire.McpToolset():
                if tool.mcp_server_name in toolsets:
                    raise _invalid(
                        f"{param}.mcp_server_name",
                        f"there is another toolset of '{tool.mcp_server_name}'",
                    )
                toolsets[tool.mcp_server_name] = position, tool
    servers = {server.name for server in body.mcp_servers or ()}
    for name, (position, _) in toolsets.items():
        if name not in servers:
            raise _invalid(
                f"tools.{position}.mcp_server_name", f"`mcp_servers` has no server '{name}'"
            )
    listings = _listings(body)
    taken = set[str]()
    for position, server in enumerate(body.mcp_servers or ()):
        param = f"mcp_servers.{position}"
        if server.name in taken:
            raise _invalid(f"{param}.name", f"another server is named '{server.name}'")
        taken.add(server.name)
        toolset = toolsets[server.name][1] if server.name in toolsets else None
        options = _server_options(server, toolset, param, project_id)
        if options is None:
            continue
        place = len(offered.options)
        offered.options.append(options)
        pinned = None if toolset is None else toolset.tools
        known = listings.get(server.name) if pinned is None else pinned
        if known is None:
            offered.unlisted.append(place)
            continue
        for function in listed_functions([one.model_dump() for one in known], options):
            offered.add(function, place, server.name, param)
    return offered.narrow(body.tool_choice)


def _offer_search(offered: ServerTools, tool: wire.ServerSearchTool, param: str) -> None:
    if not can_search():
        raise InvalidRequestError(
            f"Invalid '{param}.type': this site has no search engine.",
            param=f"{param}.type",
            code="unsupported_value",
        )
    if tool.allowed_domains and tool.blocked_domains:
        raise _invalid(
            f"{param}.blocked_domains", "it cannot be used together with 'allowed_domains'"
        )
    options = search_options((), None, tool.user_location, tool.allowed_domains or ())
    options |= {"shows_results": True, "blocked_domains": tool.blocked_domains or []}
    [function] = search_functions(tool.user_location, [WEB_SEARCH])
    offered.add(function, len(offered.options), param=param)
    offered.options.append(options)
    offered.max_searches = tool.max_uses


def _server_options(
    server: wire.McpServerDefinition,
    toolset: wire.McpToolset | None,
    param: str,
    project_id: int,
) -> dict[str, Any] | None:
    """Return the options of a server for the worker; None if none of its tools is enabled."""
    fields = ServerFields(f"{param}.name", f"{param}.url", f"{param}.authorization_token")
    token = server.authorization_token
    if server.url is None:
        where = registered_server(
            server.name, project_id, fields, has_credentials=token is not None
        )
    else:
        where = requested_server(server.url, {}, token, project_id, fields)
    allowed, excluded = None, list[str]()
    if older := server.tool_configuration:
        if toolset is not None:
            raise _invalid(
                f"{param}.tool_configuration", "the server has a toolset, which says the same"
            )
        if older.enabled is False:
            return None
        allowed = older.allowed_tools
    elif toolset is not None:
        configs = {name: one.enabled for name, one in (toolset.configs or {}).items()}
        default = toolset.default_config
        if default is not None and default.enabled is False:
            allowed = [name for name, enabled in configs.items() if enabled]
            if not allowed:
                return None
        excluded = [name for name, enabled in configs.items() if enabled is False]
    return {
        "type": MCP,
        "server_label": server.name,
        **where,
        "tool_names": allowed,
        "excluded_names": excluded,
    }


def _listings(body: wire.Prompt) -> Mapping[str, list[wire.ListedTool]]:
    """Return the newest list of tools of each server among the messages."""
    return {
        block.mcp_server_name: block.tools
        for message in body.messages
        if not isinstance(message.content, str)
        for block in message.content
        if isinstance(block, wire.McpToolListingBlock)
    }


def seal_result(result: WebResult, project_id: int) -> str:
    """Return a result of a search as sealed content."""
    return seal(_RESULT.dump_json(result).decode(), project_id)


def unseal_result(sealed: str, project_id: int, param: str) -> WebResult:
    """Return a result of a search. Raise InvalidRequestError unless it was sealed here."""
    text = unseal(sealed, project_id, param)
    try:
        return _RESULT.validate_json(text)
    except ValidationError as exc:
        raise unreadable(param) from exc


def numbered(results: Iterable[WebResult]) -> list[WebResult]:
    """Return the beginnings of earlier results at the places of their numbers, from 1.

    In the place of a number that is not there stands a result without a URL.
    """
    by_number: dict[int, WebResult] = {}
    for one in results:
        by_number.setdefault(one.number, replace(one, text=one.text[:CITED_FROM_CHARS]))
    most = max(by_number, default=0)
    return [by_number.get(n) or WebResult(n, "", "", "") for n in range(1, most + 1)]


def _invalid(param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid '{param}': {why}.", param=param, code="invalid_value")
