"""Anthropic's Messages with tools that the site runs, through Anthropic's own client.

The MCP server is a real one, and the search engine a server like SearXNG.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types.beta import BetaMessage

from tests.conftest import CALLS_MAX, ToolsStack
from tests.e2e.keys import make_key
from tests.mcp_server import RunningServer, running_mcp_server
from tests.served_stack import ServedStack, wait_until
from tests.tool_loop.servers import play
from tests.upstream_server import UpstreamServer
from tests.web_search.played import calls, says
from tests.web_search.web import FJORDS, Web

SECRET = "very-secret-token"
SAY = {"say": "All done."}
ADD = {"calls": [["test__add", {"a": 40, "b": 2}]]}
SEARCH: dict[str, Any] = {"type": "web_search_20250305", "name": "web_search"}
LOOK: dict[str, Any] = {"name": "look", "input_schema": {"type": "object"}}
TOOLSET: dict[str, Any] = {"type": "mcp_toolset", "mcp_server_name": "test"}


def search(*queries: str) -> dict[str, Any]:
    """A turn of the model that searches."""
    return {"calls": [["web_search", {"query": query}] for query in queries]}


@dataclass(frozen=True)
class Site:
    """A site, its model, which plays the turns that it is told, an MCP server and a web."""

    stack: ServedStack
    model: UpstreamServer
    server: RunningServer
    web: Web
    client: anthropic.Anthropic

    def body(self, *turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """The body of a request whose model plays these turns."""
        said = [{"role": "user", "content": json.dumps(turns)}]
        return {"model": "player", "max_tokens": 1000, "messages": said, **fields}

    def ask(self, *turns: dict[str, Any], **fields: Any) -> BetaMessage:
        """The message of a model that plays these turns."""
        betas = ["mcp-client-2025-11-20"]
        message: BetaMessage = self.client.beta.messages.create(
            **{"betas": betas, **self.body(*turns, **fields)}
        )
        return message

    def mcp(self, path: str = "mcp", **fields: Any) -> list[dict[str, Any]]:
        """``mcp_servers`` with the one server."""
        url = f"{self.server.url}/{path}"
        return [{"type": "url", "name": "test", "url": url, **fields}]

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The messages that the model was given last."""
        messages: list[dict[str, Any]] = self.model.body["messages"]
        return messages


