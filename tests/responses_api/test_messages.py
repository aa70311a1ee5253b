"""From items to messages."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import FilePart, ImagePart, Message, TextPart, ToolCall
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.core.storage.cipher import seal
from inference_site.gateway.request_fields.capabilities import require_media
from inference_site.gateway.submission.model_access import with_capabilities
from responses_api.client_tools import offer_tools
from responses_api.context import ContextItem
from responses_api.items import to_data
from responses_api.mapping import to_generation_request, to_messages
from responses_api.prompt_items import CALLS, RESULTS, WHOLE_CALLS, WORDS
from responses_api.site_tools import Route
from responses_api.wire.requests import ResponseRequest
from tests.images import data_url, encoded

# The catalogue asks Redis for the models of run time, and the database for their adapters.
pytestmark = [pytest.mark.redis, pytest.mark.django_db]

SPEC = ModelSpec("m", "scripted")
SEEING = ModelSpec("m", "llama_cpp", options={"mmproj": "projector.gguf"})
PROJECT = 7


def messages(
    *items: Any,
    instructions: str | None = None,
    spec: ModelSpec = SPEC,
    tools: Any = None,
) -> tuple[Message, ...]:
    """The messages of a request with these items."""
    body = ResponseRequest.model_validate({"input": list(items), "tools": tools})
    context = [ContextItem(to_data(item), f"input[{i}]") for i, item in enumerate(body.input or ())]
    offered = offer_tools(body.tools or (), context, project_id=1)
    turns = to_messages(instructions, context, PROJECT, offered)
    require_media(with_capabilities(spec), turns)
    return turns


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def call(call_id: str, name: str = "f", **fields: Any) -> dict[str, Any]:
    made = {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"}
    return {**made, **fields}


def result(call_id: str, output: Any = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def shape(turns: tuple[Message, ...]) -> list[str]:
    """Each message as its role, and the ids of its calls or of the answered call."""
    return [
        " ".join([turn.role, *(c.id for c in turn.tool_calls), *filter(None, [turn.tool_call_id])])
        for turn in turns
    ]


def test_instructions_come_first() -> None:
    turns = messages(said("developer", "d"), said("user", "u"), instructions="i")
    assert turns == (Message("system", "i"), Message("system", "d"), Message("user", "u"))


def test_roles_and_parts_become_turns_in_order() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    refused = [{"type": "refusal", "refusal": "no"}]
    assert messages(
        said("system", "s"),
        {"type": "message", **said("user", parts)},
        said("assistant", [{"type": "output_text", "text": "x", "annotations": []}]),
        said("user", "again"),
        {**said("assistant", refused), "phase": "commentary", "status": None, "parsed": None},
    ) == (
        Message("system", "s"),
        Message("user", "ab"),
        Message("assistant", "x"),
        Message("user", "again"),
        Message("assistant", "no"),
    )


def test_images_and_files_of_chats_are_parts_of_messages() -> None:
    url = "data:image/png;base64,AA=="
    shapes: list[Any] = [
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        {"type": "file", "file": {"filename": "a", "file_data": url}},
    ]
    [turn] = messages(said("user", [{"text": "see"}, *shapes]), spec=SEEING)
    assert [type(part) for part in turn.parts] == [TextPart] + [ImagePart] * 5


def test_one_turn_thinks_speaks_and_calls() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    turns = messages(
        said("user", "u"), thought, said("assistant", "t"), call("1"), call("2"), result("1"),
        result("2"),
    )  # fmt: skip
    assert turns[1] == Message(
        "assistant",
        "t",
        tool_calls=(ToolCall("1", "f", "{}"), ToolCall("2", "f", "{}")),
        reasoning="hm",
    )
    assert turns[2:] == (
        Message("tool", "ok", "f", tool_call_id="1"),
        Message("tool", "ok", "f", tool_call_id="2"),
    )


def test_two_messages_in_a_row_are_two_turns() -> None:
    assert shape(messages(said("assistant", "a"), said("assistant", "b"))) == ["assistant"] * 2


@pytest.mark.parametrize(
    "items",
    [
        [call("1"), call("2"), result("1"), result("2")],
        [call("1"), call("2"), result("2"), result("1")],
        [result("2"), result("1"), call("1"), call("2")],
    ],
)
def test_results_follow_their_calls_wherever_they_come(items: list[Any]) -> None:
    assert shape(messages(*items)) == ["assistant 1 2", "tool 1", "tool 2"]


def test_ids_of_calls_may_be_as_long_as_a_server_made_them() -> None:
    """LiteLLM puts Gemini's signatures into them, and needs them back."""
    long = "call_1__thought__" + "x" * 5000
    assert shape(messages(call(long), result(long))) == [f"assistant {long}", f"tool {long}"]


