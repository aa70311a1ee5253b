"""The tool ``web_search``: the functions ``web_search`` and ``open_page``.

Results are numbered through the whole response, so that ``[n]`` in the answer names a source. Text
from the web is given to the model as data. It can ask for another call, which the model may then
make: so only tools of the request exist, and ``open_page`` opens only pages that a search of the
response has returned, or that the user has named.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx
from django.conf import settings

from inference_site.core.domain.addresses import is_listed, page_key
from inference_site.core.domain.site_tools import SEARCH_REFUSED, WebResult, web_results_text
from worker.fetching import FetchError
from worker.tools.base import (
    CallContext,
    Source,
    ToolCancelled,
    ToolResult,
    ToolTimeout,
    cut,
)
from worker.tools.pages import read_page
from worker.tools.search_providers import PROVIDERS, SearchQuery, SearchResult

logger = logging.getLogger(__name__)

_PAGES_SHARE, _PAGES_S = 0.6, 10.0
"""For reading the pages of a search's results: a share of the time left, and the most seconds."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Characters that no text has, and that PostgreSQL or UTF-8 refuse; carriage returns too."""
_TITLE_CHARS = 300
_MAX_ARGUMENT = 4_000
_BLANK = re.compile(r"\s*\n\s*\n\s*")


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
        field = "url" if name == "open_page" else "query"
        given = arguments.get(field)
        text = _line(given, _MAX_ARGUMENT) if isinstance(given, str) else ""
        if not text:
            fields = {"error_code": "invalid_tool_input"}
            return ToolResult(f"The argument '{field}' must be a text.", fields, is_error=True)
        deadline = _Deadline(context, context.timeout_s)
        try:
            if name == "open_page":
                return self._open_page(text, context, deadline)
            return self._search(text, context, deadline)
        except FetchError as exc:
            return ToolResult(str(exc), is_error=True)
        except ToolTimeout:
            return ToolResult("There was no answer in time.", is_error=True)

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
    short = _BLANK.sub("\n", _clean(text[: 4 * chars]))
    return short if len(short) <= chars else f"{short[:chars].rstrip()} …"