@pytest.fixture(scope="module")
def site(tools_stack: ToolsStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    stack, model = tools_stack.stack, tools_stack.player
    model.answers = [play]
    with (
        running_mcp_server(tmp_path_factory.mktemp("mcp")) as server,
        anthropic.Anthropic(base_url=stack.url, api_key=stack.key, max_retries=0) as client,
    ):
        yield Site(stack, model, server, Web(tools_stack.web), client)


@pytest.fixture
def web(site: Site) -> Web:
    """The web of the site, empty."""
    for noted in (site.web.server.answers, site.web.server.asked, site.web.results):
        noted.clear()
    site.model.answers = [play]
    return site.web


def kinds(message: Any) -> list[str]:
    return [block.type for block in message.content]


def plain(message: Any) -> list[dict[str, Any]]:
    """The blocks of a message, as a client sends them back."""
    return [block.to_dict() for block in message.content]


# --- Web search ----------------------------------------------------------------------------------


def test_a_search_is_made_shown_and_cited(site: Site, web: Web) -> None:
    url = web.page("/fjords", "Fjords")
    place = {"type": "approximate", "city": "Oslo", "country": "NO"}
    turns = ({"say": "Let me see.", **search("fjord")}, {"say": "204 km [1]."})
    message = site.client.messages.create(
        **site.body(*turns, tools=[{**SEARCH, "user_location": place}])
    )
    assert kinds(message) == ["text", "server_tool_use", "web_search_tool_result", "text"]
    said, use, found, answer = message.content
    assert (said.text, use.name, use.input) == ("Let me see. ", "web_search", {"query": "fjord"})
    assert use.id.startswith("srvtoolu_")
    assert found.tool_use_id == use.id
    [page] = found.content
    assert (page.type, page.url, page.title) == ("web_search_result", url, "Fjords")
    assert "Norway" not in page.encrypted_content
    assert answer.text == "204 km [1]. "
    [citation] = answer.citations
    assert citation.type == "web_search_result_location"
    assert (citation.url, citation.title) == (url, "Fjords")
    assert f"Fjords {FJORDS}".startswith(citation.cited_text)
    assert len(citation.cited_text) == 150
    assert citation.encrypted_index
    assert message.stop_reason == "end_turn"
    assert message.usage.server_tool_use.web_search_requests == 1
    assert message.usage.output_tokens == 10
    [tool] = site.model.body["tools"]
    assert tool["function"]["name"] == "web_search"
    assert "The user is in Oslo, NO." in tool["function"]["description"]
    assert [query["q"] for query in web.queries] == ["fjord"]


def test_calls_have_their_price(site: Site, web: Web) -> None:
    """That of a registered server is not that of a request's own with the same name."""
    web.page("/fjords", "Fjords")
    servers = site.mcp()
    message = site.ask(search("a", "b"), ADD, SAY, tools=[SEARCH, TOOLSET], mcp_servers=servers)
    assert message.content[-1].type == "text"
    costs = "SELECT name, cost FROM tool_calls_toolcall WHERE generation_id = %s ORDER BY number"
    assert [(name, float(cost)) for name, cost in site.stack.sql(costs, message.id)] == [
        ("tools/list", 0),
        ("web_search", 0.25),
        ("web_search", 0.25),
        ("add", 0),
    ]
    assert float(site.stack.row(message.id)["cost"]) == 0.5


def test_a_stream_has_the_events_of_anthropics(site: Site, web: Web) -> None:
    web.page("/fjords", "Fjords")
    body = site.body(search("fjord"), {"say": "204 km [1]."}, tools=[SEARCH])
    with site.client.messages.stream(**body) as stream:
        events: list[dict[str, Any]] = [event.to_dict() for event in stream]
        message: Any = stream.get_final_message()
    raw = [e for e in events if e["type"] not in ("text", "input_json", "citation")]
    told = [(e["type"], e.get("index"), e.get("delta", {}).get("type")) for e in raw]
    assert told == [
        ("message_start", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "input_json_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        *[("content_block_delta", 2, "text_delta")] * 3,
        ("content_block_delta", 2, "citations_delta"),
        ("content_block_stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert kinds(message) == ["server_tool_use", "web_search_tool_result", "text"]
    assert message.content[0].input == {"query": "fjord"}
    assert message.content[1].content[0].title == "Fjords"
    assert message.content[2].citations[0].title == "Fjords"
    assert message.usage.server_tool_use.web_search_requests == 1


def test_each_line_has_the_citations_of_its_own(site: Site, web: Web) -> None:
    first, second = web.page("/a", "A"), web.page("/b", "B")
    for stream in (True, False):
        said = says("One\n", "\n[1].", "\nTwo [2].\nTh", "ree.")
        site.model.answers = [calls(("web_search", {"query": "x"})), said]
        body = site.body(tools=[SEARCH])
        if stream:
            with site.client.messages.stream(**body) as opened:
                message: Any = opened.get_final_message()
        else:
            message = site.client.messages.create(**body)
        texts = [block for block in message.content if block.type == "text"]
        assert "".join(block.text for block in texts) == "One\n\n[1].\nTwo [2].\nThree."
        cited = [[c.url for c in block.citations or ()] for block in texts]
        assert cited == [[first], [second], []]


def test_earlier_results_are_shown_again_and_can_be_cited(site: Site, web: Web) -> None:
    first = web.page("/fjords", "Fjords")
    message = site.client.messages.create(
        **site.body(search("fjord"), {"say": "See [1]."}, tools=[SEARCH])
    )
    before = site.shown[-1]["content"]
    web.results.clear()
    second = web.page("/lakes", "Lakes")
    turns = [search("lake"), {"say": "[1] and [2]."}]
    body = site.body(tools=[SEARCH])
    body["messages"] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": plain(message)},
        {"role": "user", "content": json.dumps(turns)},
    ]
    again: Any = site.client.messages.create(**body)
    replayed, now = (m["content"] for m in site.shown if m["role"] == "tool")
    assert replayed == before
    assert f"[2] Lakes\n{second}" in now
    assert [c.url for c in again.content[-1].citations] == [first, second]
    count: Any = site.client.messages.count_tokens
    counts = [
        count(model="demo", messages=messages, tools=tools).input_tokens
        for messages, tools in (
            (body["messages"], [SEARCH]),
            (body["messages"], []),
            (body["messages"][-1:], []),
        )
    ]
    assert sorted(counts, reverse=True) == counts
    assert counts[1] > counts[2] + 50


def test_results_of_another_project_or_that_were_changed_are_refused(site: Site, web: Web) -> None:
    web.page("/fjords", "Fjords")
    message = site.client.messages.create(**site.body(search("x"), SAY, tools=[SEARCH]))
    body = site.body(SAY)
    body["messages"][:0] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": plain(message)},
    ]
    site.client.messages.create(**body)
    key = make_key(site.stack).secret
    with (
        anthropic.Anthropic(base_url=site.stack.url, api_key=key) as other,
        pytest.raises(anthropic.BadRequestError, match=r"content\.1\.content\.0\.encrypted_conte"),
    ):
        other.messages.create(**body)
    body["messages"][1]["content"][1]["tool_use_id"] = "srvtoolu_other"
    with pytest.raises(anthropic.BadRequestError, match="there is no call 'srvtoolu_other'"):
        site.client.messages.create(**body)


def test_domains_are_allowed_or_blocked(site: Site, web: Web) -> None:
    web.found("http://bad.example/a", "Bad")
    web.found("http://sub.bad.example/a", "Worse")
    web.found("http://good.example/a", "Good")
    for tool, wanted in (
        ({"allowed_domains": ["good.example"]}, ["Good"]),
        ({"blocked_domains": ["bad.example"]}, ["Good"]),
        ({"blocked_domains": ["sub.bad.example"]}, ["Bad", "Good"]),
    ):
        message: Any = site.client.messages.create(
            **site.body(search("x"), SAY, tools=[{**SEARCH, **tool}])
        )
        assert [page.title for page in message.content[1].content] == wanted
        assert [m["content"].count("Worse") for m in site.shown if m["role"] == "tool"] == [0]


def test_no_more_searches_are_made_than_the_request_allows(site: Site, web: Web) -> None:
    web.page("/fjords", "Fjords")
    tool = {**SEARCH, "type": "web_search_20260318", "max_uses": 1}
    message: Any = site.client.messages.create(
        **site.body(search("a", "b"), search("c"), SAY, tools=[tool])
    )
    assert kinds(message) == [
        *["server_tool_use"] * 2,
        *["web_search_tool_result"] * 2,
        *("server_tool_use", "web_search_tool_result", "text"),
    ]
    codes = [getattr(message.content[n].content, "error_code", None) for n in (2, 3, 5)]
    assert codes == [None, "max_uses_exceeded", "max_uses_exceeded"]
    assert [query["q"] for query in web.queries] == ["a"]
    assert message.usage.server_tool_use.web_search_requests == 1
    again = site.body(SAY, tools=[SEARCH])
    again["messages"][:0] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": plain(message)},
    ]
    site.client.messages.create(**again)
    assert [m["content"] for m in site.shown if m["role"] == "tool"][1:] == [
        "Error: max_uses_exceeded"
    ] * 2


@pytest.mark.parametrize(
    ("made", "code"),
    [
        ([["web_search", '{"query": 7}']], "invalid_tool_input"),
        ([["web_search", "[]"]], "invalid_tool_input"),
        ([["web_search", '{"query": "x"}']], "unavailable"),
    ],
)
def test_a_search_that_fails_has_a_code(site: Site, web: Web, made: Any, code: str) -> None:
    message: Any = site.client.messages.create(**site.body({"calls": made}, SAY, tools=[SEARCH]))
    assert message.content[1].content.error_code == code
    assert message.content[2].text == "All done. "
    assert message.usage.server_tool_use.web_search_requests == 0


# --- MCP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["mcp", "sse"])
def test_a_tool_of_a_server_is_called(site: Site, path: str) -> None:
    before = len(site.server.calls)
    message = site.ask(
        ADD, SAY, mcp_servers=site.mcp(path, authorization_token=SECRET), tools=[TOOLSET]
    )
    assert kinds(message) == ["mcp_tool_use", "mcp_tool_result", "text"]
    use, result, _ = message.content
    assert use.type == "mcp_tool_use"
    assert result.type == "mcp_tool_result"
    assert (use.server_name, use.name, use.input) == ("test", "add", {"a": 40, "b": 2})
    assert use.id.startswith("mcptoolu_")
    assert (result.tool_use_id, result.is_error) == (use.id, False)
    assert [block.text for block in result.content if not isinstance(block, str)] == ["42"]
    assert message.stop_reason == "end_turn"
    assert message.usage.server_tool_use is None
    (made,) = site.server.calls[before:]
    assert (made["arguments"], made["secret"]) == ({"a": 40, "b": 2}, f"Bearer {SECRET}")
    assert made["key"].startswith("msg_")
    assert site.shown[-1]["content"] == "42"
    rows = site.stack.sql(
        "SELECT name, status FROM tool_calls_toolcall WHERE generation_id = %s ORDER BY number",
        message.id,
    )
    assert rows == [("tools/list", "done"), ("add", "done")]


def test_the_events_of_a_call(site: Site) -> None:
    body = site.body(ADD, SAY, mcp_servers=site.mcp())
    with site.client.beta.messages.stream(**body) as stream:
        events: list[dict[str, Any]] = [event.to_dict() for event in stream]
        message: Any = stream.get_final_message()
    starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [(b["type"], b.get("input"), b.get("name")) for b in starts[:1]] == [
        ("mcp_tool_use", {}, "add")
    ]
    assert starts[1]["content"] == [{"type": "text", "text": "42"}]
    assert kinds(message) == ["mcp_tool_use", "mcp_tool_result", "text"]
    assert message.content[0].input == {"a": 40, "b": 2}


@pytest.mark.parametrize(
    ("server", "toolset", "offered"),
    [
        ({}, {}, ["add", "die", "fail", "huge", "sleep", "wordy"]),
        ({}, {"default_config": {"enabled": False}, "configs": {"add": {"enabled": True}}},
         ["add"]),
        ({}, {"configs": {"die": {"enabled": False}, "add": {"defer_loading": True}}},
         ["add", "fail", "huge", "sleep", "wordy"]),
        ({"tool_configuration": {"allowed_tools": ["fail"]}}, None, ["fail"]),
        ({"tool_configuration": {"enabled": False}}, None, []),
        ({}, {"default_config": {"enabled": False}}, []),
    ],
)  # fmt: skip
def test_only_enabled_tools_are_offered_and_called(
    site: Site, server: Any, toolset: Any, offered: list[str]
) -> None:
    before = len(site.server.calls)
    tools = [] if toolset is None else [{**TOOLSET, **toolset}]
    die = {"calls": [["test__die", {}]]}
    turns = (die, SAY) if offered and "die" not in offered else (SAY,)
    message = site.ask(*turns, tools=tools, mcp_servers=site.mcp(**server))
    names = [tool["function"]["name"] for tool in site.model.body.get("tools") or ()]
    assert sorted(names) == [f"test__{name}" for name in offered]
    assert len(site.server.calls) == before
    assert message.stop_reason == ("tool_use" if len(turns) == 2 else "end_turn")


def test_a_tool_that_fails_is_a_result_and_the_answer_goes_on(site: Site) -> None:
    message = site.ask({"calls": [["test__fail", {}]]}, SAY, mcp_servers=site.mcp())
    result = message.content[1]
    assert result.type == "mcp_tool_result"
    assert result.is_error
    assert "the disk is full" in json.dumps(result.to_dict())
    assert kinds(message)[-1] == "text"


def test_the_list_of_tools_is_shown_to_clients_that_know_it_and_not_asked_for_again(
    site: Site,
) -> None:
    betas = ["mcp-client-2026-09-15"]
    message = site.ask(SAY, mcp_servers=site.mcp(), tools=[TOOLSET], betas=betas)
    assert kinds(message) == ["mcp_tool_listing", "text"]
    listing = plain(message)[0]
    assert listing["mcp_server_name"] == "test"
    [add] = [tool for tool in listing["tools"] if tool["name"] == "add"]
    assert add["description"] == "Adds two integers."
    body = site.body(ADD, SAY, mcp_servers=site.mcp(), tools=[TOOLSET], betas=betas)
    body["messages"][:0] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": plain(message)},
    ]
    second = site.client.beta.messages.create(**body)
    assert kinds(second) == ["mcp_tool_use", "mcp_tool_result", "text"]
    pinned = site.ask(
        ADD, SAY, mcp_servers=site.mcp(), tools=[{**TOOLSET, "tools": [add]}], betas=betas
    )
    assert kinds(pinned) == ["mcp_tool_use", "mcp_tool_result", "text"]
    assert len(site.model.body["tools"]) == 1
    rows = site.stack.sql(
        "SELECT count(*) FROM tool_calls_toolcall WHERE name = 'tools/list' "
        "AND generation_id IN (%s, %s)",
        second.id,
        pinned.id,
    )
    assert rows == [(0,)]


