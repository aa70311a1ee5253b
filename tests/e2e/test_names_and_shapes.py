"""Where clients of other servers stumble: names of models, ids, shapes of streams and errors."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest
from django.conf import settings

from inference_site.catalogue.catalogue import DEMO_FILE
from tests.e2e.scripts import events, frames, script, stream_raw
from tests.served_stack import ServedStack, wait_until

CHAT: dict[str, Any] = {
    "model": "scripted",
    "messages": [{"role": "user", "content": script({"text": "one"}, {"text": " two"})}],
}


@pytest.mark.parametrize(
    ("asked", "answers"),
    [
        (" demo ", "demo"),
        ("DEMO", "demo"),
        ("demo:latest", "demo"),
        ("own-story", "tuned"),
        ("Own-Story", "tuned"),
    ],
)
def test_models_are_found_by_their_names(client: openai.OpenAI, asked: str, answers: str) -> None:
    completion = client.chat.completions.create(
        model=asked, messages=[{"role": "user", "content": "Hello"}], max_tokens=3
    )
    assert completion.model == answers
    assert client.models.retrieve(answers).id == answers


def test_aliases_are_not_models_of_their_own(client: openai.OpenAI) -> None:
    assert "own-story" not in {model.id for model in client.models.list()}


def test_ids_are_random_and_never_the_same(client: openai.OpenAI) -> None:
    made = [client.chat.completions.create(**CHAT).id for _ in range(3)]
    assert len(set(made)) == 3
    assert all(re.fullmatch(r"chatcmpl-[0-9a-f]{32}", id_) for id_ in made)


def test_site_tells_its_release(http: httpx.Client) -> None:
    answer = http.get("/version")
    assert (answer.status_code, answer.json()) == (200, {"version": settings.VERSION})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ],
)
def test_spoken_answer_is_refused_and_a_written_one_is_not(
    client: openai.OpenAI, fields: Any, param: str
) -> None:
    asked: Any = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked, **fields)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")
    raw = client.chat.completions.with_raw_response
    assert "x-unsupported-params" not in raw.create(**asked, modalities=["text"]).headers


def test_every_chunk_is_whole_and_the_stream_ends_with_done(http: httpx.Client) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        raw = frames(response)
    assert raw[-1] == "data: [DONE]"
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in raw[:-1]]
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert (chunk["id"], chunk["model"]) == (chunks[0]["id"], "scripted")
        assert type(chunk["created"]) is int
    *deltas, finish, usage = chunks
    assert [c["choices"][0]["finish_reason"] for c in deltas] == [None] * len(deltas)
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert finish["choices"][0]["delta"] == {}
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 0
    assert {chunk["usage"] for chunk in chunks[:-1]} == {None}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/chat/completions", {"model": "demo", "messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"model": "demo"}, 400, "messages"),
        ("/v1/chat/completions", {**CHAT, "model": "nobody"}, 404, "model"),
        ("/v1/responses", {"model": "scripted", "input": "x", "n": 2}, 400, "n"),
        ("/v1/nowhere", {}, 404, None),
    ],
)
def test_every_refusal_is_the_envelope_with_its_four_keys(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_model_that_only_reads_takes_no_image(http: httpx.Client) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    message = {"role": "user", "content": [image]}
    response = http.post("/v1/chat/completions", json={"model": "demo", "messages": [message]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[0].image_url.url"
    assert response.json()["error"]["message"] == "The model demo reads no images."


def test_tool_of_an_unknown_type_is_echoed_and_named_and_not_offered(http: httpx.Client) -> None:
    tools = [{"type": "robot", "arms": 2}, {"type": "robot"}, {"type": "code_interpreter"}]
    answer = http.post("/v1/responses", json={"model": "demo", "input": "Hi", "tools": tools})
    assert answer.json()["tools"] == tools
    assert answer.headers["x-unsupported-params"] == "tools[].robot,tools.code_interpreter"
    body = {"model": "demo", "input": "Hi", "tools": tools, "tool_choice": {"type": "robot"}}
    assert http.post("/v1/responses", json=body).json()["error"]["param"] == "tool_choice.type"
    body = {"model": "demo", "input": "Hi", "tools": [{"type": "a robot"}]}
    assert http.post("/v1/responses", json=body).json()["error"]["param"] == "tools[0].type"


def test_fault_of_a_schema_is_told_without_the_engine_s_template(http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "ghost"}}}
    body = {"model": "demo", "messages": "Hi", "tools": [tool]}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "tools[0].function.parameters"
    assert error["message"].startswith("Invalid schema: ")
    assert "template" not in error["message"]


def test_without_a_limit_the_context_is_the_limit(client: openai.OpenAI) -> None:
    context: Any = client.models.retrieve("demo").to_dict()["context_length"]
    almost_full: Any = [{"role": "user", "content": "story " * (context - 60)}]
    completion = client.chat.completions.create(
        model="demo",
        messages=almost_full,
        extra_body={"ignore_eos": True},
    )
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert completion.usage.total_tokens == context


def test_response_has_whole_seconds_statuses_and_its_usage_last(http: httpx.Client) -> None:
    last = events(stream_raw(http, input=script({"text": "one"})))[-1]
    assert last["type"] == "response.completed"
    shown = last["response"]
    assert type(shown["created_at"]) is int
    assert shown["usage"]["output_tokens"] > 0
    (item,) = shown["output"]
    assert item["status"] == "completed"
    assert (item["content"][0]["annotations"], item["content"][0]["logprobs"]) == ([], [])


def test_file_beside_the_models_file_is_served_without_a_restart(
    client: openai.OpenAI, stack: ServedStack
) -> None:
    part = stack.data_dir / "models" / "dropped.part"
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(DEMO_FILE.read_bytes())
    part.rename(part.with_name("Dropped.gguf"))

    def is_loaded() -> bool:
        listed = {model.id: model.model_dump() for model in client.models.list()}
        return "dropped" in listed and listed["dropped"]["status"] == "loaded"

    wait_until(is_loaded, 300, "the file is served")
    completion = client.completions.create(model="dropped", prompt="Once", max_tokens=5)
    assert completion.usage is not None
    assert completion.usage.completion_tokens > 0


def test_unknown_field_of_a_kept_object_is_named(http: httpx.Client) -> None:
    odd: dict[str, Any] = {"metadata": {"of": "names"}, "odd": 1}
    made = http.post("/v1/conversations", json=odd)
    path = f"/v1/conversations/{made.json()['id']}"
    item = {"type": "message", "role": "user", "content": "Hi"}
    store = http.post("/v1/vector_stores", json=odd)
    for answer in (
        made,
        http.post(path, json=odd),
        http.post(f"{path}/items", json={"items": [item], "odd": 1}),
        store,
        http.post(f"/v1/vector_stores/{store.json()['id']}", json=odd),
    ):
        assert (answer.status_code, answer.headers["x-unsupported-params"]) == (200, "odd")
    assert "x-unsupported-params" not in http.post(path, json={"metadata": {}}).headers
    http.delete(path)
    http.delete(f"/v1/vector_stores/{store.json()['id']}")
