"""The tool in a request: its fields, its functions, its options and its items."""

from __future__ import annotations

from typing import Any

import pytest
from pytest_django.fixtures import Settings

from inference_site.core.domain.site_tools import ToolResult
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.payload import parse
from responses_api.client_tools import OfferedTools, offer_tools
from responses_api.context import ContextItem
from responses_api.mapping import to_tool_plan
from responses_api.site_tools import Route
from responses_api.web_search import TYPE
from responses_api.wire.requests import ResponseRequest
from responses_api.wire.tools import tool_object

SOURCES = "web_search_call.action.sources"


@pytest.fixture(autouse=True)
def _configured(settings: Settings) -> None:
    settings.WEB_SEARCH_PROVIDER = "searxng"


def body(**fields: Any) -> ResponseRequest:
    return parse(ResponseRequest, {"model": "m", "input": "x", **fields})


def offered(tool: dict[str, Any], *items: dict[str, Any], include: Any = ()) -> OfferedTools:
    placed = [ContextItem(item, f"input[{i}]") for i, item in enumerate(items)]
    return offer_tools(body(tools=[tool]).tools or (), placed, project_id=1, include=include)


def said(role: str, *texts: str) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "role": role, "content": [*parts, {"type": "input_image"}]}


@pytest.mark.parametrize(
    "name",
    ["web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"],
)
def test_every_name_of_the_tool_offers_both_functions(name: str) -> None:
    tools = offered({"type": name})
    assert [tool.name for tool in tools.tools] == ["web_search", "open_page"]
    assert tools.unsupported == []
    assert tools.site_tools == [
        {
            "type": "web_search",
            "context_size": "medium",
            "allowed_domains": [],
            "location": {},
            "known_urls": [],
            "shows_sources": False,
        }
    ]
    for choice in ({"type": name}, {"type": "web_search"}, "required"):
        plan = to_tool_plan(body(tools=[{"type": name}], tool_choice=choice), tools)
        assert (len(plan.tools), plan.must_call) == (2, True)


@pytest.mark.parametrize(
    ("provider", "fields"), [("off", {}), ("searxng", {"external_web_access": False})]
)
def test_tool_that_cannot_run_is_not_offered(
    settings: Settings, provider: str, fields: dict[str, Any]
) -> None:
    settings.WEB_SEARCH_PROVIDER = provider
    tools = offered({"type": "web_search", **fields})
    assert (tools.tools, tools.site_tools, tools.unsupported) == ((), [], ["web_search"])
    with pytest.raises(InvalidRequestError):
        to_tool_plan(body(tool_choice={"type": "web_search"}), tools)


def test_options_are_those_of_the_request() -> None:
    tool = {
        "type": "web_search",
        "search_context_size": "high",
        "filters": {"allowed_domains": ["example.org", "b.example."]},
        "user_location": {"type": "approximate", "country": "NO", "city": "Oslo", "region": None},
    }
    tools = offered(tool, include=[SOURCES])
    [options] = tools.site_tools
    assert options == {
        "type": "web_search",
        "context_size": "high",
        "allowed_domains": ["example.org", "b.example."],
        "location": {"city": "Oslo", "country": "NO"},
        "known_urls": [],
        "shows_sources": True,
    }
    assert "The user is in Oslo, NO." in (tools.functions["web_search"].description or "")
    assert [tool_object(echoed) for echoed in body(tools=[tool]).tools or ()] == [tool]


def test_known_urls_are_those_of_the_user_alone() -> None:
    [options] = offered(
        {"type": "web_search"},
        said("user", "Read https://a.example/x.", "And https://b.example, please"),
        said("assistant", "I read https://c.example"),
        said("developer", "https://d.example"),
        {"type": "function_call_output", "output": "https://e.example"},
        said("user", "Again: https://a.example/x"),
    ).site_tools
    assert options["known_urls"] == ["https://b.example", "https://a.example/x"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"search_context_size": "huge"}, "tools[0].search_context_size"),
        ({"filters": {"allowed_domains": ["https://a.example"]}},
         "tools[0].filters.allowed_domains[0]"),
        ({"filters": {"allowed_domains": ["a.example OR b.example"]}},
         "tools[0].filters.allowed_domains[0]"),
        ({"filters": {"allowed_domains": ["a"] * 101}}, "tools[0].filters.allowed_domains"),
        ({"user_location": {"country": "Norway"}}, "tools[0].user_location.country"),
        ({"user_location": {"city": "Oslo\r\nX-Other: 1"}}, "tools[0].user_location.city"),
        ({"external_web_access": "yes"}, "tools[0].external_web_access"),
    ],
)  # fmt: skip
def test_invalid_fields_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        body(tools=[{"type": "web_search", **fields}])
    assert caught.value.param == param


def test_filters_that_do_not_exist_are_named() -> None:
    given = body(tools=[{"type": "web_search", "filters": {"blocked_domains": ["a.example"]}}])
    assert given.ignored_params == ["tools[].filters.blocked_domains"]


@pytest.mark.parametrize(
    ("function", "arguments", "result", "status", "action"),
    [
        ("web_search", '{"query": "fjord"}', ToolResult("…"), "completed",
         {"type": "search", "query": "fjord", "queries": ["fjord"]}),
        ("web_search", '{"query": "fjord"}', ToolResult("no", is_error=True), "failed",
         {"type": "search", "query": "fjord", "queries": ["fjord"]}),
        ("web_search", "{}}", ToolResult("no", is_error=True), "failed",
         {"type": "search", "query": "", "queries": []}),
        ("open_page", '{"url": "https://a.example"}',
         ToolResult("…", {"action": {"type": "open_page", "url": "https://a.example/"}}),
         "completed", {"type": "open_page", "url": "https://a.example/"}),
        ("open_page", '{"url": 7}', ToolResult("no", is_error=True), "failed",
         {"type": "open_page", "url": None}),
    ],
)  # fmt: skip
def test_item_says_what_was_done(
    function: str, arguments: str, result: ToolResult, status: str, action: dict[str, Any]
) -> None:
    begun = TYPE.begin(Route("web_search", function), {})
    ended = TYPE.end(begun, arguments, result)
    assert ended.model_dump() == {
        "id": begun.id,
        "type": "web_search_call",
        "status": status,
        "action": action,
    }
    assert begun.id.startswith("ws_")