@pytest.mark.parametrize("stream", [True, False])
def test_a_server_that_does_not_answer_is_an_error_before_anything_is_sent(
    site: Site, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="MCP server 'test' are not known"):
        site.ask(SAY, mcp_servers=site.mcp("unauthorized"), stream=stream)


def test_a_call_with_its_result_is_shown_to_the_model_again(site: Site) -> None:
    message = site.ask(ADD, SAY, mcp_servers=site.mcp())
    body = site.body(SAY, mcp_servers=site.mcp())
    body["messages"][:0] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": plain(message)},
    ]
    site.client.beta.messages.create(**body)
    _, called, result, said, _ = site.shown
    [call] = called["tool_calls"]
    assert call["function"]["name"] == "test__add"
    assert json.loads(call["function"]["arguments"]) == {"a": 40, "b": 2}
    assert (result["tool_call_id"], result["content"]) == (call["id"], "42")
    assert said["content"] == "All done. "


def test_a_tool_may_be_demanded(site: Site, web: Web) -> None:
    choice = {"type": "any"}
    message = site.ask(ADD, SAY, mcp_servers=site.mcp(), tool_choice=choice)
    assert kinds(message) == ["mcp_tool_use", "mcp_tool_result", "text"]
    asked = [one.body.get("tool_choice") for one in site.model.asked[-2:]]
    assert asked[0] == "required"
    assert asked[1] in (None, "auto")
    site.ask(SAY, mcp_servers=site.mcp(), tool_choice={"type": "none"})
    assert not site.model.body.get("tools")
    named = {"type": "tool", "name": "web_search"}
    site.ask(search("x"), SAY, mcp_servers=site.mcp(), tools=[SEARCH, LOOK], tool_choice=named)
    assert [tool["function"]["name"] for tool in site.model.body["tools"]] == ["web_search"]


