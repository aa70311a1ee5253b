"""Tools that the client runs: namespaces, shells, patches, searches; and every type of item."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import responses as types

from tests.e2e.scripts import (
    call,
    dicts,
    events,
    replay_raw,
    respond,
    script,
    stream_raw,
)
from tests.upstream_server import UpstreamServer, streamed

CODEX = Path(__file__).parent / "bodies" / "codex_0.169.json"
FIND: Any = {
    "type": "function",
    "name": "find",
    "description": "Find a customer",
    "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
}
CRM: Any = {"type": "namespace", "name": "crm", "description": "Customers", "tools": [FIND]}
TYPED: list[Any] = [{"type": "shell"}, {"type": "local_shell"}, {"type": "apply_patch"}]
SAY: Any = {"role": "user", "content": "x"}


def listed(client: openai.OpenAI, response_id: str) -> list[Any]:
    """The input of a response as it is listed, without the ids."""
    items = dicts(client.responses.input_items.list(response_id, order="asc", limit=100).data)
    assert all(item.pop("id") for item in items)
    return items


def test_call_of_a_namespace_has_its_name_and_namespace_apart(client: openai.OpenAI) -> None:
    first = respond(client, call("crm__find", '{"name":', '"Ann"}'), tools=[CRM])
    [made] = first.output
    assert isinstance(made, types.ResponseFunctionToolCall)
    assert (made.namespace, made.name, made.arguments) == ("crm", "find", '{"name":"Ann"}')
    assert first.tools[0].to_dict()["tools"][0]["name"] == "find"
    result: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "42"}
    second = client.responses.create(
        model="scripted", input=[result, SAY], previous_response_id=first.id, tools=[CRM]
    )
    assert second.status == "completed"
    assert listed(client, second.id)[1]["namespace"] == "crm"
    again = client.responses.create(
        model="scripted", input=[SAY, *dicts(first.output), result], tools=[CRM], store=False
    )
    assert again.status == "completed"


def test_names_that_collide_or_are_long_are_told_apart(client: openai.OpenAI) -> None:
    long = "n" * 128
    tools = [
        {"type": "function", "name": "crm__find"},
        CRM,
        {"type": "namespace", "name": "über", "description": "", "tools": [FIND]},
        {"type": "function", "name": long},
    ]
    body: Any = {"model": "demo", "input": "Hi", "tools": tools, "max_output_tokens": 200}
    named: Any = [
        {"type": "function", "name": "find", "namespace": "crm"},
        {"type": "function", "name": long},
    ]
    for choice in named:
        made = client.responses.create(**body, tool_choice=choice)
        [item] = dicts(made.output)
        assert {k: item[k] for k in choice if k != "type"} == {
            k: v for k, v in choice.items() if k != "type"
        }
        assert made.to_dict()["tool_choice"] == choice


def test_typed_tools_come_back_as_their_own_items(client: openai.OpenAI) -> None:
    steps = [
        call("shell", '{"commands": ["ls", ', '"pwd"]}'),
        call("local_shell", '{"command": ["ls"]}'),
        call("apply_patch", '{"type": "create_file", "path": "a.txt", "diff": "+hi"}'),
    ]
    first = respond(client, *steps, tools=TYPED)
    shell, local, patch = first.output
    assert isinstance(shell, types.ResponseFunctionShellToolCall)
    assert shell.action.commands == ["ls", "pwd"]
    assert local.type == "local_shell_call"
    assert local.action.command == ["ls"]
    assert isinstance(patch, types.ResponseApplyPatchToolCall)
    assert patch.operation.to_dict() == {"type": "create_file", "path": "a.txt", "diff": "+hi"}
    done = {"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
    results: Any = [
        {"type": "shell_call_output", "call_id": shell.call_id, "output": [done, done]},
        {"type": "local_shell_call_output", "id": local.call_id, "output": "{}"},
        {"type": "apply_patch_call_output", "call_id": patch.call_id, "status": "completed"},
    ]
    second = client.responses.create(
        model="scripted", input=[*results, SAY], previous_response_id=first.id, tools=TYPED
    )
    assert second.status == "completed"
    told = listed(client, second.id)
    assert [item["type"] for item in told] == [
        *("message", "shell_call", "local_shell_call", "apply_patch_call", "shell_call_output"),
        *("local_shell_call_output", "apply_patch_call_output", "message"),
    ]
    assert told[4]["output"] == [done, done]
    with pytest.raises(openai.BadRequestError, match="No tool output found"):
        client.responses.create(
            model="scripted", input=results[:2], previous_response_id=first.id, tools=TYPED
        )


def test_stream_of_typed_tools_is_replayed_as_it_was(http: httpx.Client) -> None:
    steps = [call("shell", '{"commands": ["ls -la"]}'), {"text": "a"}]
    raw = stream_raw(http, input=script(*steps), tools=TYPED)
    told = events(raw)
    commands = [event for event in told if "shell_call_command" in event["type"]]
    assert [event["type"].rpartition(".")[2] for event in commands] == ["added", "delta", "done"]
    assert commands[1]["delta"] == commands[2]["command"] == "ls -la"
    assert replay_raw(http, told[0]["response"]["id"]) == raw


def test_official_stream_ends_with_the_items(client: openai.OpenAI) -> None:
    steps = [call("shell", '{"commands": ["ls"]}'), call("crm__find", "{}")]
    tools: Any = [*TYPED, CRM]
    with client.responses.stream(model="scripted", input=script(*steps), tools=tools) as stream:
        told = [event.type for event in stream]
        shell, find = stream.get_final_response().output
    assert "response.shell_call_command.delta" in told
    assert shell.type == "shell_call"
    assert shell.action.commands == ["ls"]
    assert find.type == "function_call"
    assert (find.namespace, find.name) == ("crm", "find")


def test_forced_patch_fits_its_schema(client: openai.OpenAI) -> None:
    choice: Any = {"type": "apply_patch"}
    made = client.responses.create(
        model="demo", input="Write a file", tools=TYPED, tool_choice=choice, max_output_tokens=200
    )
    [item] = made.output
    assert item.type in ("apply_patch_call", "function_call")
    assert made.status == "incomplete" or item.type == "apply_patch_call"


def test_arguments_that_fit_no_tool_are_a_function_call(client: openai.OpenAI) -> None:
    [made] = respond(client, call("shell", '{"rm": 1}'), tools=TYPED).output
    assert (made.type, made.name, made.arguments) == ("function_call", "shell", '{"rm": 1}')


def test_command_that_was_cut_is_not_shown(client: openai.OpenAI) -> None:
    steps = call("shell", '{"commands": ["ls", "rm -rf /', 'tmp/x"]}')
    cut = respond(client, steps, tools=TYPED, max_output_tokens=1)
    [made] = cut.output
    assert (cut.status, made.status, made.action.commands) == ("incomplete", "incomplete", ["ls"])


def test_deferred_tools_are_hidden_until_a_search_has_loaded_them(client: openai.OpenAI) -> None:
    deferred: Any = {
        **CRM,
        "tools": [{**FIND, "defer_loading": True, "parameters": {"x": "y" * 400}}],
    }
    search: Any = {"type": "tool_search", "execution": "client", "description": "Search"}
    item: Any = {"type": "tool_search_call", "call_id": "s", "arguments": {"query": "customers"}}
    found: Any = {"type": "tool_search_output", "call_id": "s", "tools": [deferred]}
    nothing: Any = {**found, "tools": []}

    def tokens(*items: Any) -> int:
        counted = client.responses.input_tokens.count(
            model="demo", input=[SAY, *items], tools=[search, deferred]
        )
        return counted.input_tokens

    hidden = tokens(item, nothing)
    assert tokens(item, found) > hidden + 50
    made = client.responses.create(
        model="scripted",
        input=[SAY, item, found, {"role": "user", "content": script(call("crm__find"))}],
        tools=[search],
    )
    assert dicts(made.output)[0]["namespace"] == "crm"
    [searched] = respond(client, call("tool_search", '{"query": "x"}'), tools=[search]).output
    assert searched.type == "tool_search_call"
    assert (searched.execution, searched.arguments) == ("client", {"query": "x"})


def test_deferred_function_is_in_a_namespace_of_its_own_where_the_server_searches(
    client: openai.OpenAI,
) -> None:
    """As in OpenAI's API: openai-agents finds no function without it."""
    tools: list[Any] = [
        {"type": "tool_search"},
        {"type": "function", "name": "look", "parameters": {}, "defer_loading": True},
    ]
    chosen: Any = {"type": "function", "name": "look"}
    first = respond(client, call("look"), tools=tools, tool_choice=chosen)
    [made] = dicts(first.output)
    assert (made["name"], made["namespace"]) == ("look", "look")
    result = {"type": "function_call_output", "call_id": made["call_id"], "output": "seen"}
    again = {"role": "user", "content": script(call("look"))}
    items: list[Any] = [SAY, made, result, again]
    second = client.responses.create(model="scripted", input=items, tools=tools, tool_choice=chosen)
    [made] = dicts(second.output)
    assert (made["name"], made["namespace"]) == ("look", "look")


