"""Texts, chats and conversations that are too long: refused, or cut, before a worker has them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.e2e.keys import MadeKey, make_key
from tests.hostile.test_clients import bystander, post, raw
from tests.served_stack import ServedStack, wait_until

ACCENTS = "e" + "\u0301" * 300_000
"""Of characters that the demo's vocabulary does not have: 600 KB, 600,001 tokens. To tokenize it in
one call takes seconds."""
FEWER = "e" + "\u0301" * 30_000
"""60 KB, which only a tokenizer knows not to fit."""
USER = [{"role": "user", "content": ACCENTS}]
TOOL = {"type": "function", "function": {"name": "f", "description": ACCENTS, "parameters": {}}}
DOORS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": USER}, "messages"),
    ("/v1/chat/completions", {"messages": USER, "stream": True}, "messages"),
    ("/v1/chat/completions", {"messages": "Hi", "tools": [TOOL]}, "tools"),
    ("/v1/chat/render", {"messages": USER}, "messages"),
    ("/v1/completions", {"prompt": ACCENTS}, "prompt"),
    ("/v1/completions", {"prompt": ["Hi", ACCENTS]}, "prompt"),
    ("/v1/completions", {"prompt": [1] * 3_000}, "prompt"),
    ("/v1/embeddings", {"model": "demo-embedding", "input": ["Hi", ACCENTS]}, "input"),
    ("/v1/tokenize", {"prompt": ACCENTS, "return_token_strs": True}, "prompt"),
    ("/v1/tokenize", {"messages": USER}, "messages"),
    ("/v1/detokenize", {"tokens": [1] * 70_000}, "tokens"),
    ("/v1/responses", {"input": ACCENTS}, "input"),
    ("/v1/responses", {"input": ACCENTS, "truncation": "auto"}, "input"),
    ("/v1/responses", {"input": [{"role": "user", "content": "x"}] * 2_048}, "input"),
    ("/v1/responses", {"input": ACCENTS, "background": True}, "input"),
    ("/v1/responses/input_tokens", {"input": ACCENTS}, "input"),
    ("/api/chat", {"messages": USER}, ""),
    ("/api/generate", {"prompt": ACCENTS}, ""),
    ("/api/generate", {"prompt": ACCENTS, "raw": True}, ""),
    ("/api/embed", {"model": "demo-embedding", "input": ACCENTS, "truncate": False}, ""),
]


@pytest.fixture(scope="module")
def key(stack: ServedStack) -> MadeKey:
    return make_key(stack, "inference", "debug")


@pytest.fixture(scope="module")
def own(stack: ServedStack, key: MadeKey) -> openai.OpenAI:
    return stack.client(key.secret)


def runs(stack: ServedStack, key: MadeKey) -> list[Any]:
    """The kind and the status of each generation of the key."""
    rows = "SELECT kind, status FROM generations_generation WHERE api_key_id = %s ORDER BY id"
    return stack.sql(rows, key.id)


@pytest.mark.parametrize(("path", "body", "param"), DOORS, ids=[path for path, _, _ in DOORS])
def test_a_text_that_cannot_fit_is_refused_before_it_is_queued(
    stack: ServedStack, key: MadeKey, path: str, body: dict[str, Any], param: str
) -> None:
    before = runs(stack, key)
    with key.http(stack) as http:
        answer = http.post(path, json={"model": "demo", **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if param:  # Ollama's errors are a text.
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        error = error["message"]
    assert "maximum context length is" in error
    assert runs(stack, key) == before


@pytest.mark.parametrize("model", ["demo", "old"])
def test_a_text_that_only_a_worker_can_count_is_refused_by_it(
    stack: ServedStack, key: MadeKey, own: openai.OpenAI, model: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        own.chat.completions.create(model=model, messages=[{"role": "user", "content": FEWER}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with key.http(stack) as http:
        counted = http.post("/v1/tokenize", json={"model": model, "prompt": FEWER})
        # More than the context, and less than the bound of what is only tokenized.
        assert counted.json()["count"] > 60_000
        pieces = {"model": model, "prompt": "Hi there", "return_token_strs": True}
        assert http.post("/v1/tokenize", json=pieces).json()["token_strs"]


def test_a_long_text_for_a_model_of_another_server_goes_there(own: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        own.completions.create(model="remote", prompt="word " * 40_000)
    assert caught.value.code == "context_length_exceeded"
    assert "estimated" not in str(caught.value)


def test_chats_whose_clients_have_left_keep_nobody_waiting(
    stack: ServedStack, key: MadeKey
) -> None:
    with bystander(stack, "demo"):
        for text in (ACCENTS, FEWER):
            body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": text}]})
            sent = [raw(stack, post(key.secret, len(body))) for _ in range(8)]
            for connection in sent:
                connection.sendall(body.encode())
            for connection in sent:
                connection.close()
    wait_until(
        lambda: {status for _, status in runs(stack, key)} <= {"completed", "cancelled", "failed"},
        60,
        "the end of what was sent",
    )


@pytest.fixture(scope="module")
def long_conversation(stack: ServedStack, key: MadeKey, own: openai.OpenAI) -> str:
    """The id of one of 30,000 items of a letter."""
    made = own.conversations.create(
        items=[{"type": "message", "role": "developer", "content": "Be brief."}]
    )
    stack.sql(
        "INSERT INTO responses_api_item (public_id, project_id, conversation_id, position,"
        " is_output, conversation_position, data)"
        " SELECT 'msg_' || n || %s, c.project_id, c.id, 0, false, n, jsonb_build_object("
        "   'type', 'message', 'status', 'completed', 'role', 'user', 'content',"
        "   jsonb_build_array(jsonb_build_object('type', 'input_text', 'text', 'x')))"
        " FROM responses_api_conversation c, generate_series(1, 30000) n WHERE c.public_id = %s",
        made.id,
        made.id,
    )
    stack.sql(
        "UPDATE responses_api_conversation SET next_position = 30001 WHERE public_id = %s", made.id
    )
    return made.id


def test_a_conversation_of_30_000_items_is_refused_unless_it_may_be_cut(
    stack: ServedStack, key: MadeKey, own: openai.OpenAI, long_conversation: str
) -> None:
    before = runs(stack, key)
    with pytest.raises(openai.BadRequestError) as caught:
        own.responses.create(model="demo", conversation=long_conversation, input="x")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.BadRequestError) as caught:
        own.responses.input_tokens.count(model="demo", conversation=long_conversation, input="x")
    assert caught.value.code == "context_length_exceeded"
    assert runs(stack, key) == before
    with bystander(stack, "demo"):
        cut = own.responses.create(
            model="demo",
            conversation=long_conversation,
            input="x",
            truncation="auto",
            max_output_tokens=4,
        )
    assert cut.usage is not None
    assert 500 < cut.usage.input_tokens < 2048
    assert len(own.conversations.items.list(long_conversation, limit=2).data) == 2


def test_a_response_to_a_chain_that_is_too_long_is_refused_unless_it_may_be_cut(
    key: MadeKey, stack: ServedStack
) -> None:
    letters = [{"role": "user", "content": "x"}] * 2_000
    body = {"model": "scripted", "input": letters, "truncation": "auto"}
    with key.http(stack) as http:

        def made(**fields: Any) -> dict[str, Any]:
            answer: dict[str, Any] = http.post("/v1/responses", json={**body, **fields}).json()
            return answer

        last = made()
        for _ in range(2):
            last = made(previous_response_id=last["id"])
        more = {"model": "demo", "previous_response_id": last["id"], "input": "x"}
        cut = made(**more, max_output_tokens=4)
        refused = made(**more, truncation="disabled")["error"]
    assert 500 < cut["usage"]["input_tokens"] < 2048
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "input")


def test_a_chat_of_2_040_messages_is_refused_unless_it_may_be_cut(
    key: MadeKey, stack: ServedStack
) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}] * 2_040}
    before = runs(stack, key)
    with key.http(stack) as http:
        refused = http.post("/v1/chat/completions", json=body).json()["error"]
        assert runs(stack, key) == before
        may_be_cut = {**body, "truncate_sequence": True, "max_tokens": 4}
        cut = http.post("/v1/chat/completions", json=may_be_cut).json()
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "messages")
    assert 500 < cut["usage"]["prompt_tokens"] < 2048
