"""The tools of a request, and the response object that echoes the request."""

from __future__ import annotations

from typing import Any

import pytest

from inference_site.core.domain.request import Tool, custom_tool
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.payload import parse
from inference_site.gateway.request_fields.mapping import ToolPlan
from responses_api.client_tools import OfferedTools, offer_tools
from responses_api.context import ContextItem
from responses_api.mapping import to_tool_plan
from responses_api.wire.requests import ResponseRequest
from responses_api.wire.tools import tool_object
from tests.responses_api import schemas
from tests.responses_api.deltas import new_response
from tests.responses_api.validation import check

FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "run", "description": "d"}
SEARCH: dict[str, Any] = {"type": "web_search", "filters": {"a": None}}
F, RUN = Tool("f", None, {"type": "object"}), custom_tool("run", "d")


def body(**fields: Any) -> ResponseRequest:
    return parse(ResponseRequest, {"model": "m", "input": "x", **fields})


def offered(*tools: Any, items: Any = ()) -> OfferedTools:
    placed = [ContextItem(item, f"input[{i}]") for i, item in enumerate(items)]
    return offer_tools(body(tools=list(tools)).tools or (), placed, project_id=1)


def planned(**fields: Any) -> ToolPlan:
    given = body(**fields)
    return to_tool_plan(given, offer_tools(given.tools or (), project_id=1))


@pytest.mark.parametrize(
    ("choice", "tools", "must_call"),
    [
        (None, (F, RUN), False),
        ("auto", (F, RUN), False),
        ("none", (), False),
        ("required", (F, RUN), True),
        ({"type": "function", "name": "f"}, (F,), True),
        ({"type": "custom", "name": "run"}, (RUN,), True),
        ({"type": "allowed_tools", "mode": "auto",
          "tools": [{"type": "custom", "name": "run"}, {"type": "web_search"}]}, (RUN,), False),
        ({"type": "allowed_tools", "tools": [{"type": "custom", "name": "run"}]}, (RUN,), False),
        ({"type": "allowed_tools", "mode": "required",
          "tools": [{"type": "function", "name": "f"}]}, (F,), True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}, (), False),
    ],
)  # fmt: skip
def test_choice_decides_what_the_model_sees(
    choice: Any, tools: tuple[Tool, ...], must_call: bool
) -> None:
    plan = planned(tools=[FUNCTION, SEARCH, CUSTOM], tool_choice=choice)
    assert plan.tools == tools
    assert plan.must_call is must_call


def test_a_search_of_the_site_loads_no_tool_beside_the_allowed_ones() -> None:
    hidden = [{**FUNCTION, "name": name, "defer_loading": True} for name in "gh"]
    tools = [FUNCTION, {"type": "tool_search"}, *hidden]
    named = [{"type": "tool_search"}, {"type": "function", "name": "g"}]
    plan = planned(tools=tools, tool_choice={"type": "allowed_tools", "tools": named})
    assert [tool.name for tool in plan.tools] == ["g"]


def test_a_chosen_search_that_has_nothing_to_load_leaves_the_choice_to_the_model() -> None:
    search = {"type": "tool_search"}
    plan = planned(tools=[FUNCTION, search], tool_choice=search)
    assert (plan.tools, plan.must_call) == ((F,), False)
    deferred = {**FUNCTION, "defer_loading": True}
    plan = planned(tools=[deferred, search], tool_choice=search)
    assert ([tool.name for tool in plan.tools], plan.must_call) == (["tool_search"], True)


@pytest.mark.parametrize(
    ("chat", "official"),
    [
        ({"max_tokens": 3}, {"max_output_tokens": 3}),
        ({"max_completion_tokens": 3}, {"max_output_tokens": 3}),
        ({"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}}),
        ({"verbosity": "low"}, {"text": {"verbosity": "low"}}),
        ({"truncate_sequence": True}, {"truncation": "auto"}),
        ({"truncate_sequence": False}, {"truncation": "disabled"}),
        ({"n_choices": 1}, {"n": 1}),
        ({"response_format": {"type": "json_object"}},
         {"text": {"format": {"type": "json_object"}}}),
        ({"response_format": {"type": "json_schema",
                              "json_schema": {"name": "a", "schema": {}, "strict": True}}},
         {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}, "strict": True}}}),
    ],
)  # fmt: skip
def test_names_of_chats_are_the_official_fields(
    chat: dict[str, Any], official: dict[str, Any]
) -> None:
    assert body(**chat) == body(**official) == body(**chat, **official)
    assert body(**chat).model_fields_set == body(**official).model_fields_set