AGENT_ITEMS: list[Any] = [
    {"type": "multi_agent_call", "call_id": "m", "action": "spawn_agent",
     "arguments": '{"task": "look"}', "agent": {"agent_name": "root"}},
    {"type": "multi_agent_call_output", "call_id": "m", "action": "spawn_agent",
     "output": [{"type": "output_text", "text": "started", "annotations": []}]},
    {"type": "agent_message", "author": "scout", "recipient": "root",
     "content": [{"type": "input_text", "text": "Found it."}]},
]  # fmt: skip
HOSTED_ITEMS: list[Any] = [
    *AGENT_ITEMS,
    {"type": "web_search_call", "status": "completed",
     "action": {"type": "search", "query": "cats"}},
    {"type": "file_search_call", "status": "completed", "queries": ["a"], "results": None},
    {"type": "mcp_call", "server_label": "s", "name": "n", "arguments": "{}", "output": "o"},
    {"type": "mcp_list_tools", "server_label": "s", "tools": [{"name": "n", "input_schema": {}}]},
    {"type": "mcp_approval_request", "server_label": "s", "name": "n", "arguments": "{}"},
    {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
    {"type": "code_interpreter_call", "status": "completed", "container_id": "c", "code": "1",
     "outputs": [{"type": "logs", "logs": "1"}]},
    {"type": "image_generation_call", "status": "completed", "result": "AAAA"},
    {"type": "computer_call", "call_id": "c", "pending_safety_checks": [], "status": "completed",
     "action": {"type": "screenshot"}},
    {"type": "computer_call_output", "call_id": "c", "status": "completed",
     "output": {"type": "computer_screenshot", "image_url": "https://example.org/a.png"}},
    {"type": "program", "call_id": "p", "code": "1", "fingerprint": "f"},
    {"type": "program_output", "call_id": "p", "result": "1", "status": "completed"},
    {"type": "additional_tools", "role": "developer", "tools": [{"type": "shell"}]},
    {"type": "function_call", "call_id": "f", "name": "f", "namespace": "n", "arguments": "{}",
     "caller": {"type": "direct"}, "status": "completed"},
    {"type": "function_call_output", "call_id": "f", "output": "1", "caller": {"type": "direct"},
     "status": "completed"},
    {"type": "compaction_trigger"},
    {"type": "item_of_tomorrow", "fields": [1, {"a": "b"}]},
]  # fmt: skip


def test_listed_items_have_the_fields_whose_value_may_only_be_null(client: openai.OpenAI) -> None:
    """OpenAI's document requires them; they were left out where they were sent as null."""
    ran: Any = {"type": "code_interpreter_call", "status": "completed", "container_id": "c"}
    drawn: Any = {"type": "image_generation_call", "status": "failed", "result": None}
    items: Any = [{**ran, "code": None, "outputs": None}, drawn]
    made = client.conversations.create(items=items)
    first, second = dicts(client.conversations.items.list(made.id, order="asc"))
    assert (first["code"], first["outputs"]) == (None, None)
    assert second["result"] is None


def test_every_item_of_the_union_is_taken_and_listed_as_it_came(client: openai.OpenAI) -> None:
    raw = client.responses.with_raw_response.create(
        model="scripted", input=[*HOSTED_ITEMS, {"role": "user", "content": "hello"}]
    )
    names = raw.headers["x-unsupported-params"].split(",")
    assert names == ["input[].compaction_trigger", "input[].item_of_tomorrow"]
    made: Any = raw.parse()
    assert made.output_text == "hello"
    given = [{k: v for k, v in item.items() if v is not None} for item in HOSTED_ITEMS]
    assert listed(client, made.id)[:-1] == given
    after = client.responses.create(model="scripted", input="x", previous_response_id=made.id)
    assert after.status == "completed"


def test_what_agents_called_and_said_is_in_the_prompt(
    client: openai.OpenAI, odd: UpstreamServer
) -> None:
    odd.answers = [streamed("Seen.")]
    raw = client.responses.with_raw_response.create(model="odd", input=[SAY, *AGENT_ITEMS])
    assert "input[]" not in raw.headers.get("x-unsupported-params", "")
    asked, called, told, said = odd.body["messages"]
    assert asked["content"] == "x"
    [made] = called["tool_calls"]
    assert made["function"] == {"name": "spawn_agent", "arguments": '{"task": "look"}'}
    assert (told["role"], told["tool_call_id"], told["content"]) == ("tool", "m", "started")
    assert said == {
        "role": "user",
        "content": "Message of the agent scout to the agent root:\nFound it.",
    }
    client.responses.create(model="odd", input="y", previous_response_id=raw.parse().id)
    assert odd.body["messages"][:4] == [asked, called, told, said]
    # A model that repeats the last message.
    spoken = client.responses.create(model="scripted", input=[SAY, *AGENT_ITEMS])
    assert spoken.output_text == said["content"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "shell_call", "call_id": "a"}, "input[0].action"),
        ({"type": "shell_call", "action": {"commands": ["ls"]}}, "input[0].call_id"),
        ({"type": "shell_call_output", "call_id": "a", "output": "text"}, "input[0].output"),
        ({"type": "apply_patch_call", "call_id": "a", "operation": {"type": "move"}},
         "input[0].operation.type"),
        ({"type": "additional_tools", "tools": [{"type": "a ghost"}]}, "input[0].tools[0].type"),
        ({"type": 5}, "input[0].type"),
    ],
)  # fmt: skip
def test_item_without_what_the_model_needs_is_400_and_names_the_field(
    client: openai.OpenAI, item: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="scripted", input=[item, SAY])
    assert caught.value.param == param


