"""A failure after some output tells what there was: in the error, streamed or not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import openai.types.chat as openai_chat
import pytest

from tests.served_stack import ServedStack

STEPS: list[dict[str, Any]] = [
    {"reasoning": "Hm"},
    {"text": "half "},
    {"text": "an"},
    {"sleep_ms": 50},
    {"fail": "boom"},
]


def script(*steps: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": json.dumps(steps)}]


def error_of(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The status and the error, from the answer or from the last event but ``[DONE]``."""
    response = http.post(path, json=body)
    if not body.get("stream") or response.status_code != 200:
        return response.status_code, response.json()["error"]
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return 200, json.loads(events[-2])["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_failed_chat_tells_what_it_had_answered(
    http: httpx.Client, stack: ServedStack, stream: bool
) -> None:
    body = {"model": "scripted", "messages": script(*STEPS), "stream": stream}
    status, error = error_of(http, "/v1/chat/completions", body)
    assert status == (200 if stream else 500)
    assert (error["code"], error["type"], error["param"]) == ("model_error", "server_error", None)
    partial = error["partial_response"]
    openai_chat.ChatCompletion.model_construct(**partial)
    [choice] = partial["choices"]
    assert choice["message"]["content"] == "half an"
    assert choice["message"]["reasoning_content"] == "Hm"
    assert choice["finish_reason"] is None
    assert partial["object"] == "chat.completion"
    row = stack.row(partial["id"])
    assert (row["status"], row["error_code"]) == ("failed", "model_error")
    assert row["output_tokens"] == partial["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_failed_completion_tells_what_it_had_answered(http: httpx.Client, stream: bool) -> None:
    prompt = json.dumps([step for step in STEPS if "reasoning" not in step])
    body = {"model": "scripted", "prompt": prompt, "stream": stream}
    _, error = error_of(http, "/v1/completions", body)
    assert error["partial_response"]["choices"][0]["text"] == "half an"
    assert error["partial_response"]["object"] == "text_completion"


@pytest.mark.parametrize("stream", [False, True])
def test_failure_without_output_has_no_partial_response(http: httpx.Client, stream: bool) -> None:
    body = {"model": "scripted", "messages": script({"fail": "boom"}), "stream": stream}
    status, error = error_of(http, "/v1/chat/completions", body)
    assert status == 500
    assert "partial_response" not in error


def test_official_client_raises_an_error_that_holds_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="scripted", messages=script(*STEPS))
    body: Any = caught.value.body
    assert body["partial_response"]["choices"][0]["message"]["content"] == "half an"
