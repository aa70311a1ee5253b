"""The MCP client against real server processes, well behaved and not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path

import mcp_types
import psutil
import pytest

from inference_site.core.domain.addresses import AllowedAddresses
from inference_site.mcp import client
from inference_site.mcp.access import Endpoint, OAuthClient, TransportName
from inference_site.mcp.client import Limits
from tests.mcp_server import LONG, TOKEN, RunningServer, running_mcp_server

LOCAL = AllowedAddresses(networks=(ip_network("127.0.0.0/8"),))
LIMITS = Limits(timeout_s=20, max_bytes=1_000_000)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_mcp_server(tmp_path_factory.mktemp("mcp")) as running:
        yield running


def at(server: RunningServer, path: str, transport: TransportName = "auto") -> Endpoint:
    headers = {"Authorization": "Bearer secret-token"}
    return Endpoint(f"{server.url}/{path}", headers, transport, LOCAL)


@pytest.mark.parametrize("path", ["mcp", "sse"])
def test_both_transports_list_and_call(server: RunningServer, path: str) -> None:
    endpoint = at(server, path)
    tools = {tool["name"]: tool for tool in client.list_tools(endpoint, LIMITS)}
    assert tools["add"]["description"] == "Adds two integers."
    assert set(tools["add"]["input_schema"]["properties"]) == {"a", "b"}
    before = len(server.calls)
    assert client.call_tool(endpoint, "add", {"a": 2, "b": 40}, "key-1", LIMITS).text == "42"
    expected = {"name": "add", "arguments": {"a": 2, "b": 40}, "key": "key-1"}
    assert server.calls[before:] == [{**expected, "secret": "Bearer secret-token"}]


def test_tool_without_a_description_is_listed_without_one() -> None:
    listed = client._listed_tool(mcp_types.Tool(name="bare", input_schema={"type": "object"}))
    assert listed is not None
    assert listed.keys() == {"name", "input_schema", "annotations"}


def test_description_is_bounded(server: RunningServer) -> None:
    tools = {tool["name"]: tool for tool in client.list_tools(at(server, "mcp"), LIMITS)}
    assert len(tools["wordy"]["description"]) == client.MAX_DESCRIPTION < len(LONG)


def test_error_of_a_tool_is_a_result(server: RunningServer) -> None:
    result = client.call_tool(at(server, "mcp"), "fail", {}, "key", LIMITS)
    assert result.is_error
    assert "the disk is full" in result.text


def test_unknown_tool_is_an_error(server: RunningServer) -> None:
    result = client.call_tool(at(server, "mcp"), "nothing", {}, "key", LIMITS)
    assert result.is_error
    assert "Unknown tool" in result.text


@pytest.mark.parametrize("path", ["mcp", "sse"])
def test_slow_tool_ends_at_the_time_limit(server: RunningServer, path: str) -> None:
    limits = Limits(timeout_s=2, max_bytes=1_000_000)
    before = time.monotonic()
    with pytest.raises(client.McpTimeout):
        client.call_tool(at(server, path), "sleep", {"seconds": 60}, "key", limits)
    assert time.monotonic() - before < 30


def test_cancelled_call_ends(server: RunningServer) -> None:
    cancelled = threading.Event()
    threading.Timer(0.5, cancelled.set).start()
    limits = Limits(60, 1_000_000, cancelled.is_set)
    with pytest.raises(client.McpCancelled):
        client.call_tool(at(server, "mcp"), "sleep", {"seconds": 60}, "key", limits)


@pytest.mark.parametrize("path", ["mcp", "sse"])
def test_huge_result_is_an_error(server: RunningServer, path: str) -> None:
    limits = Limits(timeout_s=20, max_bytes=100_000)
    with pytest.raises(client.McpFailed, match="more than 100000 bytes"):
        client.call_tool(at(server, path), "huge", {"size": 500_000}, "key", limits)


@pytest.mark.parametrize("path", ["endless", "endless-events"])
def test_endless_answer_does_not_grow_the_process(server: RunningServer, path: str) -> None:
    before = psutil.Process().memory_info().rss
    with pytest.raises(client.McpFailed, match="more than 1000000 bytes"):
        client.list_tools(at(server, path), LIMITS)
    assert psutil.Process().memory_info().rss - before < 50_000_000


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("compressed", "connection to the server failed"),
        ("elsewhere", "HTTP status 307"),
        ("unauthorized", "HTTP status 401"),
        ("garbage", "JSON"),
        ("page", "content type"),
    ],
)
def test_server_that_lies_is_an_error(server: RunningServer, path: str, message: str) -> None:
    with pytest.raises(client.McpUnreachable, match=message):
        client.list_tools(at(server, path), Limits(5, 1_000_000))


@pytest.mark.parametrize("path", ["silent", "liar"])
def test_server_that_never_answers_ends_at_the_time_limit(server: RunningServer, path: str) -> None:
    with pytest.raises(client.McpTimeout):
        client.list_tools(at(server, path), Limits(1, 1_000_000))


def test_private_address_is_refused(server: RunningServer) -> None:
    for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]"):
        endpoint = Endpoint(server.url.replace("127.0.0.1", host) + "/mcp")
        with pytest.raises(client.McpUnreachable, match="no address that may be connected to"):
            client.list_tools(endpoint, LIMITS)


def test_server_that_dies_in_a_call(tmp_path: Path) -> None:
    with running_mcp_server(tmp_path) as server:
        with pytest.raises(client.McpFailed):
            client.call_tool(at(server, "mcp"), "die", {}, "key", Limits(10, 1_000_000))
        assert [call["name"] for call in server.calls] == ["die"], "it was called once"
        with pytest.raises(client.McpUnreachable):
            client.call_tool(at(server, "mcp"), "add", {"a": 1, "b": 1}, "key", LIMITS)


def test_token_of_an_oauth_client_is_fetched_and_sent(server: RunningServer) -> None:
    good = OAuthClient(server.url, "site", "client-secret")
    endpoint = Endpoint(f"{server.url}/guarded", allowed=LOCAL, oauth=good)
    assert "add" in [tool["name"] for tool in client.list_tools(endpoint, LIMITS)]
    before = len(server.calls)
    assert client.call_tool(endpoint, "add", {"a": 1, "b": 2}, "key", LIMITS).text == "3"
    assert server.calls[before]["secret"] == f"Bearer {TOKEN}"
    for oauth in (
        OAuthClient(server.url, "site", "wrong-secret"),
        OAuthClient("http://127.0.0.1:1", "site", "client-secret"),
    ):
        refused = Endpoint(f"{server.url}/guarded", allowed=LOCAL, oauth=oauth)
        with pytest.raises(client.McpUnreachable) as raised:
            client.list_tools(refused, LIMITS)
        assert "secret" not in str(raised.value)


def test_tools_that_nobody_can_use_are_left_out(server: RunningServer) -> None:
    before = len(server.calls)
    limits = Limits(timeout_s=20, max_bytes=5_000_000)
    tools = client.list_tools(at(server, "lying-tools"), limits)
    found = [(tool["name"], tool["input_schema"]) for tool in tools]
    assert found == [("good", {"type": "object"})]
    assert server.calls[before:] == [], "nothing that a schema names is fetched"


def test_schemas_that_take_years_hold_no_other_thread(server: RunningServer) -> None:
    before = time.monotonic()
    with pytest.raises(client.McpFailed, match="too much time or memory"):
        client.list_tools(at(server, "branching-tools"), LIMITS)
    assert time.monotonic() - before < 30
