"""Search engines behind the tool ``web_search``: each turns a query into results.

``PROVIDERS`` has them by the value of ``WEB_SEARCH_PROVIDER``. Their addresses are the operator's,
so they may be private; pages that they return are not trusted (see ``pages``).
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

import orjson
from django.conf import settings

from inference_site.core.checked_connections import SecondsLeft
from worker.fetching import FetchError, FetchPolicy, fetched

_MAX_BYTES = 2 * 2**20
_MAX_QUERY = 400
"""Characters; Brave takes no more."""
_MAX_SITES = 8
"""Domains that the query names; of more, only the results are filtered."""


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """``count`` results are wanted, of ``domains`` and the names below them if there are any.

    ``location`` has ``country``, ``region``, ``city`` and ``timezone``, each if it is known.
    """

    text: str
    count: int
    domains: Sequence[str] = ()
    location: Mapping[str, str] = field(default_factory=dict)

    @property
    def with_sites(self) -> str:
        """The text with the operator ``site:`` for each domain, as most search engines know it."""
        sites = [f"site:{domain}" for domain in self.domains[:_MAX_SITES]]
        return " ".join(filter(None, (self.text[:_MAX_QUERY], " OR ".join(sites))))


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A result; ``snippet`` is what the search engine quotes of the page."""

    url: str
    title: str
    snippet: str


Provider = Callable[[SearchQuery, SecondsLeft], list[SearchResult]]
"""Returns the results in order, maybe more than wanted. Raises FetchError."""


def search_searxng(query: SearchQuery, seconds_left: SecondsLeft) -> list[SearchResult]:
    """Search with a SearXNG server, whose settings allow the format ``json``.

    Source: docs.searxng.org, "Search API".
    """
    address = f"{settings.WEB_SEARCH_URL.rstrip('/')}/search"
    answer = _json(address, {"q": query.with_sites, "format": "json"}, {}, seconds_left)
    return _results(answer.get("results"), "content")


_BRAVE = "https://api.search.brave.com/res/v1/web/search"
_BRAVE_MAX_COUNT = 20
_BRAVE_LOCATION = {
    "country": b"X-Loc-Country",
    "region": b"X-Loc-State-Name",
    "city": b"X-Loc-City",
    "timezone": b"X-Loc-Timezone",
}


def search_brave(query: SearchQuery, seconds_left: SecondsLeft) -> list[SearchResult]:
    """Search with Brave's API. Source: its reference, "Web search"."""
    headers = {b"X-Subscription-Token": settings.WEB_SEARCH_API_KEY.encode()}
    headers |= {
        _BRAVE_LOCATION[name]: value.encode() for name, value in query.location.items() if value
    }
    count = min(query.count, _BRAVE_MAX_COUNT)
    fields = {"q": query.with_sites, "count": count, "text_decorations": "false"}
    answer = _json(settings.WEB_SEARCH_URL or _BRAVE, fields, headers, seconds_left)
    web = answer.get("web")
    return _results(web.get("results") if isinstance(web, dict) else None, "description")


PROVIDERS: dict[str, Provider] = {"searxng": search_searxng, "brave": search_brave}


def _json(
    address: str,
    fields: Mapping[str, object],
    headers: Mapping[bytes, bytes],
    seconds_left: SecondsLeft,
) -> dict[str, Any]:
    """Return the JSON object that the search engine answers. Raise FetchError."""
    policy = FetchPolicy(
        "search", b"application/json", allow_private=True, headers=headers, max_redirects=0
    )
    content = bytearray()
    with fetched(f"{address}?{urlencode(fields)}", policy, seconds_left) as response:
        for chunk in response.chunks:
            content += chunk
            if len(content) > _MAX_BYTES:
                raise FetchError("The search engine's answer is too large.")
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError as exc:
        raise FetchError("The search engine's answer is not JSON.") from exc
    if not isinstance(answer, dict):
        raise FetchError("The search engine's answer is no JSON object.")
    return answer


def _results(found: object, snippet: str) -> list[SearchResult]:
    """Return the results that are complete; ``snippet`` is the name of the quoting field."""
    entries = (
        [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
    )
    return [
        SearchResult(entry["url"], _text(entry.get("title")), _text(entry.get(snippet)))
        for entry in entries
        if isinstance(entry.get("url"), str)
    ]


def _text(value: object) -> str:
    return html.unescape(value) if isinstance(value, str) else ""
