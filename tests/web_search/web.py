"""A small web: a search engine with the API of SearXNG or Brave, and the pages that it finds."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.image_server import ImageServer

FJORDS = (
    "Norway has more than a thousand fjords. The longest of them is the Sognefjord, which reaches "
    "two hundred and four kilometres into the land and is more than thirteen hundred metres deep."
)
FRAME = (
    "<html><head><title>{title}</title><style>p {{}}</style></head><body><nav><a href=/>Home</a>"
    "<a href=/login>Log in</a></nav><main><h1>{title}</h1><p>{text}</p><p>{text}</p></main>"
    "<script>alert('no')</script><footer>All rights reserved</footer></body></html>"
)


@dataclass
class Web:
    """``results`` are what the search engine answers; ``queries`` its requests, in order."""

    server: ImageServer
    results: list[dict[str, Any]] = field(default_factory=list)

    def page(self, path: str, title: str, text: str = FJORDS) -> str:
        """Serve a page that the search engine finds; return its URL."""
        content = FRAME.format(title=title, text=text).encode()
        url = self.server.give(path, content, kind="text/html; charset=utf-8")
        self.found(url, title)
        return url

    def found(self, url: str, title: str, quote: str = "A quote.") -> None:
        """Add a result, and answer searches with all results."""
        entry = {"url": url, "title": title, "content": quote, "description": quote}
        self.results.append(entry)
        answer = {"results": self.results, "web": {"results": self.results}}
        self.server.give("/search", json.dumps(answer).encode(), kind="application/json")

    @property
    def queries(self) -> list[dict[str, str]]:
        """The parameters of the searches, in order."""
        asked = (urlsplit(path) for path in self.server.asked if path.startswith("/search"))
        return [{name: values[0] for name, values in parse_qs(url.query).items()} for url in asked]
