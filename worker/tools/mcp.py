"""Calls of the tools of MCP servers, and lists of these tools.

A server is one that an operator has registered, or the one that the request names by its URL. The
SDK behind the client takes 50 MB, so only the first tool of a worker imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from importlib import import_module
from typing import Any

from inference_site.core.domain.site_tools import ToolResult
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.mcp.access import (
    LIST_TOOLS,
    Endpoint,
    NotUsable,
    is_allowed,
    registered_endpoint,
    requested_endpoint,
)
from inference_site.mcp.connections import user_endpoint
from inference_site.mcp.models import McpServer
from inference_site.runs.models import Generation
from worker.tools.base import CallContext, ToolCancelled, ToolTimeout, ToolUnreachable

_WIRE_FACTOR = 8
"""How many bytes a server may send for each byte of a result: JSON takes more than the text, and
servers send a result twice, as text and as an object."""


def create(options: Mapping[str, Any]) -> McpTool:
    """Return the tool with these options, which ``responses_api.mcp`` writes."""
    import_module("inference_site.mcp.client")  # It takes seconds, which are not those of the call.
    return McpTool(options)


class McpTool:
    """One MCP server of a request."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    def is_idempotent(self, name: str) -> bool:
        """Whether a call whose outcome is unknown may be repeated: the operator decides it.

        The hints of the server itself do not count.
        """
        if name == LIST_TOOLS:
            return True
        server = self._registered()
        return server is not None and server.is_idempotent

    def call(self, name: str, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        """Call a tool, or list the tools if ``name`` is ``LIST_TOOLS``.

        See ``SiteTool``. A tool that the request does not allow is not called, whatever the model
        has written.
        """
        from inference_site.mcp import client

        most_bytes = _WIRE_FACTOR * context.max_bytes
        limits = client.Limits(context.timeout_s, most_bytes, context.is_cancelled)
        server = self._registered()

        def use(endpoint: Endpoint) -> ToolResult:
            if name == LIST_TOOLS:
                tools = client.list_tools(endpoint, limits)
                _record(server, tools)
                return ToolResult("", {"tools": tools})
            found = client.call_tool(endpoint, name, arguments, context.key, limits)
            return _result(found.text, context.max_bytes, is_error=found.is_error)

        try:
            if name != LIST_TOOLS and not is_allowed(self._options, name):
                raise NotUsable(f"the request does not allow the tool {name!r}")
            endpoint = self._endpoint(server, context)
            try:
                return use(endpoint)
            except client.McpUnreachable as exc:
                is_refused = exc.error.get("code") == HTTPStatus.UNAUTHORIZED
                if server is None or not server.is_per_user or not is_refused:
                    raise
                # Nothing was sent: the token was revoked, or has ended early.
                return use(self._endpoint(server, context, endpoint))
        except NotUsable as exc:
            message = f"Nothing was sent: {exc}."
            return _not_listed(server, message) if name == LIST_TOOLS else _failed(message)
        except client.McpTimeout as exc:
            if name == LIST_TOOLS:
                return _not_listed(server, str(exc))
            raise ToolTimeout(str(exc)) from exc
        except client.McpCancelled as exc:
            raise ToolCancelled(str(exc)) from exc
        except client.McpUnreachable as exc:
            if name == LIST_TOOLS:
                return _not_listed(server, str(exc))
            raise ToolUnreachable(str(exc)) from exc
        except client.McpFailed as exc:
            if name == LIST_TOOLS:
                return _not_listed(server, str(exc))
            return ToolResult(str(exc), {"error": exc.error}, is_error=True)

    def _endpoint(
        self, server: McpServer | None, context: CallContext, refused: Endpoint | None = None
    ) -> Endpoint:
        """Return where the server is; not with the token of ``refused``. Raise NotUsable."""
        if "server_id" not in self._options:
            return requested_endpoint(self._options["url"], self._options["credentials"])
        if server is None or not server.is_active:
            raise NotUsable("the server is not registered any more")
        if not server.is_per_user:
            return registered_endpoint(server)
        with release_connection_after():
            runs = Generation.objects.filter(public_id=context.generation_id)
            owner, user = runs.values_list("api_key__owner", "api_key__user").get()
        # The key that makes the request is one of the user's own, or that of the playground.
        return user_endpoint(server, owner or user, refused)

    def _registered(self) -> McpServer | None:
        if "server_id" not in self._options:
            return None
        with release_connection_after():
            return McpServer.objects.filter(pk=self._options["server_id"]).first()


def _not_listed(server: McpServer | None, message: str) -> ToolResult:
    _record(server, None, message)
    return ToolResult(message, {"error": message}, is_error=True)


def _record(server: McpServer | None, tools: list[dict[str, Any]] | None, error: str = "") -> None:
    """Save what a listing has found, for the page of a registered server.

    What one user may see there is not for the page.
    """
    if server is not None and not server.is_per_user:
        with release_connection_after():
            server.record_check(tools, error)


def _result(text: str, max_bytes: int, *, is_error: bool) -> ToolResult:
    if not is_error:
        return ToolResult(text)
    content = [{"type": "text", "text": text[: max_bytes // 4]}]
    error = {"type": "mcp_tool_execution_error", "content": content}
    return ToolResult(text, {"error": error}, is_error=True)


def _failed(message: str) -> ToolResult:
    error = {"type": "mcp_protocol_error", "code": -32000, "message": message}
    return ToolResult(message, {"error": error}, is_error=True)
