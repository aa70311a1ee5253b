"""Tokens of answers and prompts, as vLLM tells them: ids, log probabilities, the tokenizer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.served_stack import ServedStack

CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 80,
}
PROMPT: dict[str, Any] = {
    "model": "demo",
    "prompt": "The capital of France",
    "temperature": 0,
    "max_tokens": 4,
}
TWO_BYTES_AND_FOUR = 'root ::= "é😀é"'
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def ask(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, which must be good."""
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def chunks(http: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a stream that have choices."""
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {") and (chunk := json.loads(line[6:]))["choices"]:
                yield chunk


def text_of(http: httpx.Client, tokens: list[int]) -> str:
    """What tokens stand for."""
    return str(ask(http, "/detokenize", {"model": "demo", "tokens": tokens})["prompt"])


def test_ids_of_a_chat_are_all_tokens_that_are_counted(http: httpx.Client) -> None:
    thinking = {**CHAT, "enable_thinking": True}
    answer = ask(http, "/v1/chat/completions", {**thinking, "return_token_ids": True})
    rendered = ask(http, "/v1/chat/render", thinking)
    assert answer["prompt_token_ids"] == rendered["tokens"]
    [choice] = answer["choices"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    said = text_of(http, choice["token_ids"])
    assert choice["message"]["reasoning_content"] in said  # Thoughts have tokens, too,
    assert choice["message"]["content"] in said
    assert said.rstrip().endswith(">")  # and the end has one.
    plain = ask(http, "/v1/chat/completions", thinking)
    assert plain["choices"][0]["message"] == choice["message"]
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 1}])
def test_thoughts_of_a_chat_with_ids_are_counted_and_have_no_log_probabilities(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    thinking = {**CHAT, **fields, "enable_thinking": True}
    answer = ask(http, "/v1/chat/completions", {**thinking, "return_token_ids": True})
    plain = ask(http, "/v1/chat/completions", thinking)
    details = [one["usage"]["completion_tokens_details"] for one in (answer, plain)]
    assert details[0]["reasoning_tokens"] == details[1]["reasoning_tokens"] > 0
    [choice], [other] = answer["choices"], plain["choices"]
    assert (choice["logprobs"] is None) == (other["logprobs"] is None) == (not fields)
    if fields:
        said = [[entry["token"] for entry in one["logprobs"]["content"]] for one in (choice, other)]
        assert said[0] == said[1]
        assert "".join(said[0]) == choice["message"]["content"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_has_the_same_ids(http: httpx.Client, path: str) -> None:
    body = {**(CHAT if "chat" in path else PROMPT), "return_token_ids": True}
    whole, [first, *others] = ask(http, path, body), list(chunks(http, path, body))
    ids = [c["choices"][0].get("token_ids") or [] for c in (first, *others)]
    assert [*itertools.chain(*ids)] == whole["choices"][0]["token_ids"]
    prompts = [found for c in (first, *others) if (found := _prompt_ids(c)) is not None]
    assert prompts == [_prompt_ids(whole)]
    assert prompts[0]
    assert _prompt_ids(first) == prompts[0]


def _prompt_ids(answer: dict[str, Any]) -> Any:
    return answer.get("prompt_token_ids") or answer["choices"][0].get("prompt_token_ids")


def test_tokens_that_are_parts_of_characters_are_named(http: httpx.Client) -> None:
    body = {"model": "demo", "prompt": "a", "max_tokens": 20, "grammar": TWO_BYTES_AND_FOUR}
    answer = ask(http, "/v1/completions", {**body, "return_token_ids": True})
    [choice] = answer["choices"]
    assert choice["text"] == "é😀é"
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] > 3
    assert text_of(http, choice["token_ids"]).startswith("é😀é")


def test_a_call_has_tokens(http: httpx.Client) -> None:
    body = {**CHAT, "tools": [LOOK], "tool_choice": "required", "return_token_ids": True}
    [choice] = ask(http, "/v1/chat/completions", body)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert '"look"' in text_of(http, choice["token_ids"])


def test_tokens_may_be_named_by_their_ids(http: httpx.Client) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    [choice] = ask(http, "/v1/chat/completions", body)["choices"]
    entries = choice["logprobs"]["content"]
    ids = [int(entry["token"].removeprefix("token_id:")) for entry in entries]
    assert text_of(http, ids) == choice["message"]["content"]
    assert all(o["token"].startswith("token_id:") for e in entries for o in e["top_logprobs"])
    text = {**PROMPT, "logprobs": 1, "echo": True, "return_tokens_as_token_ids": True}
    told = ask(http, "/v1/completions", text)["choices"][0]["logprobs"]
    tokens = ask(http, "/tokenize", {"model": "demo", "prompt": PROMPT["prompt"]})["tokens"]
    assert told["tokens"][: len(tokens)] == [f"token_id:{token}" for token in tokens]
    assert all(name.startswith("token_id:") for top in told["top_logprobs"][1:] for name in top)


def test_log_probabilities_of_a_chats_prompt(http: httpx.Client) -> None:
    answer = ask(http, "/v1/chat/completions", {**CHAT, "prompt_logprobs": 2})
    rendered = ask(http, "/v1/chat/render", CHAT)
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert len(others) == len(rendered["tokens"]) - 1
    echoed = {**PROMPT, "prompt": rendered["tokens"], "echo": True, "logprobs": 2, "max_tokens": 0}
    told = ask(http, "/v1/completions", echoed)["choices"][0]["logprobs"]
    for token, entry, known in zip(
        rendered["tokens"][1:], others, told["token_logprobs"][1:], strict=True
    ):
        assert entry[str(token)]["logprob"] == pytest.approx(known, abs=1e-3)
        assert {1, 2} <= {one["rank"] for one in entry.values()}
        best = max(entry.values(), key=lambda one: one["logprob"])
        assert best["rank"] == 1
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    [choice] = ask(http, "/v1/completions", {**PROMPT, "prompt_logprobs": 0})["choices"]
    tokens = ask(http, "/tokenize", {"model": "demo", "prompt": PROMPT["prompt"]})["tokens"]
    assert [[*entry] for entry in choice["prompt_logprobs"][1:]] == [[str(t)] for t in tokens[1:]]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("chat/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("chat/completions", {"return_token_ids": True, "n": 2}, "return_token_ids"),
        ("chat/completions", {"return_token_ids": True, "reasoning_budget": 2}, "return_token_ids"),
        ("completions", {"return_token_ids": True, "prompt": ["a", "b"]}, "return_token_ids"),
        (
            "completions",
            {"return_token_ids": True, "n": 2, "echo": True, "logprobs": 1, "stream": True},
            "return_token_ids",
        ),
        ("chat/completions", {"logprob_token_ids": [5], "logprobs": True}, "logprob_token_ids"),
        ("chat/completions", {"logprob_token_ids": [], "logprobs": True}, "logprob_token_ids"),
    ],
)
def test_what_cannot_be_told_is_refused(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    body = {**(CHAT if "chat" in path else PROMPT), **fields}
    refused = http.post(f"/v1/{path}", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_an_engine_that_names_no_tokens_refuses(other_stack: ServedStack) -> None:
    for field in ("return_token_ids", "return_tokens_as_token_ids"):
        with other_stack.http() as http:
            refused = http.post("/v1/chat/completions", json={**CHAT, "model": "old", field: True})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "unsupported_parameter")
        assert error["param"] == field


def test_a_stored_chat_keeps_its_ids(http: httpx.Client, client: openai.OpenAI) -> None:
    sent = list(
        chunks(http, "/v1/chat/completions", {**CHAT, "store": True, "return_token_ids": True})
    )
    stored = http.get(f"/v1/chat/completions/{sent[0]['id']}").json()
    assert stored["prompt_token_ids"] == sent[0]["prompt_token_ids"]
    assert stored["choices"][0]["token_ids"]
    client.chat.completions.delete(sent[0]["id"])


def test_what_the_file_says_of_the_tokenizer(http: httpx.Client) -> None:
    for path in ("/tokenizer_info", "/v1/tokenizer_info"):
        told = http.get(path, params={"model": "demo"}).json()
        assert told["bos_token"] == "<s>"
        assert told["eos_token"]
        assert told["tokenizer_class"].endswith("TokenizerFast")
        assert told["model_max_length"] == 2048
        assert "messages" in told["chat_template"]
    assert http.get("/tokenizer_info", params={"model": "none"}).status_code == 404
    nameless = http.get("/tokenizer_info")
    assert nameless.status_code in (200, 400)
    assert "tokenizer_class" in nameless.json() or nameless.json()["error"]["param"] == "model"


def test_a_model_of_another_server_has_no_file_to_tell_of(other_stack: ServedStack) -> None:
    with other_stack.http() as http:
        refused = http.get("/tokenizer_info", params={"model": "remote"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_model")
