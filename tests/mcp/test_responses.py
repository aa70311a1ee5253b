"""Responses that call the tools of a real MCP server, through the official client.

``golden_approval.jsonl`` has the events of a response that asks for an approval, and of the one
with the answer; ``WRITE_GOLDEN=1`` writes it anew.
"""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import responses as types

from tests.e2e.scripts import dicts
from tests.mcp.conftest import ADD, SAY, McpSite, continued, kinds, posted, question_of
from tests.served_stack import wait_until
from tests.tool_loop.servers import play
from tests.upstream_server import Talk, chunks, delta, finish, usage

SECRET = "very-secret-token"
GOLDEN = Path(__file__).parent / "golden_approval.jsonl"


@pytest.mark.parametrize("path", ["mcp", "sse"])
def test_tool_is_listed_and_called_and_its_result_goes_to_the_model(
    site: McpSite, path: str
) -> None:
    before = len(site.server.calls)
    with site.stack.checked():
        response = site.respond(ADD, SAY, tool=site.tool(path, authorization=SECRET))
    assert kinds(response) == ["mcp_list_tools", "mcp_call", "message"]
    listing, call, _ = dicts(response.output)
    assert "add" in [tool["name"] for tool in listing["tools"]]
    assert "error" not in listing  # As of OpenAI's API: some clients take no null.
    assert (call["name"], call["server_label"], call["status"]) == ("add", "test", "completed")
    assert (json.loads(call["arguments"]), call["output"]) == ({"a": 40, "b": 2}, "42")
    (made,) = site.server.calls[before:]
    assert (made["arguments"], made["secret"]) == ({"a": 40, "b": 2}, f"Bearer {SECRET}")
    assert made["key"]
    assert site.model.body["messages"][-1]["content"] == "42"
    (shown,) = dicts(response.tools)
    assert SECRET not in json.dumps(shown)
    assert shown["server_url"].endswith(path)


def test_events_of_a_call(site: McpSite) -> None:
    client = site.stack.client()
    with site.stack.checked(), client.responses.stream(**site.body(ADD, SAY)) as stream:
        found = [event.type.removeprefix("response.") for event in stream]
    assert found[2:12] == [
        *("output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed"),
        *("output_item.done", "output_item.added", "mcp_call.in_progress"),
        *("mcp_call_arguments.delta", "mcp_call_arguments.done", "mcp_call.completed"),
        "output_item.done",
    ]


def test_events_of_a_question_and_of_its_answer(site: McpSite) -> None:
    asking = site.tool(require_approval="always", allowed_tools=["add"])
    client = site.stack.client()
    with site.stack.checked():
        asked = client.responses.create(**site.body(ADD, SAY, tool=asking), stream=True)
        events = [event.to_dict() for event in asked]
        first: Any = events[-1]["response"]
        (question,) = [one for one in first["output"] if one["type"] == "mcp_approval_request"]
        answer = {"type": "mcp_approval_response", "approval_request_id": question["id"]}
        given = [{**answer, "approve": True}, {"role": "user", "content": json.dumps([SAY])}]
        body = site.body(tool=asking) | {"input": given, "previous_response_id": first["id"]}
        answered = client.responses.create(**body, stream=True)
        events += [event.to_dict() for event in answered]
    lines = alike(events)
    if os.environ.get("WRITE_GOLDEN"):
        GOLDEN.write_text(lines)
    assert lines == GOLDEN.read_text()


def alike(events: list[dict[str, Any]]) -> str:
    """The events without their responses, with numbered ids and short texts, one in a line."""
    names: dict[str, str] = {}

    def named(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"{match[1]}_{len(names) + 1}")

    shown = [{name: v for name, v in one.items() if name != "response"} for one in events]
    text = "".join(f"{json.dumps(one)}\n" for one in shown)
    return re.sub("x{100,}", "x…", re.sub(r"\b(mcpl|mcpr|mcp|msg)_[0-9a-f]{32,}", named, text))


