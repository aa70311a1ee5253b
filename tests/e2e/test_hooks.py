"""``ON_CHUNK`` and ``ON_DONE``: what they pass on is all there is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.served_stack import ServedStack


@pytest.fixture(autouse=True)
def _checked(other_stack: ServedStack) -> Iterator[None]:
    """Fail a test in which the product sent what does not fit its schema."""
    with other_stack.checked():
        yield


@pytest.fixture(scope="module")
def client(other_stack: ServedStack) -> openai.OpenAI:
    return other_stack.client()


def script(*steps: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": json.dumps(steps)}]


def ask(client: openai.OpenAI, *texts: str, stream: bool = False, **fields: Any) -> Any:
    messages = script(*({"text": text} for text in texts))
    return client.chat.completions.create(
        model="hooked", messages=messages, stream=stream, **fields
    )


def failing(client: openai.OpenAI, *texts: str, stream: bool) -> openai.APIError:
    """The error that these texts end in, with or without a stream."""
    with pytest.raises(openai.APIError) as caught:
        list(ask(client, *texts, stream=stream))
    return caught.value


@pytest.mark.parametrize("stream", [False, True])
def test_changed_chunk_is_what_is_sent_stored_and_noted(
    client: openai.OpenAI, hook_notes: Path, stream: bool
) -> None:
    answer = ask(client, "Hel", "drop", "lo", stream=stream, store=True)
    if stream:
        chunks = list(answer)
        completion_id = chunks[0].id
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        completion_id, text = answer.id, answer.choices[0].message.content
    stored = client.chat.completions.retrieve(completion_id)
    assert text == stored.choices[0].message.content == "HELLO"
    note = json.loads(hook_notes.read_text().splitlines()[-1])
    assert note == {
        "id": completion_id,
        "kind": "chat.completion",
        "model": "hooked",
        "texts": ["HEL", "LO"],
    }


def test_reasoning_goes_through_the_hook_too(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="hooked", messages=script({"reasoning": "hm"}, {"text": "yes"})
    )
    message = answer.choices[0].message.model_dump()
    assert (message["reasoning_content"], message["content"]) == ("HM", "YES")


def test_completions_go_through_the_hook_too(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="hooked", prompt="hello there")
    assert answer.choices[0].text == "HELLO THERE"


def test_responses_go_through_the_hook_too(client: openai.OpenAI, hook_notes: Path) -> None:
    answer = client.responses.create(model="hooked", input="hello there")
    assert answer.output_text == "HELLO THERE"
    assert client.responses.retrieve(answer.id).output_text == "HELLO THERE"
    note = json.loads(hook_notes.read_text().splitlines()[-1])
    assert (note["id"], note["kind"]) == (answer.id, "response")


def test_answer_of_which_all_was_dropped_is_empty(client: openai.OpenAI) -> None:
    choice = ask(client, "drop").choices[0]
    assert (choice.message.content, choice.finish_reason) == ("", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_dropped_call_leaves_nothing_behind(client: openai.OpenAI, stream: bool) -> None:
    tool: Any = {"type": "function", "function": {"name": "look"}}
    answer: Any = client.chat.completions.create(
        model="hooked-demo",
        messages=[{"role": "user", "content": "x"}],
        tools=[tool],
        tool_choice="required",
        max_tokens=40,
        stream=stream,
    )
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        assert not any(choice.delta.tool_calls for choice in choices)
        assert choices[-1].finish_reason in ("stop", "length")
    else:
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("texts", "logged"),
    [
        (["raise"], "on_chunk raised ValueError: a secret"),
        (["a", "raise"], "on_chunk raised ValueError: a secret"),
        (["nonsense"], "on_chunk returned str, which is no chunk"),
        (["a", "raise late"], "on_done raised ValueError: a secret"),
    ],
)
def test_hook_that_fails_fails_the_request_and_the_worker_lives_on(
    other_stack: ServedStack, client: openai.OpenAI, texts: list[str], logged: str, stream: bool
) -> None:
    worker = other_stack.pid_of("worker")
    error = failing(client, *texts, stream=stream)
    assert error.code == "hook_failed"
    assert "secret" not in str(error)
    if isinstance(error, openai.APIStatusError):
        assert error.status_code == 500
    [row] = other_stack.sql(
        "SELECT status, error_code, finish_reason FROM generations_generation"
        " ORDER BY id DESC LIMIT 1"
    )
    assert row == ("failed", "hook_failed", "")
    assert ask(client, "alive").choices[0].message.content == "ALIVE"
    assert other_stack.pid_of("worker") == worker
    assert logged in (other_stack.data_dir / "log" / "worker.log").read_text()


def test_hook_that_fails_in_the_callback_of_llama_cpp_fails_the_request(
    client: openai.OpenAI,
) -> None:
    for _ in range(5):  # More often than there are slots.
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(
                model="hooked-demo",
                messages=[{"role": "user", "content": "x"}],
                extra_body={"grammar": 'root ::= "9"'},
            )
        assert caught.value.code == "hook_failed"
    assert ask(client, "alive").choices[0].message.content == "ALIVE"
