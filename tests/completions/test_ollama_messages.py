"""What Ollama's messages become: those of a chat completion."""

from __future__ import annotations

from typing import Any

import pytest

from completions.ollama import wire
from completions.ollama.views import to_chat
from completions.wire.chat import DialectChat
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.payload import parse

TWO_CALLS = {
    "role": "assistant",
    "content": None,
    "thinking": "Two cities.",
    "tool_calls": [
        {"id": "call_b", "function": {"index": 0, "name": "f", "arguments": {"n": 1}}},
        {"id": "call_a", "function": {"index": 1, "name": "f", "arguments": {"n": 2}}},
    ],
}


def chat_of(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the chat completion for a request of ``POST /api/chat``."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}, *messages], **fields}
    return to_chat(parse(wire.ChatRequest, body))


@pytest.mark.parametrize("ids", [{}, {"tool_call_id": "made_up"}, {"tool_call_id": ""}])
def test_result_without_an_id_of_a_call_answers_the_first_open_call(ids: dict[str, Any]) -> None:
    results = [{"role": "tool", "tool_call_id": "call_b", "content": "one"}]
    *_, last = chat_of(TWO_CALLS, *results, {"role": "tool", "content": "two", **ids})["messages"]
    assert last["tool_call_id"] == "call_a"


def test_results_and_calls_need_not_belong_together() -> None:
    user = {"role": "user", "content": "y"}
    result = {"role": "tool", "content": "one"}
    named = {**result, "tool_name": "g"}
    _, made, *rest = chat_of(TWO_CALLS, result, user, named, result, TWO_CALLS)["messages"]
    assert [call["id"] for call in made["tool_calls"]] == ["call_b", "call_a"]
    assert rest[:2] == [
        {**result, "tool_call_id": "call_b"},
        {"role": "tool", "tool_call_id": "call_a", "content": ""},
    ]
    assert rest[3:5] == [
        {"role": "function", "content": "one", "name": "g"},
        {"role": "function", "content": "one", "name": "tool"},
    ]
    assert [one.get("tool_call_id") for one in rest[5:]] == [None, "call_b", "call_a"]
    parse(DialectChat, chat_of(TWO_CALLS, result, user, named))


def test_integers_among_the_options_may_be_written_as_decimals() -> None:
    made = chat_of(options={"num_ctx": 8192.0, "num_predict": 5.0, "top_k": 40.0})
    assert (made["max_tokens"], made["top_k"]) == (5, 40)
    with pytest.raises(InvalidRequestError, match=r"'options\.top_k': expected an integer"):
        chat_of(options={"top_k": 40.5})


def test_thoughts_of_earlier_answers_reach_the_template() -> None:
    _, made, *_ = chat_of(TWO_CALLS)["messages"]
    assert made["reasoning_content"] == "Two cities."


def test_fields_that_are_null_are_not_given() -> None:
    assert "response_format" not in chat_of(format=None)


@pytest.mark.parametrize("effort", ["low", "medium", "high", "max"])
def test_thinking_has_an_effort(effort: str) -> None:
    assert chat_of(think=effort)["reasoning_effort"] == effort
