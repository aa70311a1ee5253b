"""Tokens and prompts: ``/v1/tokenize``, ``/v1/detokenize``, ``/v1/chat/render``."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.served_stack import ServedStack

CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of Japan?"},
    ],
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """The answer, which must be good."""
    response = http.post(path, json={"model": "demo", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("text", ["Hello, world!", "naïve 🦊 Łódź", " two  spaces\n", "x"])
def test_tokens_stand_for_the_text_they_were_made_of(http: httpx.Client, text: str) -> None:
    tokens = post(http, "/v1/tokenize", prompt=text)
    assert (tokens["object"], tokens["model"], tokens["max_model_len"]) == ("tokens", "demo", 2048)
    assert tokens["count"] == len(tokens["tokens"]) > 1
    back = post(http, "/v1/detokenize", tokens=tokens["tokens"])
    assert (back["object"], back["model"]) == ("text", "demo")
    assert back["prompt"].removeprefix("<s>") == text
    assert post(http, "/tokenize", prompt=text) == tokens  # As vLLM has them.
    assert post(http, "/detokenize", tokens=tokens["tokens"]) == back


def test_special_tokens_may_be_left_out_and_texts_told(http: httpx.Client) -> None:
    whole = post(http, "/v1/tokenize", prompt="Hello, 🦊", return_token_strs=True)
    assert len(whole["token_strs"]) == whole["count"]
    assert whole["token_strs"][0] == "<s>"
    assert "".join(whole["token_strs"][1:]).strip().startswith("Hello,")
    bare = post(http, "/v1/tokenize", prompt="Hello, 🦊", add_special_tokens=False)
    assert bare["tokens"] == whole["tokens"][1:]
    assert "token_strs" not in bare


def test_count_of_a_text_is_what_a_completion_counts(
    http: httpx.Client, client: openai.OpenAI
) -> None:
    text = "Once upon a time"
    usage = client.completions.create(model="demo", prompt=text, max_tokens=1).usage
    assert usage is not None
    assert post(http, "/v1/tokenize", prompt=text)["count"] == usage.prompt_tokens


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "logprobs": True},
        {"return_token_ids": True},
        {"response_prefix": "It is"},
        {"add_generation_prompt": False},
        {"enable_thinking": True},
        {"n": 2},
    ],
)
def test_count_of_a_chat_is_what_the_real_chat_counts(
    http: httpx.Client, client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    rendered = post(http, "/v1/chat/render", **CHAT, **fields)
    tokens = post(http, "/v1/tokenize", **CHAT, **fields)
    usage = client.chat.completions.create(**CHAT, max_tokens=2, extra_body=fields).usage
    assert usage is not None
    assert rendered["object"] == "chat.prompt"
    assert rendered["count"] == tokens["count"] == usage.prompt_tokens
    assert rendered["tokens"] == tokens["tokens"]


def test_prompt_is_what_the_template_makes_of_the_messages(http: httpx.Client) -> None:
    rendered = post(http, "/v1/chat/render", **CHAT)
    assert rendered["prompt"].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is" in rendered["prompt"]
    )
    prefixed = post(http, "/v1/chat/render", **CHAT, response_prefix="It is")["prompt"]
    assert prefixed.endswith("It is")
    bare = post(http, "/v1/chat/render", **CHAT, add_generation_prompt=False)["prompt"]
    assert bare.endswith("Japan?<|im_end|>\n")
    tools = post(http, "/v1/chat/render", **CHAT, tools=[TOOL])["prompt"]
    assert '"name": "look"' in tools
    hidden = post(http, "/v1/chat/render", **CHAT, tools=[TOOL], tool_choice="none")["prompt"]
    assert hidden == rendered["prompt"]


@pytest.mark.parametrize("model", ["told", "old"])
def test_request_may_name_another_template(
    http: httpx.Client, client: openai.OpenAI, model: str
) -> None:
    asked: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Who?"}]}

    def prompt(name: str) -> str:
        return str(post(http, "/v1/chat/render", **asked, prompt_template=name)["prompt"])

    assert prompt("bare") == "Q: Who? A:"
    assert prompt("llama3").rstrip().endswith("<|start_header_id|>assistant<|end_header_id|>")
    assert prompt("zephyr") != prompt("chatml")
    answers = [
        client.chat.completions.create(
            **asked, max_tokens=8, temperature=0, extra_body={"prompt_template": name}
        )
        for name in ("bare", "chatml")
    ]
    assert [answer.usage.prompt_tokens for answer in answers if answer.usage] == [
        post(http, "/v1/chat/render", **asked, prompt_template=name)["count"]
        for name in ("bare", "chatml")
    ]
    with pytest.raises(openai.BadRequestError, match="'ghost'; there are bare, chatml") as caught:
        client.chat.completions.create(**asked, extra_body={"prompt_template": "ghost"})
    assert caught.value.param == "prompt_template"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="scripted", messages=asked["messages"], extra_body={"prompt_template": "chatml"}
        )
    assert (caught.value.param, caught.value.code) == ("prompt_template", "unsupported_parameter")


def test_prompt_begins_with_one_token_of_beginning(http: httpx.Client) -> None:
    tokens = post(http, "/v1/chat/render", **CHAT)["tokens"]
    assert tokens.count(1) == 1
    assert tokens[0] == 1


def test_row_is_of_its_own_kind_and_has_generated_nothing(
    http: httpx.Client, stack: ServedStack
) -> None:
    http.post(
        "/v1/tokenize", json={"model": "demo", "prompt": "x"}, headers={"x-request-id": "tok-row"}
    )
    [row] = stack.sql(
        "SELECT kind, status, output_tokens FROM generations_generation"
        " WHERE request_id = 'tok-row'"
    )
    assert row == ("tokens", "completed", 0)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/tokenize", {}, "prompt"),
        ("/v1/tokenize", {"prompt": 5}, "prompt"),
        ("/v1/tokenize", {"prompt": "x", "model": "scripted"}, "model"),
        ("/v1/tokenize", {"messages": []}, "messages"),
        ("/v1/detokenize", {"tokens": []}, "tokens"),
        ("/v1/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/v1/detokenize", {"tokens": [2**31]}, "tokens[0]"),
        ("/v1/detokenize", {"tokens": [5, 10_000_000]}, "tokens"),
        ("/v1/detokenize", {"tokens": "5"}, "tokens"),
        ("/v1/chat/render", {}, "messages"),
        ("/v1/chat/render", {**CHAT, "model": "demo-embedding"}, "model"),
        ("/v1/chat/render", {**CHAT, "model": "scripted"}, "model"),
    ],
)
def test_bad_request_is_400_and_names_the_parameter(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    response = http.post(path, json={"model": "demo", **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_models_say_what_may_be_asked_of_them(client: openai.OpenAI) -> None:
    models = {model.id: model.model_dump() for model in client.models.list()}
    assert models["demo-embedding"]["capabilities"] == ["dimensions", "embeddings", "tokens"]
    assert models["scripted"]["capabilities"] == ["chat", "completions", "tools"]
    demo, tuned = (set(models[name]["capabilities"]) for name in ("demo", "tuned"))
    assert {"chat", "completions", "tools", "grammar", "logprobs", "render", "tokens"} <= demo
    assert tuned - demo == {"lora", "suffix"}
    assert demo - tuned == set()
    assert models["tuned"]["lora_adapters"] == ["one", "two"]
    assert models["demo"]["lora_adapters"] == []
    assert models["demo-embedding"]["context_length"] == 256