def test_list_of_tools_is_kept_along_the_chain(site: McpSite) -> None:
    first = site.respond(SAY)
    with site.stack.checked():
        second = site.respond(ADD, SAY, previous_response_id=first.id)
    assert kinds(second) == ["mcp_call", "message"]
    own: Any = [*dicts(first.output), {"role": "user", "content": json.dumps([ADD, SAY])}]
    third = site.respond(tool=site.tool(), input=own, store=False)
    assert kinds(third) == ["mcp_call", "message"]


def test_call_waits_for_its_approval_and_is_made_once(site: McpSite) -> None:
    before = len(site.server.calls)
    asking = site.tool(require_approval="always")
    with site.stack.checked():
        first = site.respond(ADD, SAY, tool=asking)
        assert kinds(first) == ["mcp_list_tools", "mcp_approval_request"]
        assert first.status == "completed"
        request = first.output[1]
        assert isinstance(request, types.response_output_item.McpApprovalRequest)
        assert json.loads(request.arguments) == {"a": 40, "b": 2}
        assert site.server.calls[before:] == []
        answer: Any = {"type": "mcp_approval_response", "approval_request_id": request.id}
        forged = {**request.to_dict(), "arguments": '{"a": 666, "b": 0}'}
        say = {"role": "user", "content": json.dumps([SAY])}
        given: Any = [forged, {**answer, "approve": True}, say]
        second = site.respond(tool=asking, input=given, previous_response_id=first.id)
    assert kinds(second) == ["mcp_call", "message"]
    call = dicts(second.output)[0]
    assert (call["approval_request_id"], call["output"]) == (request.id, "42")
    assert [made["arguments"] for made in site.server.calls[before:]] == [{"a": 40, "b": 2}]
    with pytest.raises(openai.BadRequestError) as raised:
        site.respond(tool=asking, input=given, previous_response_id=first.id)
    assert raised.value.code == "approval_already_answered"
    assert len(site.server.calls) == before + 1


def test_approved_call_is_not_repeated_when_the_server_of_the_model_was_away_after_it(
    site: McpSite,
) -> None:
    before = len(site.server.calls)
    asking = site.tool(require_approval="always")
    first = site.respond(ADD, SAY, tool=asking)
    answer = {"type": "mcp_approval_response", "approval_request_id": first.output[1].id}
    say = {"role": "user", "content": json.dumps([SAY])}
    given: Any = [{**answer, "approve": True}, say]
    site.model.answers = [*[Talk.reset] * 3, play]
    second = site.respond(tool=asking, input=given, previous_response_id=first.id)
    assert site.stack.row(second.id)["attempt"] == 2
    assert kinds(second) == ["mcp_call", "message"]
    assert "Outcome unknown" in json.dumps(dicts(second.output)[0]["error"])
    assert len(site.server.calls) == before + 1


@pytest.mark.parametrize("approval", ["always", "never"])
def test_call_whose_turn_is_cut_off_is_neither_asked_for_nor_made(
    site: McpSite, approval: str
) -> None:
    before = len(site.server.calls)
    whole = delta({"tool_calls": [called("test__add", '{"a": 1, "b": 2}', 0)]})
    half = delta({"tool_calls": [called("test__add", '{"a": 40, ', 1)]})
    site.model.answers = [chunks(whole, half, finish("length"), usage(7, 5)), play]
    tool = site.tool(require_approval=approval)
    with site.stack.checked():
        response = site.respond(tool=tool, max_output_tokens=5)
    assert response.status == "incomplete"
    _, call = dicts(response.output)
    assert json.loads(call["arguments"]) == {"a": 1, "b": 2}
    asked = site.stack.sql(
        "SELECT count(*) FROM responses_api_mcpapproval JOIN responses_api_item item "
        "ON item.id = item_id JOIN responses_api_storedresponse response "
        "ON response.id = item.response_id WHERE response.public_id = %s",
        response.id,
    )
    if approval == "always":
        assert (call["type"], asked) == ("mcp_approval_request", [(1,)])
    else:
        assert (call["status"], call["error"], asked) == ("incomplete", None, [(0,)])
    assert len(site.server.calls) == before