# --- The loop ------------------------------------------------------------------------------------


def test_a_tool_of_the_client_ends_the_message_after_the_calls_of_the_site(
    site: Site, web: Web
) -> None:
    web.page("/fjords", "Fjords")
    turn = {"calls": [["look", {"at": 1}], *search("x")["calls"], *ADD["calls"]]}
    fields: dict[str, Any] = {"tools": [SEARCH, LOOK, TOOLSET], "mcp_servers": site.mcp()}
    message = site.ask(turn, SAY, **fields)
    assert message.stop_reason == "tool_use"
    assert kinds(message) == [
        *("tool_use", "server_tool_use", "mcp_tool_use"),
        *("web_search_tool_result", "mcp_tool_result"),
    ]
    body = site.body(turn, SAY, **fields)
    result = {"type": "tool_result", "tool_use_id": message.content[0].id, "content": "seen"}  # type: ignore[union-attr]
    body["messages"] += [
        {"role": "assistant", "content": plain(message)},
        {"role": "user", "content": [result, {"type": "text", "text": json.dumps([SAY])}]},
    ]
    second = site.client.beta.messages.create(**body)
    assert (second.stop_reason, kinds(second)) == ("end_turn", ["text"])
    roles = [m["role"] for m in site.shown]
    assert roles == ["user", "assistant", *["tool"] * 3, "user"]
    assert site.shown[2]["content"] == "seen"
    assert len(site.shown[1]["tool_calls"]) == 3


