"""The tool ``web_search``: the functions ``web_search`` and ``open_page``.

First the tool, then the search engines (``PROVIDERS``), then the pages of the web (``read_page``).
"""

from __future__ import annotations

import base64
import codecs
import html
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from email.message import Message
from typing import Any
from urllib.parse import urlencode

import httpx
import orjson
from django.conf import settings

from inference_site.core.checked_connections import SecondsLeft
from inference_site.core.domain.addresses import is_listed, page_key
from inference_site.core.domain.errors import GenerationFailed
from inference_site.core.domain.site_tools import (
    SEARCH_REFUSED,
    Source,
    ToolResult,
    WebResult,
    web_results_text,
)
from inference_site.core.limited_process import LimitedProcess
from worker.fetching import Fetched, FetchError, FetchPolicy, fetched
from worker.tools.base import CallContext, ToolCancelled, ToolTimeout, cut

logger = logging.getLogger(__name__)

_PAGES_SHARE, _PAGES_S = 0.6, 10.0
"""For reading the pages of a search's results: a share of the time left, and the most seconds."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Characters that no text has, and that PostgreSQL or UTF-8 refuse; carriage returns too."""
_TITLE_CHARS = 300
_MAX_ARGUMENT = 4_000
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class ContextSize:
    """How much of the web a model is shown.

    ``results`` of a search, with ``result_chars`` characters each; the first ``read`` of them are
    read, the others have only the search engine's quote. ``page_chars`` is for ``open_page``.
    """

    results: int
    read: int
    result_chars: int
    page_chars: int


SIZES = {
    "low": ContextSize(results=3, read=0, result_chars=500, page_chars=4_000),
    "medium": ContextSize(results=5, read=3, result_chars=1_500, page_chars=10_000),
    "high": ContextSize(results=10, read=5, result_chars=3_000, page_chars=30_000),
}
"""By ``search_context_size``."""


def create(options: Mapping[str, Any]) -> WebSearch:
    """Return the tool with the options of ``responses_api.web_search``."""
    return WebSearch(
        size=SIZES[options["context_size"]],
        domains=options["allowed_domains"],
        location=options["location"],
        known_urls=options["known_urls"],
        shows_sources=options["shows_sources"],
        blocked=options.get("blocked_domains", ()),
        shows_results=options.get("shows_results", False),
    )