def test_call_after_a_result_is_a_turn_of_its_own() -> None:
    """A chain of calls keeps its order, and its beginning stays the same as it grows."""
    rounds = [item for n in "123" for item in (call(n), result(n))]
    whole = messages(said("user", "u"), *rounds)
    assert shape(whole) == [
        *("user", "assistant 1", "tool 1", "assistant 2", "tool 2", "assistant 3", "tool 3")
    ]
    assert messages(said("user", "u"), *rounds[:4]) == whole[:5]


def test_ids_that_are_used_again_each_turn_keep_their_results_apart() -> None:
    turns = messages(call("1"), result("1", "first"), call("1"), result("1", "second"))
    assert [turn.text for turn in turns if turn.role == "tool"] == ["first", "second"]
    assert shape(turns) == ["assistant 1", "tool 1"] * 2


def test_results_that_come_after_the_user_spoke_are_moved_to_their_calls() -> None:
    assert shape(messages(call("1"), said("user", "u"), result("1"))) == [
        *("assistant 1", "tool 1", "user")
    ]


def test_call_that_was_cut_is_left_out() -> None:
    assert shape(messages(said("assistant", "a"), call("1", status="incomplete"))) == ["assistant"]


def test_call_that_was_cut_but_answered_stays() -> None:
    assert shape(messages(call("1", status="incomplete"), result("1"))) == ["assistant 1", "tool 1"]


def test_custom_calls_are_shown_as_the_model_made_them() -> None:
    turns = messages(
        {"type": "custom_tool_call", "call_id": "1", "name": "run", "input": 'say "a"'},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
    )
    assert turns == (
        Message("assistant", None, tool_calls=(ToolCall("1", "run", '{"input": "say \\"a\\""}'),)),
        Message("tool", "done", "run", tool_call_id="1"),
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "raw"}]}, "raw"),
        ({"summary": [{"type": "summary_text", "text": "short"}]}, "short"),
        ({"summary": [], "encrypted_content": None}, ""),
    ],
)
def test_reasoning_is_given_back(fields: dict[str, Any], text: str) -> None:
    [turn] = messages({"type": "reasoning", "id": "rs_1", **fields}, said("assistant", "a"))
    assert (turn.reasoning, turn.text) == (text, "a")


def test_sealed_reasoning_is_opened() -> None:
    thought = {"type": "reasoning", "summary": [], "encrypted_content": seal("deep", PROJECT)}
    [turn] = messages(thought, said("assistant", "a"))
    assert turn.reasoning == "deep"


@pytest.mark.parametrize("kind", ["reasoning", "compaction"])
def test_what_was_sealed_elsewhere_is_refused(kind: str) -> None:
    sealed = {"type": kind, "encrypted_content": seal("x", PROJECT + 1)}
    with pytest.raises(InvalidRequestError) as caught:
        messages(said("user", "u"), sealed)
    assert caught.value.param == "input[1].encrypted_content"
    assert caught.value.code == "invalid_encrypted_content"


def test_compaction_is_a_turn_of_the_system() -> None:
    sealed = {"type": "compaction", "encrypted_content": seal("so far", PROJECT)}
    assert messages(sealed, said("user", "u")) == (
        Message("system", "so far"),
        Message("user", "u"),
    )


@pytest.mark.parametrize("type_", ["input_image", "input_file"])
def test_file_of_an_id_is_left_to_the_worker(type_: str) -> None:
    [turn] = messages(said("user", [{"type": type_, "file_id": "file-1"}]), spec=SEEING)
    assert turn.parts == (FilePart("input[0].content[0].file_id", "file-1"),)


def test_image_without_an_address_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        messages(said("user", [{"type": "input_image"}]))
    assert caught.value.param == "input[0].content[0].image_url"


def test_images_keep_their_places() -> None:
    url = data_url(encoded("PNG"))
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": url},
        {"type": "input_text", "text": "b"},
    ]
    param = "input[0].content[1].image_url"
    [turn] = messages(said("user", parts), spec=SEEING)
    assert turn.text is None
    assert turn.parts == (TextPart("a"), ImagePart(url, param), TextPart("b"))


def test_file_of_text_is_read() -> None:
    file = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGk="}
    [turn] = messages(said("user", [{"type": "input_text", "text": "see "}, file]))
    assert "hi" in (turn.text or "")


def test_file_by_url_is_left_to_the_worker() -> None:
    file = {"type": "input_file", "file_url": "https://example.org/a"}
    [turn] = messages(said("user", [file]))
    where = "input[0].content[0].file_url"
    assert turn.parts == (FilePart(where, url="https://example.org/a"),)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"file_url": "ftp://example.org/a"}, "input[0].content[0].file_url"),
        ({"file_data": "!"}, "input[0].content[0].file"),
    ],
)
def test_file_that_cannot_be_read_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        messages(said("user", [{"type": "input_file", "filename": "a", **fields}]))
    assert (caught.value.param or "").startswith(param)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
