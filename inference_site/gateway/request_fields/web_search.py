"""Web search in requests: the functions offered to the model, and the options for the worker.

The worker runs the functions with ``worker.tools.web_search``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from django.conf import settings
from pydantic import Field

from inference_site.core.domain.request import Tool
from inference_site.core.domain.site_tools import urls_in
from inference_site.gateway.api.payload import WireRequest

WEB_SEARCH, OPEN_PAGE = "web_search", "open_page"
ARGUMENTS = {WEB_SEARCH: "query", OPEN_PAGE: "url"}
"""The functions, each with the name of its argument."""
_DESCRIPTIONS = {
    WEB_SEARCH: (
        "Searches the web, and returns sources with a number, a URL and their text. Search for "
        "what is recent, and for facts of which you are not sure. After each sentence of the "
        "answer that rests on a source, name the source by its number in brackets, such as [1]."
    ),
    OPEN_PAGE: (
        "Opens a page of the web and returns its text. Only pages whose URL was in the results of "
        "a search, or in a message of the user, can be opened."
    ),
}
_MAX_KNOWN_URLS = 200
_Place = Annotated[str, Field(max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")]

ContextSize = Literal["low", "medium", "high"]


class Location(WireRequest):
    """Where the user is, roughly. ``country`` is an ISO code of two letters."""

    country: Annotated[str, Field(pattern=r"^[A-Za-z]{2}$")] | None = None
    region: _Place | None = None
    city: _Place | None = None
    timezone: _Place | None = None

    def places(self) -> dict[str, str]:
        """Return the places that are known, the nearest first."""
        names = ("city", "region", "country", "timezone")
        return {name: value for name in names if (value := getattr(self, name))}


def can_search() -> bool:
    """Whether this site has a search engine."""
    return bool(settings.WEB_SEARCH_PROVIDER != "off")


def search_functions(
    location: Location | None, names: Iterable[str] = tuple(ARGUMENTS)
) -> list[Tool]:
    """Return the functions that the model is offered, those of these names."""
    functions = []
    for name in names:
        argument = ARGUMENTS[name]
        description = _DESCRIPTIONS[name]
        if name == WEB_SEARCH and location and (places := location.places()):
            description += f" The user is in {', '.join(places.values())}."
        parameters = {
            "type": "object",
            "properties": {argument: {"type": "string"}},
            "required": [argument],
            "additionalProperties": False,
        }
        functions.append(Tool(name, description, parameters))
    return functions


def search_options(
    user_texts: Iterable[str],
    context_size: ContextSize | None,
    location: Location | None,
    allowed_domains: Sequence[str] = (),
    *,
    shows_sources: bool = False,
) -> dict[str, Any]:
    """Return the options for the worker.

    The URLs in ``user_texts``, the newest last, may be opened without a search. Two more options
    may be added: ``blocked_domains``, and ``shows_results``, which gives the results of a search
    the field ``results``.
    """
    urls: dict[str, None] = {}
    for text in user_texts:
        for url in urls_in(text):
            urls.pop(url, None)
            urls[url] = None
    return {
        "type": WEB_SEARCH,
        "context_size": context_size or "medium",
        "allowed_domains": list(allowed_domains),
        "location": location.places() if location else {},
        "known_urls": list(urls)[-_MAX_KNOWN_URLS:],
        "shows_sources": shows_sources,
    }
