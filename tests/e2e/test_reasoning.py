"""Reasoning: switched on and off, kept apart, counted."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of Japan?"}]


def message_of(client: openai.OpenAI, **fields: Any) -> tuple[str, str, Any]:
    """The reasoning, the answer, and the usage."""
    completion = client.chat.completions.create(
        model="demo", messages=CAPITAL, temperature=0, extra_body=fields
    )
    message = completion.choices[0].message
    reasoning = message.model_dump().get("reasoning_content") or ""
    return reasoning, message.content or "", completion.usage


@pytest.mark.parametrize(
    "switch",
    [
        {"enable_thinking": True},
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"template_vars": {"enable_thinking": True}},
    ],
)
def test_each_switch_turns_reasoning_on(client: openai.OpenAI, switch: dict[str, Any]) -> None:
    reasoning, text, usage = message_of(client, **switch)
    assert reasoning
    assert text
    assert "<think>" not in reasoning + text
    assert "</think>" not in reasoning + text
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


@pytest.mark.parametrize("switch", [{}, {"enable_thinking": False}, {"reasoning_effort": "none"}])
def test_it_is_off_by_the_models_record_and_by_each_switch(
    client: openai.OpenAI, switch: dict[str, Any]
) -> None:
    reasoning, text, usage = message_of(client, **switch)
    assert (reasoning, usage.completion_tokens_details.reasoning_tokens) == ("", 0)
    assert "Tokyo" in text


def test_budget_of_zero_ends_the_reasoning_at_once(client: openai.OpenAI) -> None:
    free, _, _ = message_of(client, enable_thinking=True)
    bounded, text, _ = message_of(client, enable_thinking=True, reasoning_budget=0)
    assert len(bounded) < len(free)
    assert text


def test_stream_gives_the_same_reasoning_and_answer(client: openai.OpenAI) -> None:
    whole = message_of(client, enable_thinking=True)
    reasoning = text = ""
    for chunk in client.chat.completions.create(
        model="demo",
        messages=CAPITAL,
        temperature=0,
        stream=True,
        extra_body={"enable_thinking": True},
    ):
        delta = chunk.choices[0].delta
        reasoning += delta.model_dump().get("reasoning_content") or ""
        text += delta.content or ""
    assert (reasoning, text) == whole[:2]


def test_reasoning_of_earlier_answers_has_two_names(http: httpx.Client) -> None:
    """That of this site and DeepSeek's API, and that of vLLM and OpenRouter."""
    prompts = []
    for thoughts in ({"reasoning_content": "Of Oslo."}, {"reasoning": "Of Oslo."}):
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        made = {"role": "assistant", "content": None, "tool_calls": [call], **thoughts}
        result = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
        asked = {"model": "demo", "messages": [*CAPITAL, made, result]}
        rendered = http.post("/v1/chat/render", json=asked)
        assert "x-unsupported-params" not in rendered.headers
        prompts.append(rendered.json()["prompt"])
    assert prompts[0] == prompts[1]
    assert "Of Oslo." in prompts[0]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_answer_alone(
    client: openai.OpenAI, stream: bool
) -> None:
    question: dict[str, Any] = {
        "model": "demo",
        "messages": CAPITAL,
        "temperature": 0,
        "logprobs": True,
        "stream": stream,
        "extra_body": {"enable_thinking": True},
    }
    answered = client.chat.completions.create(**question)
    choices = [chunk.choices[0] for chunk in answered] if stream else [answered.choices[0]]
    told = [choice.delta if stream else choice.message for choice in choices]
    assert any(part.model_dump().get("reasoning_content") for part in told)
    entries = [e for choice in choices if choice.logprobs for e in choice.logprobs.content or []]
    text = "".join(part.content or "" for part in told)
    assert bytes(b for entry in entries for b in entry.bytes or []).decode() == text