def called(name: str, arguments: str, index: int) -> dict[str, Any]:
    """A call as the model's server sends it."""
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{index}", "type": "function", "function": function}


def test_refused_call_is_not_made_and_the_model_is_told(site: McpSite) -> None:
    before = len(site.server.calls)
    asking = site.tool(require_approval="always")
    first = site.respond(ADD, SAY, tool=asking)
    answer: Any = {"type": "mcp_approval_response", "approval_request_id": first.output[1].id}
    say = {"role": "user", "content": json.dumps([SAY])}
    given: Any = [{**answer, "approve": False, "reason": "too dear"}, say]
    second = site.respond(tool=asking, input=given, previous_response_id=first.id)
    assert kinds(second) == ["message"]
    assert "too dear" in json.dumps(site.model.body["messages"])
    assert len(site.server.calls) == before


RESPONSES = "/admin/responses_api/storedresponse/"
APPROVALS = "/admin/responses_api/mcpapproval/"


ADD_ASKED = {"calls": [["asked__add", {"a": 20, "b": 3}]]}


def test_of_two_approvals_in_the_console_at_one_moment_one_makes_the_call(
    site: McpSite, operator: httpx.Client, registered: dict[str, Any]
) -> None:
    first = site.respond(ADD_ASKED, SAY, tool=registered, tool_choice="required")
    pk, item = question_of(site, first)
    page = f"{RESPONSES}{pk}/change/"
    text = operator.get(page).text
    assert "Calls that wait for an approval" in text
    assert f'href="{page}#approvals">Answer</a>' in operator.get(APPROVALS).text
    address = f"{APPROVALS}of/{pk}/answer/"
    assert operator.get(address).status_code == 405
    assert "approve or refuse each" in posted(operator, page, address, {}).text
    before = len(site.server.calls)
    form = {f"answer-{item}": "approve"}

    def answered(_: int) -> str:
        """The page after an answer, in a window of its own: messages are in cookies."""
        with httpx.Client(
            base_url=site.stack.url, cookies=operator.cookies, timeout=60, follow_redirects=True
        ) as window:
            return posted(window, page, address, form).text

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(answered, range(8)))
    (second,) = continued(site, first)
    assert kinds(second) == ["mcp_call", "message"]
    assert dicts(second.output)[0]["output"] == "23"
    assert len(site.server.calls) == before + 1
    words = ("Nothing was answered", "have been answered already")
    assert sum(any(word in text for word in words) for text in answers) == 7
    assert "Calls that wait for an approval" not in operator.get(page).text
    (row,) = site.stack.sql(
        "SELECT id FROM responses_api_storedresponse WHERE public_id = %s", second.id
    )
    card = operator.get(f"{RESPONSES}{row[0]}/change/").text
    card = card.partition("<h2>Tool calls</h2>")[2].partition("</section>")[0]
    assert "&quot;a&quot;: 20" in card
    assert ">23</pre>" in card
    assert "0.50 USD" in card
    costs = [float(site.stack.row(response.id)["cost"]) for response in (first, second)]
    assert costs == [0, 0.5]  # The call is made by the second one.


def test_refusal_in_the_console_continues_the_response_without_the_call(
    site: McpSite, operator: httpx.Client, registered: dict[str, Any]
) -> None:
    before = len(site.server.calls)
    first = site.respond(ADD_ASKED, SAY, tool=registered)
    pk, item = question_of(site, first)
    address = f"{APPROVALS}of/{pk}/answer/"
    posted(operator, f"{RESPONSES}{pk}/change/", address, {f"answer-{item}": "refuse"})
    (second,) = continued(site, first)
    assert "mcp_call" not in kinds(second)
    told = json.dumps(site.model.body["messages"])
    assert "The user refused the call" in told
    assert len(site.server.calls) == before