def test_request_of_codex_is_answered_by_a_call_of_its_namespace(http: httpx.Client) -> None:
    body = json.loads(CODEX.read_text(encoding="utf-8"))
    text = script(call("mcp__notes__add_note", '{"text": "x"}'))
    body["input"][-1]["content"][0]["text"] = text
    raw = stream_raw(http, **{**body, "model": "scripted"})
    [item] = events(raw)[-1]["response"]["output"]
    assert (item["type"], item["namespace"], item["name"]) == (
        *("function_call", "mcp__notes", "add_note"),
    )


def test_hostile_tools_and_items_leave_a_bystander_served(
    http: httpx.Client, client: openai.OpenAI
) -> None:
    many: list[Any] = [
        {
            "type": "namespace",
            "name": f"space_{n}",
            "description": "d",
            "tools": [{**FIND, "name": f"tool_{i}"} for i in range(13 if n < 20 else 12)],
        }
        for n in range(40)
    ]
    first = respond(client, call("space_39__tool_11", "{}"), tools=many)
    assert (first.output[0].namespace, first.output[0].name) == ("space_39", "tool_11")
    too_many = [{**space, "name": f"more_{n}"} for n, space in enumerate(many * 3)]
    refused = http.post(
        "/v1/responses", json={"model": "scripted", "input": "x", "tools": too_many}
    )
    assert refused.status_code == 400, refused.text[:300]
    assert refused.json()["error"]["param"].startswith("tools[")
    large = {"type": "item_of_tomorrow", "data": "x" * 10_000_000}
    body = {"model": "scripted", "input": [large, SAY], "store": False}
    assert http.post("/v1/responses", json=body).status_code == 200
    assert respond(client, {"text": "served"}).output_text == "served"