@dataclass(frozen=True, slots=True)
class WebSearch:
    """See ``SiteTool``.

    Results are numbered through the whole response, so that ``[n]`` in the answer names a source.
    Text from the web is given to the model as data. It can ask for another call, which the model
    may then make: so only tools of the request exist, and ``open_page`` opens only pages that a
    search of the response has returned, or that the user has named.

    ``known_urls`` are those that the user has named. ``shows_sources``: the items of searches name
    all results. ``shows_results``: the field ``results`` has them as the model is shown them. Of
    ``blocked`` domains, and the names below them, nothing is shown.
    """

    size: ContextSize
    domains: Sequence[str]
    location: Mapping[str, str]
    known_urls: Sequence[str]
    shows_sources: bool
    blocked: Sequence[str] = ()
    shows_results: bool = False

    def is_idempotent(self, name: str) -> bool:
        """Searching or reading again changes nothing."""
        return True

    def call(self, name: str, arguments: Mapping[str, Any], context: CallContext) -> ToolResult:
        """Search or open a page (see ``SiteTool.call``)."""
        if name == SEARCH_REFUSED:
            fields = {"error_code": "max_uses_exceeded"}
            return ToolResult("The request allows no more searches.", fields, is_error=True)
        key = "url" if name == "open_page" else "query"
        given = arguments.get(key)
        text = _line(given, _MAX_ARGUMENT) if isinstance(given, str) else ""
        if not text:
            fields = {"error_code": "invalid_tool_input"}
            return ToolResult(f"The argument '{key}' must be a text.", fields, is_error=True)
        deadline = _Deadline(context, context.timeout_s)
        try:
            if name == "open_page":
                return self._open_page(text, context, deadline)
            return self._search(text, context, deadline)
        except FetchError as exc:
            return ToolResult(str(exc), is_error=True)
        except ToolTimeout:
            # For a page, the message of FetchTimedOut, which one read that is too slow raises.
            late = "The page could not be fetched" if key == "url" else "There was no answer"
            return ToolResult(f"{late} in time.", is_error=True)

    def _search(self, query: str, context: CallContext, deadline: _Deadline) -> ToolResult:
        wanted = SearchQuery(query, self.size.results, self.domains, self.location)
        try:
            found = PROVIDERS[settings.WEB_SEARCH_PROVIDER](wanted, deadline.seconds_left)
        except FetchError as exc:
            # The log has the reason: the search engine is the operator's.
            logger.warning("web search: %s", exc)
            raise FetchError("The search engine does not answer as it should.") from exc
        chosen = self._chosen(found)
        texts = self._texts(chosen, deadline.for_pages())
        numbers = _Numbers(context.sources)
        results = [
            WebResult(numbers.of(one.url), one.url, one.title, text)
            for one, text in zip(chosen, texts, strict=True)
        ]
        action: dict[str, Any] = {"type": "search", "query": query, "queries": [query]}
        if self.shows_sources:
            action["sources"] = [{"type": "url", "url": one.url} for one in results]
        fields: dict[str, Any] = {"action": action}
        if self.shows_results:
            most = context.max_bytes // (2 * len(results) or 1)
            results = [replace(one, text=cut(one.text, most)) for one in results]
            fields["results"] = [asdict(one) for one in results]
        sources = [Source(one.url, one.title) for one in results]
        return ToolResult(cut(web_results_text(results), context.max_bytes), fields, sources)

    def _open_page(self, url: str, context: CallContext, deadline: _Deadline) -> ToolResult:
        named = [*self.known_urls, *(source.url for source in context.sources)]
        known = {page_key(url): url for url in named}.get(page_key(url))
        if known is None:
            raise FetchError(
                "The page was not opened: its URL is neither in the results of a search nor in "
                "the user's messages."
            )
        page = read_page(known, self._hosts, deadline.seconds_left)
        title = _line(page.title) or known
        number = _Numbers(context.sources).of(known)
        shown = _start(page.text, self.size.page_chars) or "(The page has no text.)"
        text = web_results_text([WebResult(number, known, title, shown)])
        fields = {"action": {"type": "open_page", "url": known}}
        return ToolResult(cut(text, context.max_bytes), fields, [Source(known, title)])

    @property
    def _hosts(self) -> list[str]:
        """The domains in the form of ``is_listed``: each with the names below it."""
        return _with_subdomains(self.domains)

    def _is_blocked(self, host: str) -> bool:
        return is_listed(host, _with_subdomains(self.blocked))

    def _chosen(self, found: Sequence[SearchResult]) -> list[SearchResult]:
        """Return the first results that may be shown, each URL once."""
        chosen: dict[str, SearchResult] = {}
        for result in found:
            try:
                url = httpx.URL(result.url)
            except httpx.InvalidURL:
                continue
            is_allowed = not self.domains or is_listed(url.host, self._hosts)
            is_allowed = is_allowed and not self._is_blocked(url.host)
            if url.scheme in ("http", "https") and url.host and not url.userinfo and is_allowed:
                title = _line(result.title) or url.host
                shown = SearchResult(str(url), title, result.snippet)
                chosen.setdefault(page_key(shown.url), shown)
        return list(chosen.values())[: self.size.results]

    def _texts(self, results: Sequence[SearchResult], deadline: _Deadline) -> list[str]:
        """Return the text of each result: of the page if it can be read in time, else the quote."""

        def text_of(result: SearchResult) -> str:
            try:
                page = read_page(result.url, self._hosts, deadline.seconds_left)
                text = "" if self._is_blocked(httpx.URL(page.url).host) else page.text
            except (FetchError, ToolTimeout):
                text = ""
            return _start(text or result.snippet, self.size.result_chars)

        read, quoted = results[: self.size.read], results[self.size.read :]
        texts: list[str] = []
        if read:
            with ThreadPoolExecutor(len(read), thread_name_prefix="pages") as threads:
                texts = list(threads.map(text_of, read))
        return [*texts, *(_start(result.snippet, self.size.result_chars) for result in quoted)]


class _Deadline:
    """The end of a call, or of a part of it."""

    def __init__(self, context: CallContext, seconds: float) -> None:
        self._context, self._until = context, time.monotonic() + seconds

    def seconds_left(self) -> float:
        """Return the time that is left. Raise ToolCancelled, or ToolTimeout if it is over."""
        if self._context.is_cancelled():
            raise ToolCancelled
        seconds = self._until - time.monotonic()
        if seconds <= 0:
            raise ToolTimeout
        return seconds

    def for_pages(self) -> _Deadline:
        """Return the deadline for reading the pages of a search's results."""
        return _Deadline(self._context, min(self.seconds_left() * _PAGES_SHARE, _PAGES_S))