def test_the_loop_pauses_at_its_bound_and_goes_on_when_it_is_sent_back(site: Site) -> None:
    before = len(site.server.calls)
    turns: list[dict[str, Any]] = [ADD, ADD, {"calls": ADD["calls"] * 3}, ADD, SAY]
    fields: dict[str, Any] = {"mcp_servers": site.mcp()}
    paused = site.ask(*turns, **fields)
    assert paused.stop_reason == "pause_turn"
    assert len(site.server.calls) - before == CALLS_MAX
    results = kinds(paused).count("mcp_tool_result")
    assert (results, kinds(paused).count("mcp_tool_use")) == (CALLS_MAX, CALLS_MAX)
    body = site.body(*turns, **fields)
    body["messages"].append({"role": "assistant", "content": plain(paused)})
    rest = site.client.beta.messages.create(**body)
    assert kinds(rest) == ["mcp_tool_use", "mcp_tool_result", "text"]
    assert (rest.stop_reason, len(site.server.calls) - before) == ("end_turn", CALLS_MAX + 1)


def test_tokens_are_those_of_all_turns(site: Site) -> None:
    message = site.ask(ADD, SAY, mcp_servers=site.mcp(), max_tokens=12)
    assert site.model.body["max_tokens"] == 7
    assert (message.usage.output_tokens, message.stop_reason) == (10, "end_turn")
    short = site.ask(ADD, SAY, mcp_servers=site.mcp(), max_tokens=5)
    assert (short.stop_reason, kinds(short)) == ("max_tokens", ["mcp_tool_use", "mcp_tool_result"])