def test_names_of_chats_are_put_beside_what_an_object_has() -> None:
    given = body(text={"verbosity": "low"}, response_format={"type": "text"}, max_tokens=None)
    assert given == body(text={"verbosity": "low", "format": {"type": "text"}}, max_tokens=None)


def test_hosted_tools_are_named_once_each() -> None:
    assert offered(FUNCTION, SEARCH).unsupported == ["web_search"]


def test_tools_are_shown_with_all_their_fields() -> None:
    shown = [tool_object(tool) for tool in body(tools=[FUNCTION, CUSTOM, SEARCH]).tools or ()]
    assert shown == [
        {**FUNCTION, "description": None, "strict": True},
        {**CUSTOM, "format": {"type": "text"}},
        SEARCH,
    ]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "function"}, "tools[0].name"),
        ({"type": "function", "name": "a b"}, "tools[0].name"),
        ({"type": "custom", "name": "x", "format": {"type": "grammar"}}, "tools[0].format.syntax"),
    ],
)
def test_tool_that_is_none_is_refused(tool: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        body(tools=[tool])
    assert (caught.value.param or "").startswith(param)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"background": True},
        {"conversation": "conv_1", "user": "ann"},
        {"text": {"format": {"type": "json_object"}, "verbosity": "low"}},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
        {"reasoning": {"effort": "high", "summary": "detailed"}},
        {"tools": [FUNCTION, CUSTOM, SEARCH], "tool_choice": {"type": "custom", "name": "run"}},
        {"temperature": 0, "top_p": 0, "top_logprobs": 3, "truncation": "auto"},
        {"store": False, "service_tier": "flex", "max_output_tokens": 1, "max_tool_calls": 2},
    ],
)
def test_object_has_every_field_whatever_was_asked(fields: dict[str, Any]) -> None:
    response = new_response(**fields)
    check("response", response)
    assert set(schemas.RESPONSE["required"]) <= set(response)


def test_strictness_of_a_schema_is_shown() -> None:
    given = {"type": "json_schema", "name": "n", "schema": {}, "strict": True}
    assert new_response(text={"format": given})["text"]["format"] == {**given, "description": ""}
    with_none = {**given, "strict": None}
    assert new_response(text={"format": with_none})["text"]["format"]["strict"] is False


def test_fields_of_client_libraries_in_items_are_dropped_without_a_word() -> None:
    item: Any = {"role": "assistant", "id": "msg_1", "status": None, "parsed": None, "content": []}
    assert body(input=[item], frobnicate=1).ignored_params == ["frobnicate"]


def test_item_of_an_unknown_type_is_named_or_refused(settings: Any) -> None:
    given = [{"type": "item_of_tomorrow"}, {"type": "web_search_call"}, {"type": "a\nb"}]
    assert body(input=given).ignored_params == ["input[].item_of_tomorrow", "input[].type"]
    settings.STRICT_FIELDS = True
    with pytest.raises(InvalidRequestError) as caught:
        body(input=given)
    assert caught.value.param == "input[0].item_of_tomorrow"
    assert caught.value.code == "unknown_parameter"


