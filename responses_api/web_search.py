"""The tool ``web_search``: its functions, its options for the worker, and its items.

Source: API reference, "Responses", ``tools``, and "Web search tool call".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inference_site.core.domain.site_tools import ToolResult
from inference_site.gateway.request_fields.web_search import (
    ARGUMENTS,
    OPEN_PAGE,
    WEB_SEARCH,
    can_search,
    search_functions,
    search_options,
)
from inference_site.runs.queue import new_id
from responses_api.client_tools import OfferedTools
from responses_api.site_tools import Route, SiteToolType, text_argument
from responses_api.wire.objects import SiteCallItem, WebSearchCall, changed
from responses_api.wire.tools import WEB_SEARCH_NAMES, TypedTool, WebSearchTool

SOURCES = "web_search_call.action.sources"
"""The value of ``include`` that adds the sources to the items."""


class WebSearchType(SiteToolType):
    """See ``SiteToolType``. The worker runs it with ``worker.tools.web_search``."""

    type = WEB_SEARCH
    names = WEB_SEARCH_NAMES

    def offer(
        self, tool: TypedTool, offered: OfferedTools, project_id: int
    ) -> dict[str, Any] | None:
        """Offer the functions, unless no search engine is set or the tool must stay offline."""
        assert isinstance(tool, WebSearchTool)
        if not can_search() or tool.external_web_access is False:
            return None
        for function in search_functions(tool.user_location):
            offered.add_function(Route(self.type, function.name), function)
        filters = tool.filters
        user_texts = (
            part.get("text") or ""
            for item in offered.items
            if item.get("type") == "message" and item.get("role") == "user"
            for part in item["content"]
        )
        return search_options(
            user_texts,
            tool.search_context_size,
            tool.user_location,
            (filters and filters.allowed_domains) or [],
            shows_sources=SOURCES in offered.include,
        )

    def begin(self, route: Route, options: Mapping[str, Any]) -> WebSearchCall:
        """Return the item of a call that begins (see ``SiteToolType.begin``)."""
        action = _action(route.name, "")
        return WebSearchCall(id=new_id("ws_"), status="in_progress", action=action)

    def end(self, item: SiteCallItem, arguments: str, result: ToolResult) -> SiteCallItem:
        """Return the item of a call with its result (see ``SiteToolType.end``)."""
        assert isinstance(item, WebSearchCall)
        is_search = item.action["type"] == "search"
        function = WEB_SEARCH if is_search else OPEN_PAGE
        action = _action(function, text_argument(arguments, ARGUMENTS[function]) or "")
        if result.is_error:
            return changed(item, status="failed", action=action)
        return changed(
            item, status="completed", action={**action, **result.fields.get("action", {})}
        )


TYPE = WebSearchType()


def _action(function: str, argument: str) -> dict[str, Any]:
    """Return the action of a call whose argument is known as far as this."""
    if function == OPEN_PAGE:
        return {"type": "open_page", "url": argument or None}
    return {"type": "search", "query": argument, "queries": [argument] if argument else []}
