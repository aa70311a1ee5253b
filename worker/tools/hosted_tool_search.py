"""The tool ``hosted_tool_search``: says which deferred tools a call of the model loads.

The tools of MCP servers are listed only here, so a server that no response needs is not asked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from inference_site.core.domain.site_tools import ToolResult
from inference_site.mcp.access import LIST_TOOLS
from worker.tools.base import RESULT_FACTOR, CallContext, SiteTool, create_tool

_ERROR_BYTES = 200
"""What the error of a server that is not listed takes of a result."""


def create(options: Mapping[str, Any]) -> ToolSearch:
    """Return the tool with the options of ``responses_api.tool_search``."""
    servers = {label: create_tool(one["options"]) for label, one in options["servers"].items()}
    return ToolSearch(tuple(options["names"]), servers)


@dataclass(frozen=True, slots=True)
class ToolSearch:
    """See ``SiteTool``. ``names`` are those of what is deferred, also of the ``servers``.

    The ``fields`` of a result have the ``names`` to load and the ``lists`` of servers, by label:
    ``tools``, and an ``error`` where a server could not be asked.
    """

    names: tuple[str, ...]
    servers: Mapping[str, SiteTool]

    def is_idempotent(self, name: str) -> bool:
        """A search changes nothing."""
        return True

    def call(self, name: str, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        """Load the names in the argument ``paths`` (see ``SiteTool.call``)."""
        given = arguments.get("paths")
        paths = given if isinstance(given, list) else [given] if given else []
        wanted = dict.fromkeys(map(str, paths))
        unknown = [one for one in wanted if one not in self.names]
        lists = self._lists([one for one in wanted if one in self.servers], context)
        errors = {label: one["error"] for label, one in lists.items() if "error" in one}
        loaded = [one for one in wanted if one in self.names and one not in errors]
        lines = list[str]()
        if loaded:
            lines.append(f"Loaded: {', '.join(loaded)}. These functions can be called now.")
        if unknown or not wanted:
            missing = (
                f"Not found: {', '.join(unknown)}" if unknown else "Nothing was named in 'paths'"
            )
            lines.append(f"{missing}. There is: {', '.join(self.names)}.")
        lines += [f"Not loaded: {label}: {error}" for label, error in errors.items()]
        return ToolResult("\n".join(lines), {"names": loaded, "lists": lists})

    def _lists(self, labels: list[str], context: CallContext) -> dict[str, dict[str, Any]]:
        """Return the lists of these servers, which have the time and room of one call together."""
        until = time.monotonic() + context.timeout_s
        most = RESULT_FACTOR * context.max_bytes - _ERROR_BYTES * len(labels)
        lists = dict[str, dict[str, Any]]()
        for label in labels:
            if (left_s := until - time.monotonic()) <= 0:
                lists[label] = _not_listed(
                    "the others took all the time of the call; load it alone"
                )
                continue
            result = self.servers[label].call(LIST_TOOLS, {}, replace(context, timeout_s=left_s))
            if result.is_error:
                lists[label] = _not_listed(result.output)
                continue
            others = any(one["tools"] for one in lists.values())
            lists[label] = {"tools": result.fields["tools"]}
            if len(orjson.dumps([self.names, lists])) > most:
                lists[label] = _not_listed(
                    "its list of tools does not fit beside the others; load it alone"
                    if others
                    else f"its list of tools has more than {context.max_bytes} bytes"
                )
        return lists


def _not_listed(error: str) -> dict[str, Any]:
    return {"tools": [], "error": error}
