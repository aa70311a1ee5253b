"""Citations of web sources in a model's text.

A text cites a source by a Markdown link, by a bare URL, or by the number in brackets that the tool
``web_search`` gave it. Code is not searched: brackets are indexes there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inference_site.core.domain.addresses import page_key
from inference_site.core.domain.site_tools import Source

_URL = r"https?://[^\s<>\"'`\\^{|}()\[\]]+(?:\([^\s<>\"'`\\^{|}()]*\)[^\s<>\"'`\\^{|}()\[\]]*)*"
_FOUND = re.compile(
    r"(?P<code>```.*?(?:```|\Z)|`[^`\n]*`)"
    rf"|\[[^\[\]\n]{{1,300}}\]\((?P<link>{_URL})(?: \"[^\"\n]{{0,300}}\")?\)"
    r"|\[(?P<numbers>\d{1,4}(?:, ?\d{1,4}){0,20})\](?!\()"
    rf"|(?P<url>{_URL})",
    re.DOTALL | re.IGNORECASE,
)
_AFTER_URL = ".,;:!?*_~"
"""Characters that end a sentence or Markdown, and seldom a URL."""


@dataclass(frozen=True, slots=True)
class Citation:
    """``text[start:end]`` is a link, URL or number that names the source."""

    start: int
    end: int
    source: Source


def urls_in(text: str) -> Iterator[str]:
    """Yield the URLs of a text, those of Markdown links too, without punctuation after them."""
    for found in _FOUND.finditer(text):
        if url := found["link"] or found["url"]:
            yield url.rstrip(_AFTER_URL)


def find_citations(text: str, sources: Sequence[Source]) -> list[Citation]:
    """Return the places of a text that cite one of the sources, in order.

    Source number n is ``sources[n - 1]``. Positions are characters; the end is exclusive.
    """
    if not sources:
        return []
    by_page = {page_key(source.url): source for source in reversed(sources)}
    citations = list[Citation]()
    for found in _FOUND.finditer(text):
        end, cited = found.end(), list[Source]()
        if numbers := found["numbers"]:
            positions = (int(number) - 1 for number in numbers.split(","))
            cited = [sources[at] for at in positions if 0 <= at < len(sources)]
        elif url := found["link"]:
            cited = [by_page[key]] if (key := page_key(url)) in by_page else []
        elif url := found["url"]:
            trimmed = url.rstrip(_AFTER_URL)
            cited = [by_page[key]] if (key := page_key(trimmed)) in by_page else []
            end -= len(url) - len(trimmed)
        citations += [Citation(found.start(), end, source) for source in cited]
    return citations
