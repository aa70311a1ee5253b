"""The tool ``web_search``: its functions, its options for the worker, and its items.

Source: API reference, "Responses", ``tools``, and "Web search tool call".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from django.conf import settings
from pydantic_core import from_json

from inference_site.core.domain import request
from inference_site.core.domain.site_tools import ToolResult
from inference_site.runs.queue import new_id
from responses_api.citations import urls_in
from responses_api.client_tools import OfferedTools, Route
from responses_api.site_tools import SiteToolType
from responses_api.wire.objects import SiteCallItem, WebSearchCall, changed
from responses_api.wire.tools import WEB_SEARCH, TypedTool, UserLocation, WebSearchTool

SOURCES = "web_search_call.action.sources"
"""The value of ``include`` that adds the sources to the items."""
_SEARCH, _OPEN_PAGE = "web_search", "open_page"
_DESCRIPTIONS = {
    _SEARCH: (
        "Searches the web, and returns sources with a number, a URL and their text. Search for "
        "what is recent, and for facts of which you are not sure. After each sentence of the "
        "answer that rests on a source, name the source by its number in brackets, such as [1]."
    ),
    _OPEN_PAGE: (
        "Opens a page of the web and returns its text. Only pages whose URL was in the results of "
        "a search, or in a message of the user, can be opened."
    ),
}
_ARGUMENTS = {_SEARCH: "query", _OPEN_PAGE: "url"}
_MAX_KNOWN_URLS = 200


class WebSearchType(SiteToolType):
    """See ``SiteToolType``. The worker runs it with ``worker.tools.web_search``."""

    type = "web_search"
    names = WEB_SEARCH

    def offer(
        self, tool: TypedTool, offered: OfferedTools, project_id: int
    ) -> dict[str, Any] | None:
        """Offer the functions, unless no search engine is set or the tool must stay offline."""
        assert isinstance(tool, WebSearchTool)
        if settings.WEB_SEARCH_PROVIDER == "off" or tool.external_web_access is False:
            return None
        location = _location(tool.user_location)
        for function, argument in _ARGUMENTS.items():
            description = _DESCRIPTIONS[function]
            if function == _SEARCH and location:
                description += f" The user is in {', '.join(location.values())}."
            parameters = {
                "type": "object",
                "properties": {argument: {"type": "string"}},
                "required": [argument],
                "additionalProperties": False,
            }
            offered.add(Route(self.type, function), _function(description, parameters))
        filters = tool.filters
        return {
            "type": self.type,
            "context_size": tool.search_context_size or "medium",
            "allowed_domains": (filters and filters.allowed_domains) or [],
            "location": location,
            "known_urls": list(_user_urls(offered.items)),
            "shows_sources": SOURCES in offered.include,
        }

    def begin(self, route: Route, options: Mapping[str, Any]) -> WebSearchCall:
        """Return the item of a call that begins (see ``SiteToolType.begin``)."""
        action = _action(route.name, "")
        return WebSearchCall(id=new_id("ws_"), status="in_progress", action=action)

    def end(self, item: SiteCallItem, arguments: str, result: ToolResult) -> SiteCallItem:
        """Return the item of a call with its result (see ``SiteToolType.end``)."""
        assert isinstance(item, WebSearchCall)
        is_search = item.action["type"] == "search"
        function = _SEARCH if is_search else _OPEN_PAGE
        action = _action(function, _argument(arguments, _ARGUMENTS[function]))
        if result.is_error:
            return changed(item, status="failed", action=action)
        return changed(
            item, status="completed", action={**action, **result.fields.get("action", {})}
        )


TYPE = WebSearchType()


def _function(description: str, parameters: dict[str, Any]) -> Any:
    return lambda name: request.Tool(name, description, parameters)


def _location(given: UserLocation | None) -> dict[str, str]:
    if given is None:
        return {}
    names = ("city", "region", "country", "timezone")
    return {name: value for name in names if (value := getattr(given, name))}


def _action(function: str, argument: str) -> dict[str, Any]:
    """Return the action of a call whose argument is known as far as this."""
    if function == _OPEN_PAGE:
        return {"type": "open_page", "url": argument or None}
    return {"type": "search", "query": argument, "queries": [argument] if argument else []}


def _argument(arguments: str, name: str) -> str:
    """Return an argument of a call; empty if it is no text."""
    try:
        given = from_json(arguments or "{}")
    except ValueError:
        return ""
    value = given.get(name) if isinstance(given, dict) else None
    return value if isinstance(value, str) else ""


def _user_urls(items: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the newest URLs in the texts of the user, each once."""
    urls: dict[str, None] = {}
    for item in items:
        if item.get("type") == "message" and item.get("role") == "user":
            for part in item["content"]:
                for url in urls_in(part.get("text") or ""):
                    urls.pop(url, None)
                    urls[url] = None
    yield from list(urls)[-_MAX_KNOWN_URLS:]
