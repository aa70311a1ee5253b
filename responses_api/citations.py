"""Citations of web sources in a model's text, as ``url_citation`` annotations.

A text cites a source by a Markdown link, by a bare URL, or by the number in brackets that the tool
``web_search`` gave it. Code is not searched: brackets are indexes there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from inference_site.core.domain.addresses import page_key
from inference_site.core.domain.site_tools import Source
from responses_api.wire.objects import Message, OutputItem, OutputText, UrlCitation, changed

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


def urls_in(text: str) -> Iterator[str]:
    """Yield the URLs of a text, those of Markdown links too, without punctuation after them."""
    for found in _FOUND.finditer(text):
        if url := found["link"] or found["url"]:
            yield url.rstrip(_AFTER_URL)


def find_citations(text: str, sources: Sequence[Source]) -> list[UrlCitation]:
    """Return the places of a text that cite one of the sources, in order.

    Source number n is ``sources[n - 1]``. Positions are characters; ``end_index`` is exclusive, so
    that ``text[start_index:end_index]`` is the link, URL or number.
    """
    if not sources:
        return []
    by_page = {page_key(source.url): source for source in reversed(sources)}
    citations = list[UrlCitation]()
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
        citations += [
            UrlCitation(
                start_index=found.start(), end_index=end, url=source.url, title=source.title
            )
            for source in cited
        ]
    return citations


def with_citations(item: OutputItem, sources: Sequence[Source]) -> OutputItem:
    """Return the item, which has all of its text; a message with its annotations."""
    match item:
        case Message(content=[OutputText(text=text) as part]):
            if citations := find_citations(text, sources):
                return changed(item, content=[changed(part, annotations=citations)])
    return item