FIELDS = (
    *("action", "output", "outputs", "results", "tools", "arguments", "operation", "name"),
    *("content", "author"),
)


@given(
    st.sampled_from([*CALLS, *WHOLE_CALLS, *RESULTS, *WORDS, "item_of_tomorrow"]),
    st.dictionaries(st.sampled_from([*FIELDS, "status", "call_id", "id"]), JSON),
)
def test_item_of_any_shape_is_shown_or_refused(kind: str, fields: dict[str, Any]) -> None:
    item = {"call_id": "1", **fields, "type": kind}
    answer = [result("1")] if kind in CALLS else []
    with suppress(InvalidRequestError, ValidationError):
        messages(item, *answer)


def test_calls_that_clients_ran_are_calls_of_their_tools() -> None:
    ran = {"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 2}}
    slow = {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}}
    turns = messages(
        {"type": "shell_call", "call_id": "1", "action": {"commands": ["ls"], "timeout_ms": None}},
        {"type": "shell_call_output", "call_id": "1", "output": [ran, slow]},
        {"type": "apply_patch_call", "call_id": "2", "status": "completed",
         "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "2", "status": "failed", "output": "no a"},
        call("3", "find", namespace="crm"), result("3"),
        tools=[{"type": "function", "name": "crm__find"},
               {"type": "namespace", "name": "crm",
                "tools": [{"type": "function", "name": "find"}]}],
    )  # fmt: skip
    assert [(c.name, c.arguments) for turn in turns for c in turn.tool_calls] == [
        ("shell", '{"commands": ["ls"]}'),
        ("apply_patch", '{"type": "delete_file", "path": "a"}'),
        (Route("function", "find", "crm").distinct_name("crm__find"), "{}"),
    ]
    results = [turn.text for turn in turns if turn.role == "tool"]
    assert results == ["a\nb\n(exit code 2)\n(timed out)", "failed: no a", "ok"]


def test_calls_of_openais_tools_are_calls_with_their_results() -> None:
    turns = messages(
        {"type": "web_search_call", "action": {"type": "search", "query": "q"}},
        {"type": "mcp_call", "server_label": "s", "name": "n", "arguments": "{}", "output": "o"},
        {"type": "mcp_approval_response", "approval_request_id": "r", "approve": False},
        said("user", "u"),
    )
    assert [(c.name, c.arguments) for turn in turns for c in turn.tool_calls] == [
        ("web_search", '{"query": "q"}'), ("s__n", "{}"),
    ]  # fmt: skip
    assert [turn.text for turn in turns if turn.role != "assistant"] == [
        *("(The results were not kept.)", "o", "The user refused the call", "u"),
    ]


def test_calls_and_messages_between_agents_are_shown() -> None:
    texts = [{"type": "output_text", "text": "started"}, {"type": "output_text", "text": "scout"}]
    content = [
        {"type": "input_text", "text": "Found it."},
        {"type": "input_image", "image_url": "https://example.org/a.png"},
        {"type": "encrypted_content", "encrypted_content": "x"},
    ]
    turns = messages(
        {"type": "multi_agent_call", "call_id": "1", "action": "spawn_agent",
         "arguments": '{"task": "t"}', "agent": {"agent_name": "root"}},
        {"type": "multi_agent_call_output", "call_id": "1", "action": "spawn_agent",
         "output": texts},
        {"type": "agent_message", "author": "scout", "recipient": "root", "content": content},
    )  # fmt: skip
    shown = "Message of the agent scout to the agent root:\nFound it.\n(input_image)"
    assert turns == (
        Message("assistant", None, tool_calls=(ToolCall("1", "spawn_agent", '{"task": "t"}'),)),
        Message("tool", "started\nscout", "spawn_agent", tool_call_id="1"),
        Message("user", f"{shown}\n(encrypted_content)"),
    )


@pytest.mark.parametrize(
    ("context", "kept"), [("auto", ["Hm", "So"]), ("current_turn", [None, "So"])]
)
def test_reasoning_of_earlier_turns_may_be_left_out(context: str, kept: list[str | None]) -> None:
    def thought(text: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "summary": [], "content": content}

    body = ResponseRequest.model_validate(
        {
            "input": [
                *(said("user", "a"), thought("Hm"), said("assistant", "b"), said("user", "c")),
                *(thought("So"), call("x"), result("x")),
            ],
            "reasoning": {"context": context},
        }
    )
    items = [ContextItem(to_data(item), "input") for item in body.input or ()]
    request = to_generation_request(
        body, items, with_capabilities(SPEC), PROJECT, offer_tools((), (), project_id=PROJECT)
    )
    assert [m.reasoning for m in request.messages if m.role == "assistant"] == kept
