"""The tool ``hosted_tool_search``: says which deferred tools a call of the model loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inference_site.core.domain.site_tools import ToolResult
from worker.tools.base import CallContext


def create(options: Mapping[str, Any]) -> ToolSearch:
    """Return the tool with the options of ``responses_api.tool_search``."""
    return ToolSearch(tuple(options["names"]))


@dataclass(frozen=True, slots=True)
class ToolSearch:
    """See ``SiteTool``. ``names`` are those of what is deferred; a result has those to load."""

    names: tuple[str, ...]

    def is_idempotent(self, name: str) -> bool:
        """A search changes nothing."""
        return True

    def call(self, name: str, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        """Return the names among the argument ``paths`` that there are."""
        given = arguments.get("paths")
        wanted = dict.fromkeys(map(str, given if isinstance(given, list) else [given or ""]))
        loaded = [one for one in wanted if one in self.names]
        lines = list[str]()
        if loaded:
            lines.append(f"Loaded: {', '.join(loaded)}. These functions can be called now.")
        if unknown := [one for one in wanted if one not in self.names]:
            lines.append(f"Not found: {', '.join(unknown)}. There is: {', '.join(self.names)}.")
        return ToolResult("\n".join(lines), {"names": loaded})
