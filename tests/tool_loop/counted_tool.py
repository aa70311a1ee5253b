"""A tool of the site for tests: it sends each call to a server, which counts the calls.

It takes the place of ``code_interpreter``, which this product does not run. The functions
``count`` and ``again`` send a call; a call of ``again`` may be repeated. In the first attempt the
arguments may have the worker killed: ``die`` is ``before`` the call is sent, or ``after`` it was
answered. With ``hold`` the call stays at that point until the test kills the worker; ``in_tool``
has the server never say that it is done. ``more`` is how many characters the result has beside the
answer.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import httpx

from inference_site.core.domain import request
from inference_site.core.domain.site_tools import ToolResult
from inference_site.runs.queue import new_id
from responses_api.client_tools import OfferedTools
from responses_api.site_tools import Route, SiteToolType
from responses_api.wire.objects import McpCall, SiteCallItem, changed
from responses_api.wire.tools import TypedTool
from worker.tools.base import CallContext, ToolCancelled, ToolTimeout, ToolUnreachable

TYPE = "counted"
NAMES = ("count", "again")


class CountedToolType(SiteToolType):
    """Offers both functions; their calls are shown as calls of an MCP server."""

    type = TYPE
    names = frozenset({"code_interpreter"})

    def offer(
        self, tool: TypedTool, offered: OfferedTools, project_id: int
    ) -> dict[str, Any] | None:
        """Offer the functions; the options have the server's address."""
        for name in NAMES:
            offered.add(Route(TYPE, name), lambda known: request.Tool(known, None, {}))
        return {"type": TYPE, "url": (tool.model_extra or {})["url"]}

    def begin(self, route: Route, options: Mapping[str, Any]) -> SiteCallItem:
        """Return the item of a call that begins."""
        fields = {"server_label": TYPE, "name": route.name, "arguments": ""}
        return McpCall(id=new_id("mcp_"), status="in_progress", **fields)

    def end(self, item: SiteCallItem, arguments: str, result: ToolResult) -> SiteCallItem:
        """Return the item of a call with its result."""
        if result.is_error:
            content = [{"type": "text", "text": result.output}]
            error = {"type": "mcp_tool_execution_error", "content": content}
            return changed(item, status="failed", error=error)
        return changed(item, status="completed", output=result.output)


class CountedTool:
    """Sends calls to the server."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._url = options["url"]

    def is_idempotent(self, name: str) -> bool:
        """Whether a call of this function may be repeated."""
        return name == "again"

    def call(self, name: str, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        """Send the call; the answer is the result."""
        die, hold = (
            arguments.get(name) if context.attempt == 1 else None for name in ("die", "hold")
        )
        if die == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if hold == "before":
            self._wait_for_death(arguments)
        if arguments.get("deaf"):  # It looks at no clock, and never asks whether it must stop.
            time.sleep(3600)
        if "huge" in arguments:
            return ToolResult("x" * int(arguments["huge"]))
        sent = {"key": context.key, "attempt": context.attempt, "name": name, **arguments}
        try:
            answer = self._post(sent, context)
        except httpx.ConnectError as exc:
            raise ToolUnreachable(str(exc)) from exc
        if die == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        if hold == "after":
            self._wait_for_death(arguments)
        return ToolResult(answer + "x" * int(arguments.get("more", 0)))

    def _wait_for_death(self, arguments: Mapping[str, Any]) -> None:
        """Let the test know that the call is at its point, and stay there."""
        httpx.post(f"{self._url}held", json=arguments)
        time.sleep(3600)

    def _post(self, sent: dict[str, Any], context: CallContext) -> str:
        """Return the answer of the server, which may take its time."""
        until = time.monotonic() + context.timeout_s
        with httpx.Client() as client:
            client.post(self._url, json=sent)
            while True:  # The server says 204 until the call is done.
                if context.is_cancelled():
                    raise ToolCancelled
                if time.monotonic() > until:
                    raise ToolTimeout
                done = client.get(self._url, params={"key": context.key})
                if done.status_code == httpx.codes.OK:
                    return done.text
                time.sleep(0.02)