def test_questions_of_one_response_are_answered_together_in_its_conversation(
    site: McpSite, operator: httpx.Client, registered: dict[str, Any]
) -> None:
    conversation = site.stack.client().conversations.create()
    asked = {"calls": [["asked__add", {"a": 1, "b": n}] for n in (5, 6)]}
    first = site.respond(asked, SAY, tool=registered, conversation=conversation.id)
    rows = site.stack.sql(
        "SELECT response_id, item_id FROM responses_api_mcpapproval "
        "JOIN responses_api_item item ON item.id = item_id WHERE item.public_id = ANY(%s)",
        [item.id for item in first.output],
    )
    pk, page = rows[0][0], f"{RESPONSES}{rows[0][0]}/change/"
    address = f"{APPROVALS}of/{pk}/answer/"
    half = posted(operator, page, address, {f"answer-{rows[0][1]}": "approve"}).text
    assert "approve or refuse each" in half
    posted(operator, page, address, {f"answer-{item}": "approve" for _, item in rows})

    def outputs() -> list[str]:
        items = site.stack.client().conversations.items.list(conversation.id, order="asc")
        return [str(item.output) for item in items if item.type == "mcp_call"]

    wait_until(lambda: outputs() == ["6", "7"], 60, "both calls")


def test_the_console_answers_no_call_whose_credentials_came_with_the_request(
    site: McpSite, operator: httpx.Client
) -> None:
    first = site.respond(ADD, SAY, tool=site.tool(require_approval="always", authorization=SECRET))
    pk, item = question_of(site, first)
    page, address = f"{RESPONSES}{pk}/change/", f"{APPROVALS}of/{pk}/answer/"
    text = posted(operator, page, address, {f"answer-{item}": "approve"}).text
    assert "answer through the API, with the credentials" in text
    assert continued(site, first) == []
    assert "Calls that wait for an approval" in text


def test_approvals_are_refused_by_name(site: McpSite) -> None:
    asking = site.tool(require_approval="always")
    first = site.respond(ADD, SAY, tool=asking)
    answer: Any = {"type": "mcp_approval_response", "approval_request_id": first.output[1].id}
    given: Any = [{**answer, "approve": True}]
    other = {**asking, "server_label": "other"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tool": other}, "tools"),
        ({"tool": asking, "store": False}, "store"),
    ]
    for fields, param in cases:
        with pytest.raises(openai.BadRequestError) as raised:
            site.respond(input=given, previous_response_id=first.id, **fields)
        assert raised.value.param == param


def test_tool_that_is_not_allowed_is_not_called_whatever_the_model_writes(site: McpSite) -> None:
    before = len(site.server.calls)
    response = site.respond(ADD, SAY, tool=site.tool(allowed_tools=["fail"]))
    assert "mcp_call" not in kinds(response)
    assert len(site.server.calls) == before
    (offered,) = site.model.body["tools"]
    assert offered["function"]["name"] == "test__fail"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fail", {}, "the disk is full"),
        ("huge", {"size": 500_000}, "more than 160000 bytes"),
        ("sleep", {"seconds": 60}, "Outcome unknown"),
        ("add", {"a": "no", "b": 2}, "validation error"),
    ],
)
def test_failure_of_a_call_is_in_its_item_and_the_response_goes_on(
    site: McpSite, name: str, arguments: dict[str, Any], message: str
) -> None:
    with site.stack.checked():
        response = site.respond({"calls": [[f"test__{name}", arguments]]}, SAY)
    assert response.status == "completed"
    _, call, last = dicts(response.output)
    assert (call["status"], call["output"], last["type"]) == ("failed", None, "message")
    assert message in json.dumps(call["error"])