LARGE: dict[str, Any] = {"type": "object", "properties": {"x" * 1_000_000: {}}}
WRONG: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}


def patch(definition: str) -> dict[str, Any]:
    """A custom tool of this grammar."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": definition}
    return {"type": "custom", "name": "patch", "format": grammar}


@pytest.mark.parametrize(
    ("tool", "choice", "field"),
    [
        (patch("start: " + '"a" ' * 75_000), "auto", "format.definition"),
        (patch("start: missing"), {"type": "custom", "name": "patch"}, "format.definition"),
        ({**FIND, "name": "f", "parameters": LARGE}, "auto", "parameters"),
        ({**FIND, "name": "f", "parameters": WRONG}, "auto", "parameters"),
        ({**FIND, "name": "f", "parameters": WRONG}, {"type": "function", "name": "f"},
         "parameters"),
    ],
    ids=["large grammar", "wrong grammar", "large schema", "wrong schema", "forced wrong schema"],
)  # fmt: skip
def test_bad_grammar_or_schema_of_a_tool_is_named_by_its_path(
    http: httpx.Client, tool: dict[str, Any], choice: Any, field: str
) -> None:
    space = {"type": "namespace", "name": "space", "tools": [{**FIND, "name": "other"}, tool]}
    inside = choice if choice == "auto" else {**choice, "namespace": "space"}
    for tools, chosen, path in (
        ([FIND, tool], choice, f"tools[1].{field}"),
        ([FIND, space], inside, f"tools[1].tools[1].{field}"),
    ):
        body = {"model": "demo", "input": "x", "tools": tools, "tool_choice": chosen}
        refused = http.post("/v1/responses", json=body)
        assert refused.status_code == 400, refused.text[:300]
        assert refused.json()["error"]["param"] == path