class _Numbers:
    """The numbers of sources: their position among those of the response, from 1."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._numbers = {source.url: number for number, source in enumerate(sources, 1)}

    def of(self, url: str) -> int:
        """Return the number of a source; a new one gets the next."""
        return self._numbers.setdefault(url, len(self._numbers) + 1)


def _with_subdomains(domains: Sequence[str]) -> list[str]:
    return [f".{domain}" for domain in domains]


def _clean(text: str) -> str:
    return _CONTROL.sub(" ", text).strip()


def _line(text: str, chars: int = _TITLE_CHARS) -> str:
    """Return the beginning of a text in one line."""
    return " ".join(_clean(text[: 2 * chars]).split())[:chars]


def _start(text: str, chars: int) -> str:
    """Return the beginning of a text without blank lines; ``…`` marks that more was there."""
    begun = _clean(text[: 4 * chars])
    short = _SPACES.sub(lambda one: "\n" if one[0].count("\n") > 1 else one[0], begun)
    return short if len(short) <= chars else f"{short[:chars].rstrip()} …"


_ANSWER_BYTES = 2 * 2**20
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


def _refuse_search(query: SearchQuery, seconds_left: SecondsLeft) -> list[SearchResult]:
    """Raise FetchError: web processes offer the tool, and the settings of this worker differ."""
    raise FetchError("WEB_SEARCH_PROVIDER is not set in the environment of this worker")


PROVIDERS: dict[str, Provider] = {
    "searxng": search_searxng,
    "brave": search_brave,
    "off": _refuse_search,
}
"""By the value of ``WEB_SEARCH_PROVIDER``. Their addresses are the operator's, so they may be
private; the pages that they return are not trusted."""


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
            if len(content) > _ANSWER_BYTES:
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


MAX_BYTES = 2 * 2**20
"""The bytes of a page that are read; the rest of a longer page is not fetched."""
_READ_PATIENCE_S = 10
_HTML = ("text/html", "application/xhtml+xml")
_TEXT = ("application/json", "application/xml")

_PYTHONS_OWN = ("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape")
"""Encodings of Python that no page has. Punycode takes the square of the length."""

_reader = LimitedProcess("worker.tools.page_text")


@dataclass(frozen=True, slots=True)
class Page:
    """A page with its title, which may be empty, and its main text. ``url`` is the final one."""

    url: str
    title: str
    text: str


def read_page(url: str, allowed_hosts: Sequence[str], seconds_left: SecondsLeft) -> Page:
    """Fetch a page and return its text.

    Raise FetchError if it cannot or must not be fetched or read, and what ``seconds_left`` raises.
    """
    policy = FetchPolicy(
        "page",
        b"text/html,text/plain;q=0.9,application/json;q=0.8",
        allow_private=settings.WEB_SEARCH_ALLOW_PRIVATE,
        allowed_hosts=allowed_hosts,
    )
    with fetched(url, policy, seconds_left) as answer:
        media_type, charset = _media_type(answer)
        content = bytearray()
        for chunk in answer.chunks:
            content += chunk
            if len(content) >= MAX_BYTES:
                break
        final_url = str(answer.url)
    del content[MAX_BYTES:]
    if media_type not in _HTML:
        return Page(final_url, "", _decoded(content, charset))
    try:
        encoded = base64.b64encode(content).decode()
        patience_s = min(_READ_PATIENCE_S, seconds_left())
        read = _reader.ask(encoded, charset, patience_s=patience_s)
    except GenerationFailed as exc:
        raise FetchError("The page could not be read in time.") from exc
    if read is None:
        raise FetchError("The page could not be read: it needs too much time or memory.")
    title, text = read
    return Page(final_url, title, text)


def _decoded(content: bytearray, charset: str) -> str:
    """Return the text of a page; its host names the encoding, or a wrong one, or none."""
    try:
        name = codecs.lookup(charset or "utf-8").name
        return content.decode("utf-8" if name in _PYTHONS_OWN else name, "replace")
    except LookupError:
        return content.decode("utf-8", "replace")


def _media_type(answer: Fetched) -> tuple[str, str]:
    """Return the type of a page and its character encoding, which may be empty.

    Raise FetchError for content that has no text.
    """
    header = Message()
    header["Content-Type"] = answer.headers.get(b"content-type", b"").decode("latin-1")
    if answer.headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise FetchError("The page could not be read: its host compresses it without being asked.")
    media_type = header.get_content_type()
    if not (media_type in _HTML or media_type in _TEXT or media_type.startswith("text/")):
        raise FetchError(f"The page could not be read: it is no text but {media_type[:100]}.")
    charset = header.get_param("charset", "")
    return media_type, charset if isinstance(charset, str) else ""