def test_large_result_is_cut(site: McpSite) -> None:
    response = site.respond({"calls": [["test__huge", {"size": 50_000}]]}, SAY)
    output = dicts(response.output)[1]["output"]
    assert output.startswith("hhh")
    assert len(output) < 21_000


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        *((path, "auto") for path in ("unauthorized", "elsewhere", "endless", "silent", "garbage")),
        ("unauthorized", "required"),
    ],
)
def test_server_that_cannot_be_listed_is_an_error_in_the_item(
    site: McpSite, path: str, choice: Any
) -> None:
    with site.stack.checked():
        response = site.respond(SAY, tool=site.tool(path), tool_choice=choice)
    assert response.status == "completed"
    listing, message = dicts(response.output)
    assert (listing["type"], listing["tools"]) == ("mcp_list_tools", [])
    assert listing["error"]
    assert message["type"] == "message"


def test_secrets_of_a_request_are_nowhere_in_plain_text(site: McpSite) -> None:
    tool = site.tool(authorization=SECRET, headers={"X-Key": SECRET})
    slow = {"calls": [["test__sleep", {"seconds": 2}]]}
    before = len(site.server.calls)
    body = site.body(slow, SAY, tool=tool, background=True)
    response = site.stack.client().responses.create(**body)
    wait_until(lambda: len(site.server.calls) > before, 30, "the call")
    with site.stack.redis() as client:
        dumps = [client.dump(key) or b"" for key in client.keys("*")]
    assert any(response.id.encode() in key for key in _keys(site))
    assert not any(SECRET.encode() in dump for dump in dumps)
    client_ = site.stack.client()
    wait_until(lambda: client_.responses.retrieve(response.id).status == "completed", 30, "the end")
    tables = site.stack.sql("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    for (table,) in tables:
        text = f'SELECT count(*) FROM "{table}" AS row WHERE row::text LIKE %s'  # noqa: S608
        assert site.stack.sql(text, f"%{SECRET}%") == [(0,)], table
    assert SECRET not in site.stack.text()


def _keys(site: McpSite) -> list[bytes]:
    with site.stack.redis() as client:
        found: list[bytes] = client.keys("*")
    return found


def test_registered_server_is_named_by_its_label(site: McpSite) -> None:
    tool = register(site, "own", "mcp")
    response = site.respond({"calls": [["own__add", {"a": 1, "b": 2}]]}, SAY, tool=tool)
    assert dicts(response.output)[1]["output"] == "3"
    described = [one["function"]["description"] for one in site.model.body["tools"]]
    assert "(Sums.) Adds two integers." in described
    listed = "SELECT jsonb_array_length(tools) > 3 FROM mcp_servers_mcpserver WHERE label = 'own'"
    assert site.stack.sql(listed) == [(True,)]


@pytest.mark.parametrize(("path", "error"), [("silent", "within 3 s"), ("nul", "a\ufffdb")])
def test_failure_of_a_listing_is_on_the_page_of_the_server(
    site: McpSite, path: str, error: str
) -> None:
    listing = dicts(site.respond(SAY, tool=register(site, path, path)).output)[0]
    assert error in json.dumps(listing["error"], ensure_ascii=False)
    found = site.stack.sql("SELECT error FROM mcp_servers_mcpserver WHERE label = %s", path)
    assert error in found[0][0]


def register(site: McpSite, label: str, path: str) -> dict[str, Any]:
    """Register a server; return the tool that names it."""
    site.stack.sql(
        "INSERT INTO mcp_servers_mcpserver (label, url, transport, description, is_active, "
        "is_idempotent, credentials, oauth_issuer, oauth_client_id, oauth_secret, oauth_scope, "
        "tools, error, created_at) "
        "VALUES (%s, %s, 'auto', 'Sums.', true, false, '', '', '', '', '', '[]', '', now())",
        label,
        f"{site.server.url}/{path}",
    )
    return {"type": "mcp", "server_label": label, "require_approval": "never"}


def allowed(tool: dict[str, Any]) -> dict[str, Any]:
    """A ``tool_choice`` that lets the model call this tool only."""
    return {"type": "allowed_tools", "mode": "auto", "tools": [tool]}


@pytest.mark.parametrize(
    ("choice", "listed", "names"),
    [
        ("none", False, None),
        ("required", True, {"test__add", "test__fail"}),
        ({"type": "mcp", "server_label": "test", "name": "add"}, True, {"test__add"}),
        (allowed({"type": "mcp", "server_label": "test", "name": "add"}), True, {"test__add"}),
        (allowed({"type": "mcp"}), True, {"test__add", "test__fail"}),
    ],
)
def test_tool_choice_is_for_tools_that_are_not_listed_yet_too(
    site: McpSite, choice: Any, listed: bool, names: set[str] | None
) -> None:
    turns = (SAY,) if choice == "none" else (ADD, SAY)
    response = site.respond(*turns, tool_choice=choice)
    assert ("mcp_list_tools" in kinds(response)) == listed
    offered = {one["function"]["name"] for one in site.model.body.get("tools", ())}
    assert offered >= (names or set())
    assert names is None or len(names) > 1 or offered == names


def test_host_that_is_not_allowed_is_refused_by_name(site: McpSite) -> None:
    tool = {**site.tool(), "server_url": "http://169.254.169.254/latest"}
    with pytest.raises(openai.BadRequestError) as raised:
        site.respond(SAY, tool=tool)
    assert raised.value.param == "tools[0].server_url"


def test_a_deferred_server_is_asked_when_a_search_loads_it(site: McpSite) -> None:
    working = site.tool(server_description="Sums", defer_loading=True)
    broken = site.tool("nothing", server_label="broken", defer_loading=True)
    tools = [{"type": "tool_search"}, working, broken]
    search = {"calls": [["tool_search", {"paths": ["test", "broken"]}]]}

    def shown() -> list[str]:
        return [tool["function"]["name"] for tool in site.model.body.get("tools", ())]

    with site.stack.checked():
        idle = site.stack.client().responses.create(**{**site.body(SAY), "tools": tools})
    assert (kinds(idle), shown()) == (["message"], ["tool_search"])
    described_search = site.model.body["tools"][0]["function"]["description"]
    assert described_search.endswith("- test: Sums\n- broken: ")
    with site.stack.checked():
        body = {**site.body(search, ADD, SAY), "tools": tools}
        made = site.stack.client().responses.create(**body)
    assert kinds(made) == [
        *("tool_search_call", "tool_search_output", "mcp_list_tools", "mcp_list_tools"),
        *("mcp_call", "message"),
    ]
    _, found, listed, failed, call, _ = dicts(made.output)
    assert [tool["server_label"] for tool in found["tools"]] == ["test", "broken"]
    assert "add" in [tool["name"] for tool in listed["tools"]]
    assert (failed["server_label"], failed["tools"], bool(failed["error"])) == ("broken", [], True)
    assert call["output"] == "42"
    assert "test__add" in shown()
    told = next(m["content"] for m in site.model.body["messages"] if m["role"] == "tool")
    assert told.startswith("Loaded: test. These functions can be called now.\nNot loaded: broken: ")
    with site.stack.checked():
        again = site.stack.client().responses.create(
            **{**site.body(ADD, SAY), "tools": tools, "previous_response_id": made.id}
        )
    assert kinds(again) == ["mcp_call", "message"]  # It is not listed again.
    with site.stack.checked():
        chosen: Any = {"type": "mcp", "server_label": "test"}
        body = {**site.body(ADD, SAY), "tools": tools, "tool_choice": chosen}
        forced = site.stack.client().responses.create(**body)
    assert kinds(forced) == ["mcp_list_tools", "mcp_call", "message"]
