"""Refusals of a model server, in each API."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.e2e.scripts import events, replay_raw, stream_raw, types
from tests.upstream_server import UpstreamServer, chunks, delta, finish, usage

HELLO: Any = [{"role": "user", "content": "Hello"}]
WROTE: dict[str, Any] = {"prompt_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 5}}


@pytest.fixture(autouse=True)
def refusing(odd: UpstreamServer) -> UpstreamServer:
    """The server of the model ``odd``, which refuses, and says what it wrote to its cache."""
    first = delta({"role": "assistant", "content": "", "refusal": None})
    pieces = [delta({"refusal": text}) for text in ("I can", "not.")]
    odd.answers = [chunks(first, *pieces, finish(), usage(10, **WROTE))]
    return odd


@pytest.mark.parametrize("stream", [False, True])
def test_chat_has_the_refusal_in_place_of_content(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "odd", "messages": HELLO, "store": True}
    if stream:
        sent = list(client.chat.completions.create(**asked, stream=True))
        assert "".join(c.choices[0].delta.refusal or "" for c in sent) == "I cannot."
        assert not any(c.choices[0].delta.content for c in sent)
        made = client.chat.completions.retrieve(sent[0].id)
    else:
        made = client.chat.completions.create(**asked)
    assert made.choices[0].message.refusal == "I cannot."
    assert made.choices[0].message.content is None
    assert made.choices[0].finish_reason == "stop"


def test_response_has_a_refusal_with_its_events(client: openai.OpenAI, http: httpx.Client) -> None:
    raw = stream_raw(http, model="odd", input="Hello")
    assert types(raw)[2:] == [
        "output_item.added",
        "content_part.added",
        *["refusal.delta"] * 2,
        "refusal.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    made = events(raw)[-1]["response"]
    assert made["output"][0]["content"] == [{"type": "refusal", "refusal": "I cannot."}]
    assert made["usage"]["input_tokens_details"] == {"cached_tokens": 2, "cache_write_tokens": 5}
    assert replay_raw(http, made["id"]) == raw
    with client.responses.stream(model="odd", input="Hello") as stream:
        whole: Any = stream.get_final_response()
    assert whole.output[0].content[0].refusal == "I cannot."
    assert whole.output_text == ""
    # The model is shown what it said.
    again = client.responses.create(model="odd", input="Why?", previous_response_id=made["id"])
    assert again.status == "completed"


def test_apis_without_refusals_have_it_as_text(
    http: httpx.Client, refusing: UpstreamServer
) -> None:
    body = {"model": "odd", "messages": HELLO, "max_tokens": 50, "stream": False}
    message = http.post("/v1/messages", json=body).json()
    assert message["content"][0]["text"] == "I cannot."
    read, written = (message["usage"][f"cache_{use}_input_tokens"] for use in ("read", "creation"))
    assert (message["usage"]["input_tokens"], read, written) == (3, 2, 5)
    chat = http.post("/api/chat", json=body).json()
    assert chat["message"]["content"] == "I cannot."