def test_messages_at_the_same_moment_have_their_own_calls(site: Site) -> None:
    before = len(site.server.calls)

    def sum_of(a: int) -> str:
        turn = {"calls": [["test__add", {"a": a, "b": 1}]]}
        message = site.ask(turn, SAY, mcp_servers=site.mcp(), stop_sequences=[f"never {a}"])
        return str(plain(message)[1]["content"][0]["text"])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(sum_of, range(16))) == [str(a + 1) for a in range(16)]
    made = site.server.calls[before:]
    assert sorted(one["arguments"]["a"] for one in made) == list(range(16))
    assert len({one["key"] for one in made}) == 16


def test_a_server_that_lies_about_its_tools_does_no_harm(site: Site) -> None:
    message = site.ask(SAY, mcp_servers=site.mcp("lying-tools"), betas=["mcp-client-2026-09-15"])
    listing, said = plain(message)
    assert [tool["name"] for tool in listing["tools"]].count("good") == 1
    assert said["text"] == "All done. "
    names = [tool["function"]["name"] for tool in site.model.body["tools"]]
    assert "test__good" in names
    assert "fetched" not in [call["name"] for call in site.server.calls]
    again = site.body(SAY, mcp_servers=site.mcp())
    wide = {"enum": ["x" * 600_000]}
    forged = {**listing, "tools": [{"name": "wide", "input_schema": wide}]}
    again["messages"][:0] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [forged, {"type": "text", "text": "y"}]},
    ]
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
        site.client.beta.messages.create(**again)


