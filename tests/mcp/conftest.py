"""A site whose model plays turns, an MCP server, a mail server, and the browser of an operator."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from openai.types import responses as types

from tests.mcp_server import RunningServer, running_mcp_server
from tests.notice_receivers import Mailbox, mail_server
from tests.ports import free_port
from tests.served_stack import ServedStack, served_stack, wait_until
from tests.tool_loop.servers import MODELS, play
from tests.upstream_server import UpstreamServer

SITE_URL = "https://ai.example.org"
SAY = {"say": "All done."}
ADD = {"calls": [["test__add", {"a": 40, "b": 2}]]}


@dataclass(frozen=True)
class McpSite:
    """A site, its model, which plays the turns that it is told, and an MCP server."""

    stack: ServedStack
    model: UpstreamServer
    server: RunningServer
    mailbox: Mailbox

    def tool(self, path: str = "mcp", **fields: Any) -> dict[str, Any]:
        """The tool of a request; without ``fields``, no call needs an approval."""
        url = f"{self.server.url}/{path}"
        given = {"type": "mcp", "server_label": "test", "server_url": url}
        return {**given, "require_approval": "never", **fields}

    def respond(
        self, *turns: dict[str, Any], tool: Any = None, key: str | None = None, **fields: Any
    ) -> types.Response:
        """The response whose model plays these turns."""
        response: types.Response = self.stack.client(key).responses.create(
            **self.body(*turns, tool=tool, **fields)
        )
        return response

    def body(self, *turns: dict[str, Any], tool: Any = None, **fields: Any) -> dict[str, Any]:
        """The body of a request whose model plays these turns."""
        tools = [tool or self.tool()]
        return {"model": "player", "input": json.dumps(turns), "tools": tools, **fields}


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[McpSite]:
    model = UpstreamServer()
    model.answers = [play]
    mail_port = free_port()
    settings = {
        "MCP_ALLOWED_HOSTS": "127.0.0.1",
        "MCP_ALLOWED_NETWORKS": "127.0.0.0/8",
        "TOOL_TIMEOUT_S": "3",
        "TOOL_OUTPUT_BYTES": "20000",
        "TOOL_PRICES": '{"mcp:asked": 0.5, "mcp:test": 8}',
        "EMAIL_HOST": "127.0.0.1",
        "EMAIL_PORT": str(mail_port),
        "SITE_URL": SITE_URL,
        "WEBHOOKS_ALLOW_PRIVATE": "true",
        "START_MODELS": "player",
    }
    with (
        model.running(),
        mail_server(mail_port) as mailbox,
        running_mcp_server(tmp_path_factory.mktemp("mcp")) as server,
        served_stack(MODELS.format(url=model.url), **settings) as stack,
    ):
        yield McpSite(stack, model, server, mailbox)


@pytest.fixture(scope="package")
def operator(site: McpSite) -> Iterator[httpx.Client]:
    """The browser of the administrator of the site."""
    with browser_of(site) as browser:
        logged_in(browser, site, "/admin/")
        yield browser


def browser_of(site: McpSite) -> httpx.Client:
    """A browser without a session."""
    return httpx.Client(base_url=site.stack.url, timeout=60, follow_redirects=True)


def logged_in(browser: httpx.Client, site: McpSite, page: str) -> httpx.Response:
    """Log in as the administrator; return the page that this leads to."""
    found = re.search(r"password: (\S+)", site.stack.text())
    assert found
    form = {"username": "admin", "password": found[1], "next": page}
    return posted(browser, "/admin/login/", "/admin/login/", form)


def posted(browser: httpx.Client, page: str, address: str, form: dict[str, str]) -> httpx.Response:
    """Send a form of a page; return the page that it leads to."""
    token = re.search(r'csrfmiddlewaretoken" value="([^"]+)', browser.get(page).text)
    assert token
    return browser.post(address, data={**form, "csrfmiddlewaretoken": token[1]})


@pytest.fixture(scope="package")
def registered(site: McpSite) -> dict[str, Any]:
    """The tool of a server that is registered, whose calls need approvals."""
    site.stack.sql(
        "INSERT INTO mcp_servers_mcpserver (label, url, transport, description, is_active, "
        "is_idempotent, credentials, oauth_issuer, oauth_client_id, oauth_secret, oauth_scope, "
        "tools, error, created_at) VALUES ('asked', %s, 'auto', '', true, false, '', '', '', '', "
        "'', '[]', '', now())",
        f"{site.server.url}/mcp",
    )
    return {"type": "mcp", "server_label": "asked", "require_approval": "always"}


def question_of(site: McpSite, response: types.Response) -> tuple[str, int]:
    """The address of the page of a response, and the number of its one question."""
    ((pk, item),) = site.stack.sql(
        "SELECT response.id, item.id FROM responses_api_storedresponse response "
        "JOIN responses_api_item item ON item.response_id = response.id "
        "JOIN responses_api_mcpapproval ON item_id = item.id WHERE response.public_id = %s",
        response.id,
    )
    return str(pk), item


def continued(site: McpSite, response: types.Response) -> list[types.Response]:
    """The responses that continue a response, once they have ended."""
    found = site.stack.sql(
        "SELECT child.public_id FROM responses_api_storedresponse child "
        "JOIN responses_api_storedresponse parent ON child.previous_id = parent.id "
        "WHERE parent.public_id = %s",
        response.id,
    )
    retrieve = site.stack.client().responses.retrieve
    for (id_,) in found:
        wait_until(lambda id_=id_: retrieve(id_).status == "completed", 60, "the end")
    return [retrieve(id_) for (id_,) in found]


def kinds(response: types.Response) -> list[str]:
    return [item.type for item in response.output]
