"""Chat completions through the official client, on the real model and the real stack."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.served_stack import ServedStack


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def script(*steps: dict[str, Any]) -> list[Any]:
    """Messages that make the scripted model play these steps."""
    return ask(json.dumps(steps))


def test_answer_of_the_demo_model(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model="demo", messages=ask("What is the capital of Japan?"), temperature=0
    )
    choice = completion.choices[0]
    assert "Tokyo" in (choice.message.content or "")
    assert (choice.finish_reason, choice.message.role) == ("stop", "assistant")
    assert completion.id.startswith("chatcmpl-")
    assert completion.model == "demo"
    assert completion.usage is not None
    assert completion.usage.prompt_tokens > 5
    assert completion.usage.completion_tokens > 1
    total = completion.usage.prompt_tokens + completion.usage.completion_tokens
    assert completion.usage.total_tokens == total


def test_stream_adds_up_to_the_answer_without_a_stream(client: openai.OpenAI) -> None:
    question: dict[str, Any] = {
        "model": "demo",
        "messages": ask("Tell me a story."),
        "temperature": 0,
        "max_tokens": 60,
    }
    whole = client.chat.completions.create(**question)
    chunks = list(client.chat.completions.create(**question, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.content for chunk in chunks[1:-1])
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_usage_of_every_chunk_grows(client: openai.OpenAI, kind: str) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 6, "stream": True}
    if kind == "chat":
        messages: Any = [{"role": "user", "content": "Tell me a story."}]
        chunks = list(
            client.chat.completions.create(**asked, messages=messages, stream_options=options)
        )
    else:
        chunks = list(client.completions.create(**asked, prompt="Once", stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[-1], len(set(counts))) == (6, 6)
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1


def test_reading_of_a_long_prompt_is_told_when_asked(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": ask("word " * 1200),
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"return_progress": True, "cache_prompt": False},
    }
    chunks = [chunk.to_dict() for chunk in client.chat.completions.create(**asked)]
    told: list[Any] = [c["prompt_progress"] for c in chunks if "prompt_progress" in c]
    assert len(told) > 1
    assert [t["processed"] for t in told] == sorted(t["processed"] for t in told)
    assert all(t["total"] == chunks[-1]["usage"]["prompt_tokens"] for t in told)
    assert all(c["choices"] == [] for c in chunks if "prompt_progress" in c)
    plain = client.chat.completions.create(**{**asked, "extra_body": {}})
    assert all("prompt_progress" not in chunk.to_dict() for chunk in plain)


def test_usage_comes_last_and_only_when_asked(client: openai.OpenAI) -> None:
    question: dict[str, Any] = {"model": "demo", "messages": ask("Hello"), "stream": True}
    asked = list(client.chat.completions.create(**question, stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in asked[:-1]] == [None] * (len(asked) - 1)
    assert asked[-1].choices == []
    assert asked[-1].usage is not None
    assert asked[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in client.chat.completions.create(**question))


def test_repeated_prompt_is_cached(client: openai.OpenAI) -> None:
    text = "A prompt that is long enough to be worth keeping, and that nobody else sends. " * 5
    for _ in range(6):  # The engine picks the slot; a repetition finds the one with the prefix.
        usage = client.chat.completions.create(model="demo", messages=ask(text), max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert 0 < (usage.prompt_tokens_details.cached_tokens or 0) <= usage.prompt_tokens


@pytest.mark.parametrize(
    "limit",
    [
        {"max_tokens": 5},
        {"max_completion_tokens": 5},
        {"max_tokens": 9, "max_completion_tokens": 5},
    ],
)
def test_token_limit_ends_with_length(client: openai.OpenAI, limit: Any) -> None:
    completion = client.chat.completions.create(
        model="demo", messages=ask("Tell me a story."), **limit
    )
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 5


def test_stop_text_ends_the_answer_and_is_not_in_it(client: openai.OpenAI) -> None:
    question: dict[str, Any] = {"model": "demo", "messages": ask("Tell me a story."), "seed": 3}
    text = client.chat.completions.create(**question).choices[0].message.content or ""
    word = text.split()[5]
    stopped = client.chat.completions.create(**question, stop=[word]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == text.split(word)[0]


def test_same_seed_gives_the_same_answer(client: openai.OpenAI) -> None:
    def answer(seed: int) -> str | None:
        completion = client.chat.completions.create(
            model="demo", messages=ask("Tell me a story."), seed=seed, temperature=1.5, top_p=0.99
        )
        return completion.choices[0].message.content

    assert answer(7) == answer(7)
    assert len({answer(seed) for seed in range(4)}) > 1


def test_system_and_developer_messages_reach_the_model(client: openai.OpenAI) -> None:
    for role in ("system", "developer"):
        messages: list[Any] = [{"role": role, "content": "You are a pirate."}, *ask("Hello")]
        completion = client.chat.completions.create(model="demo", messages=messages, temperature=0)
        plain = client.chat.completions.create(model="demo", messages=ask("Hello"), temperature=0)
        assert completion.choices[0].message.content != plain.choices[0].message.content


def test_ignore_eos_goes_on_to_the_limit(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model="demo", messages=ask("Hello"), max_tokens=200, extra_body={"ignore_eos": True}
    )
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 200


def test_fields_not_honoured_are_named(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="demo",
        messages=ask("Hello"),
        max_tokens=2,
        web_search_options={},
        extra_body={"invented": 1},
    )
    named = raw.headers["x-unsupported-params"].split(",")
    assert sorted(named) == ["invented", "web_search_options"]


def test_two_streams_interleave(client: openai.OpenAI) -> None:
    times: dict[int, list[float]] = {1500: [], 30: []}
    has_begun = threading.Event()

    def read(tokens: int) -> None:
        stream = client.chat.completions.create(
            model="demo",
            messages=ask("Tell me a story."),
            stream=True,
            max_tokens=tokens,
            extra_body={"ignore_eos": True},
        )
        for _ in stream:
            times[tokens].append(time.monotonic())
            has_begun.set()

    long = threading.Thread(target=read, args=(1500,))
    long.start()
    assert has_begun.wait(60)
    read(30)
    long.join()
    assert len(times[30]) > 15
    assert times[30][0] < times[1500][-1]


def test_reasoning_is_kept_apart_from_the_answer(client: openai.OpenAI) -> None:
    messages = script({"reasoning": "Hm."}, {"text": "Yes"})
    message = client.chat.completions.create(model="scripted", messages=messages).choices[0].message
    assert message.content == "Yes"
    assert message.model_dump()["reasoning_content"] == "Hm."


def test_long_wait_is_bridged_by_comments(http: httpx.Client) -> None:
    body = {
        "model": "scripted",
        "stream": True,
        "messages": script({"sleep_ms": 3000}, {"text": "late"}),
    }
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-request-id"].startswith("req_")
        lines = list(response.iter_lines())
    first_event = next(i for i, line in enumerate(lines) if line.startswith("data:"))
    assert lines[:first_event].count(": ping") >= 2
    assert lines[-2] == "data: [DONE]"


def test_failure_before_the_first_byte_is_a_status(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(
                model="scripted", messages=script({"fail": "boom"}), stream=stream
            )
        assert caught.value.status_code == 500
        assert caught.value.code == "model_error"
        assert "boom" in str(caught.value)


def test_failure_after_the_first_byte_is_an_event(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    stream = client.chat.completions.create(
        model="scripted",
        messages=script({"text": "half"}, {"sleep_ms": 100}, {"fail": "boom"}),
        stream=True,
    )
    seen = [next(stream), next(stream)]
    with pytest.raises(openai.APIError, match="boom"):
        next(stream)
    assert "".join(c.choices[0].delta.content or "" for c in seen) == "half"
    row = stack.row(seen[0].id)
    assert (row["status"], row["error_code"]) == ("failed", "model_error")


def test_prompt_beyond_the_context_is_refused(client: openai.OpenAI) -> None:
    for model, stream in (("demo", False), ("demo", True), ("scripted", True)):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=model, messages=ask("word " * 6000), stream=stream)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "messages"


def test_prompt_beyond_any_context_is_refused_without_a_worker(
    stack: ServedStack, client: openai.OpenAI
) -> None:
    text = "a " * 2**20
    asks: list[Callable[[], Any]] = [
        lambda: client.chat.completions.create(model="demo", messages=ask(text), stream=True),
        lambda: client.completions.create(model="demo", prompt=text),
        lambda: client.responses.create(model="demo", input="Hi", instructions=text),
    ]
    before = stack.sql("SELECT count(*) FROM generations_generation")
    for send, param in zip(asks, ("messages", "prompt", "input"), strict=True):
        with pytest.raises(openai.BadRequestError, match=r"an estimated \d+ tokens") as caught:
            send()
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)
    assert stack.sql("SELECT count(*) FROM generations_generation") == before


def test_row_tells_what_happened(stack: ServedStack, client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(model="demo", messages=ask("Hello"))
    row = stack.row(completion.id)
    assert row["status"] == "completed"
    assert row["finish_reason"] == "stop"
    assert row["created_at"] <= row["claimed_at"] <= row["first_token_at"] <= row["finished_at"]
    assert 0 < row["admission_ms"] < 30_000
    assert completion.usage is not None
    assert row["input_tokens"] == completion.usage.prompt_tokens
    assert row["output_tokens"] == completion.usage.completion_tokens