def test_a_client_that_leaves_ends_the_call(site: Site) -> None:
    sleep = {"calls": [["test__sleep", {"seconds": 2.5}]]}
    body = site.body(sleep, SAY, mcp_servers=site.mcp(), stream=True)
    with httpx.stream(
        "POST", f"{site.stack.url}/v1/messages", json=body,
        headers={"x-api-key": site.stack.key},
    ) as answer:  # fmt: skip
        lines = answer.iter_lines()
        start = next(line for line in lines if line.startswith('data: {"type":"message_start"'))
        next(line for line in lines if "mcp_tool_use" in line)
    message_id = json.loads(start.removeprefix("data: "))["message"]["id"]
    ended = lambda: site.stack.row(message_id)["status"] == "cancelled"  # noqa: E731
    wait_until(ended, 10, "the run is cancelled")


def test_a_worker_that_dies_in_a_batch_makes_no_call_twice(site: Site, web: Web) -> None:
    """The answer goes on after the last turn whose calls were saved."""
    web.page("/fjords", "Fjords")
    before = len(site.server.calls)
    last = {"say": "See [1].", "kill": site.stack.pid_of("worker")}
    body: Any = site.body(
        {"say": "Now.", **search("a")}, ADD, last, tools=[SEARCH], mcp_servers=site.mcp()
    )
    message = batched(site, body)
    assert kinds(message) == [
        *("text", "server_tool_use", "web_search_tool_result"),
        *("mcp_tool_use", "mcp_tool_result", "text"),
    ]
    assert message.content[4].content[0]["text"] == "42"
    assert [one.title for one in message.content[-1].citations] == ["Fjords"]
    assert message.usage.server_tool_use.web_search_requests == 1
    assert len(site.server.calls) == before + 1
    assert [query["q"] for query in web.queries] == ["a"]
    assert site.stack.pid_of("worker") != last["kill"]


def test_a_chat_that_searches_in_a_batch_survives_its_worker(site: Site, web: Web) -> None:
    web.page("/fjords", "Fjords")
    last = {"say": "See [1].", "kill": site.stack.pid_of("worker")}
    said = json.dumps([{"say": "Now.", **search("b")}, search("c"), last])
    body = {"model": "player", "messages": [{"role": "user", "content": said}]}
    url: Any = "/v1/chat/completions"
    line = {"custom_id": "a", "method": "POST", "url": url}
    line["body"] = {**body, "web_search_options": {}}
    client = site.stack.client()
    file = client.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    retrieve = client.batches.retrieve
    wait_until(lambda: retrieve(batch.id).status == "completed", 90, "the batch ends")
    output = json.loads(client.files.content(retrieve(batch.id).output_file_id or "").text)
    message = output["response"]["body"]["choices"][0]["message"]
    assert (message["content"], len(message["annotations"])) == ("Now. See [1]. ", 1)
    assert [query["q"] for query in web.queries] == ["b", "c"]
    [[cost]] = site.stack.sql("SELECT cost FROM batches_batch WHERE public_id = %s", batch.id)
    assert float(cost) == 0.5  # The worker died after the searches: the next attempt repeats none.


def batched(site: Site, body: Any, meanwhile: Callable[[], None] = lambda: None) -> Any:
    """The message of a batch with this request alone."""
    batches = site.client.messages.batches
    batch = batches.create(requests=[{"custom_id": "one", "params": body}])
    meanwhile()
    wait_until(
        lambda: batches.retrieve(batch.id).processing_status == "ended", 90, "the batch ends"
    )
    [line] = batches.results(batch.id)
    assert line.result.type == "succeeded", line
    return line.result.message


