"""A site whose model is played and whose web is small."""

from __future__ import annotations

from dataclasses import dataclass

import openai
import pytest

from tests.conftest import ToolsStack
from tests.served_stack import ServedStack
from tests.upstream_server import UpstreamServer
from tests.web_search.web import Web


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
def site(tools_stack: ToolsStack) -> SearchingSite:
    """A site that searches with a server like SearXNG."""
    stack, model = tools_stack.stack, tools_stack.searcher
    return SearchingSite(stack, Web(tools_stack.web), model, stack.client())


@pytest.fixture
def web(site: SearchingSite) -> Web:
    """The web of the site, empty."""
    for noted in (site.web.server.answers, site.web.server.asked, site.web.results):
        noted.clear()
    site.model.asked.clear()
    site.web.server.poured = 0
    return site.web