def test_tools_that_only_programs_may_call_are_not_offered() -> None:
    tool = {**FUNCTION, "allowed_callers": ["programmatic"], "output_schema": {"type": "string"}}
    given = body(tools=[tool, {**CUSTOM, "allowed_callers": ["direct", "programmatic"]}])
    assert [t.name for t in offer_tools(given.tools or (), project_id=1).tools] == ["run"]
    shown = tool_object((given.tools or [])[0])
    assert shown == {**tool, "description": None, "strict": True}
    typed: list[dict[str, Any]] = [
        {"type": "shell"},
        {"type": "apply_patch"},
        {"type": "web_search"},
        {"type": "mcp", "server_label": "a", "server_url": "https://a.example/mcp"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
    ]
    hidden = offered(*({**tool, "allowed_callers": ["programmatic"]} for tool in typed))
    assert (hidden.tools, hidden.site_tools, hidden.first_calls) == ((), [], [])
    assert hidden.unsupported == [tool["type"] for tool in typed]
    both = {"allowed_callers": ["programmatic", "direct"]}
    assert [t.name for t in offered({**typed[0], **both}, {**typed[1], **both}).tools] == [
        *("shell", "apply_patch")
    ]


def test_shell_runs_at_the_client_unless_its_environment_is_a_container() -> None:
    skill = {"name": "pdf", "path": "/skills/pdf", "description": "Reads PDFs."}
    local = {"type": "shell", "environment": {"type": "local", "skills": [skill]}}
    [shell] = offered(local).tools
    assert (shell.name, "/skills/pdf/SKILL.md" in (shell.description or "")) == ("shell", True)
    elsewhere = offered({"type": "shell", "environment": {"type": "container_auto"}})
    assert (elsewhere.tools, elsewhere.unsupported) == ((), ["shell"])


def test_deferred_tools_are_hidden_where_something_searches() -> None:
    deferred = {**FUNCTION, "defer_loading": True}
    client = {"type": "tool_search", "execution": "client", "description": "Search."}
    hosted = {"type": "tool_search"}
    assert [t.name for t in offered(deferred).tools] == ["f"]
    [search] = offered(deferred, hosted).tools
    assert (search.description or "").endswith("It can load:\n- f: ")
    assert search.parameters["properties"]["paths"]["items"]["enum"] == ["f"]
    assert offered({**FUNCTION}, hosted).unsupported == []
    [search] = offered(deferred, client).tools
    assert search.description == "Search.\nIt can find:\n- f: "
    assert offered(deferred, client, hosted).unsupported == ["tool_search"]
    found = [{"type": "tool_search_output", "tools": [deferred]}]
    assert [t.name for t in offered(deferred, client, items=found).tools] == ["f", "tool_search"]
    assert [t.name for t in offered(deferred, hosted, items=found).tools] == ["f"]
    shown = [{"type": "tool_search_output", "tools": [{**deferred, "strict": True}]}]
    assert not offered(deferred, hosted, items=shown).tools[0].is_strict  # As the request says.
    many = {
        "type": "namespace",
        "name": "n",
        "tools": [{**deferred, "name": f"f{n}"} for n in range(1025)],
    }
    with pytest.raises(InvalidRequestError, match="more than 1024 functions"):
        offered(many, hosted)
    grown = {**many, "tools": many["tools"][:2]}
    found = [{"type": "tool_search_output", "tools": [{**many, "tools": many["tools"][:1]}]}]
    assert [t.name for t in offered(grown, hosted, items=found).tools] == ["n__f0", "n__f1"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "name": "n__f"}, ["n__f"]),
        ({"type": "function", "name": "f", "namespace": "n"}, ["n__f"]),
        ({"type": "namespace", "name": "n"}, ["n__f", "n__g"]),
        ({"type": "function", "name": "n"}, None),
    ],
)
def test_choice_of_a_deferred_tool_loads_it(choice: Any, names: list[str] | None) -> None:
    inner = [{**FUNCTION, "name": name, "defer_loading": True} for name in ("f", "g")]
    namespace = {"type": "namespace", "name": "n", "tools": inner}
    tools = [{"type": "tool_search"}, namespace]
    if names is not None:
        chosen = planned(tools=tools, tool_choice=choice).tools
        assert [tool.name for tool in chosen] == names
        return
    with pytest.raises(InvalidRequestError, match="there is no tool named 'n'"):
        planned(tools=tools, tool_choice=choice)


@pytest.mark.parametrize("n", [None, 1])
def test_one_answer_is_all_there_is(n: int | None) -> None:
    assert body(n=n).n == n
    with pytest.raises(InvalidRequestError):
        body(n=2)
