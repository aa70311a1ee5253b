"""A site whose model is played and whose web is small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import openai
import pytest

from tests.image_server import ImageServer
from tests.served_stack import ServedStack, served_stack
from tests.upstream_server import UpstreamServer
from tests.web_search.web import Web

MODELS = """
  searcher:
    engine: openai_upstream
    base_url: {url}
    context_length: 65536
    slots: 4
"""


@dataclass(frozen=True)
class SearchingSite:
    """A running site, its web and the server of its model."""

    stack: ServedStack
    web: Web
    model: UpstreamServer
    client: openai.OpenAI

    def tool_outputs(self) -> list[str]:
        """The results that the model was given for its last turn."""
        messages = self.model.asked[-1].body["messages"]
        return [message["content"] for message in messages if message["role"] == "tool"]


@pytest.fixture(scope="package")
def site() -> Iterator[SearchingSite]:
    """A site that searches with a server like SearXNG."""
    model = UpstreamServer()
    with ImageServer().running() as server, model.running():
        env = {
            "WEB_SEARCH_PROVIDER": "searxng",
            "WEB_SEARCH_URL": server.url(""),
            "WEB_SEARCH_ALLOW_PRIVATE": "true",
            "TOOL_TIMEOUT_S": "12",
            "START_MODELS": "searcher",
        }
        with served_stack(MODELS.format(url=model.url), **env) as stack:
            yield SearchingSite(stack, Web(server), model, stack.client())


@pytest.fixture
def web(site: SearchingSite) -> Web:
    """The web of the site, empty."""
    for noted in (site.web.server.answers, site.web.server.asked, site.web.results):
        noted.clear()
    site.model.asked.clear()
    site.web.server.poured = 0
    return site.web