def test_the_token_of_a_request_in_a_batch_is_stored_sealed(site: Site) -> None:
    before = len(site.server.calls)
    stored: list[str] = []

    def look() -> None:
        wait_until(lambda: len(site.server.calls) > before, 90, "the call is made")
        lines = site.stack.sql("SELECT request FROM batches_batchline WHERE state = 'running'")
        stored.extend(request for (request,) in lines)

    sleep = {"calls": [["test__sleep", {"seconds": 1}]]}
    servers = site.mcp(authorization_token=SECRET)
    batched(site, site.body(sleep, SAY, mcp_servers=servers), look)
    assert stored
    assert not [request for request in stored if SECRET in request]
    assert site.server.calls[before]["secret"] == f"Bearer {SECRET}"


def test_a_call_during_which_the_worker_dies_is_not_repeated(site: Site) -> None:
    """The line of a batch goes on. A client that waits has an error, and its turn is counted."""
    before = len(site.server.calls)
    sleep = {"calls": [["test__sleep", {"seconds": 2}]]}

    def kill() -> None:
        wait_until(lambda: len(site.server.calls) > before + 1, 90, "both calls are made")
        os.kill(site.stack.pid_of("worker"), signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(site.ask, sleep, SAY, mcp_servers=site.mcp())
        message = batched(site, site.body(sleep, SAY, mcp_servers=site.mcp()), kill)
        with pytest.raises(anthropic.InternalServerError) as raised:
            asked.result(60)
    _, result, said = plain(message)
    assert result["is_error"]
    assert "Outcome unknown" in json.dumps(result["content"])
    assert said["text"] == "All done. "
    assert len(site.server.calls) == before + 2
    counted = """SELECT error_code, input_tokens, output_tokens FROM generations_generation
        WHERE request_id = %s"""
    [row] = site.stack.sql(counted, raised.value.response.headers["x-request-id"])
    assert row == ("worker_lost", 7, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{**SEARCH, "max_uses": 0}]}, r"tools\.0\.max_uses"),
        ({"tools": [{**SEARCH, "allowed_domains": ["a.b"], "blocked_domains": ["c.d"]}]},
         r"tools\.0\.blocked_domains"),
        ({"tools": [{**SEARCH, "allowed_domains": ["https://a.b/c"]}]}, "allowed_domains"),
        ({"tools": [SEARCH, {**LOOK, "name": "web_search"}]}, "another tool is named"),
        ({"tools": [SEARCH, SEARCH]}, "another tool is named"),
        ({"tools": [{**TOOLSET, "mcp_server_name": "none"}]}, "has no server 'none'"),
        ({"tools": [TOOLSET, TOOLSET]}, "another toolset"),
        ({"mcp_servers": [{"url": "http://elsewhere.example/mcp"}]}, "'elsewhere.example'"),
        ({"mcp_servers": [{"url": "file:///etc/passwd"}]}, r"mcp_servers\.0\.url"),
        ({"mcp_servers": [{"authorization_token": "a\r\nb: c"}]},
         r"mcp_servers\.0\.authorization_token"),
        ({"mcp_servers": [{"url": None}]}, "no MCP server 'test'"),
        ({"mcp_servers": [{}, {}]}, r"mcp_servers\.1\.name"),
        ({"tools": [TOOLSET], "mcp_servers": [{"tool_configuration": {}}]}, "tool_configuration"),
    ],
)  # fmt: skip
def test_what_may_not_be_used_is_refused_before_the_queue(
    site: Site, fields: dict[str, Any], message: str
) -> None:
    servers = fields.pop("mcp_servers", [{}] if TOOLSET in fields.get("tools", ()) else [])
    given = [{**site.mcp()[0], **server} for server in servers]
    asked = len(site.model.asked)
    with pytest.raises(anthropic.BadRequestError, match=message) as raised:
        site.ask(SAY, mcp_servers=given, **fields)
    assert raised.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert len(site.model.asked) == asked


def test_a_projects_own_list_of_hosts_holds(site: Site) -> None:
    key = make_key(site.stack, project_mcp_hosts=["other.example"])
    with (
        anthropic.Anthropic(base_url=site.stack.url, api_key=key.secret) as other,
        pytest.raises(anthropic.BadRequestError, match="project may use no MCP server"),
    ):
        other.beta.messages.create(**site.body(SAY, mcp_servers=site.mcp()))
