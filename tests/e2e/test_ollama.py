"""Ollama's API, through Ollama's own client."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import ollama
import pytest

from tests.e2e.keys import make_key
from tests.images import encoded
from tests.served_stack import ServedStack
from tests.upstream_server import Talk, UpstreamServer, chunks, delta, finish, streamed, usage

GREEDY = {"temperature": 0, "num_predict": 60, "num_ctx": 2048}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
OSLO: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]


def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return city


@contextmanager
def ollama_client(stack: ServedStack, key: str) -> Iterator[ollama.Client]:
    """Ollama's client with this key."""
    opened = ollama.Client(stack.url, headers={"Authorization": f"Bearer {key}"})
    yield opened
    opened._client.close()


@pytest.fixture
def client(stack: ServedStack) -> Iterator[ollama.Client]:
    """The official client."""
    with ollama_client(stack, stack.key) as opened:
        yield opened


def test_chat_is_answered_and_streamed(client: ollama.Client) -> None:
    asked: dict[str, Any] = {"model": "demo:latest", "messages": HELLO, "options": GREEDY}
    whole = client.chat(**asked, keep_alive="5m")
    assert whole.message.role == "assistant"
    assert whole.message.content
    assert (whole.model, whole.done, whole.done_reason) == ("demo:latest", True, "stop")
    assert whole.eval_count
    assert whole.prompt_eval_count
    assert whole.total_duration
    parts = list(client.chat(**asked, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count
    with_logprobs = {**asked, "logprobs": True, "top_logprobs": 2}
    told = client.chat(**with_logprobs).logprobs or []
    assert "".join(one.token for one in told) == whole.message.content
    assert all(len(one.top_logprobs or ()) == 2 for one in told)
    streamed_ = client.chat(**with_logprobs, stream=True)
    assert [one for part in streamed_ for one in part.logprobs or ()] == told
    short = client.chat(**{**asked, "options": {**GREEDY, "num_predict": 2}})
    assert (short.done_reason, short.eval_count) == ("length", 2)
    stops = [*(f"no {n}" for n in range(6)), whole.message.content]
    stopped = client.chat(**{**asked, "options": {**GREEDY, "stop": stops}})
    assert not stopped.message.content
    text = client.chat(**asked, think=False).message.content or ""
    begun = [*HELLO, {"role": "assistant", "content": text[:5]}]
    assert client.chat(**{**asked, "messages": begun}).message.content == text[5:]


def test_tools_are_called_and_their_results_read(client: ollama.Client) -> None:
    asked: dict[str, Any] = {"model": "demo", "tools": [get_weather], "options": GREEDY}
    first = client.chat(messages=OSLO, **asked)
    [call] = list(first.message.tool_calls or [])
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Oslo"})
    parts = list(client.chat(messages=OSLO, stream=True, **asked))
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert calls == [call]
    result = {"role": "tool", "tool_name": "get_weather", "content": '{"weather": "sunny"}'}
    second = client.chat(messages=[*OSLO, first.message, result], **asked)
    assert second.message.content
    assert not second.message.tool_calls
    for messages in ([*OSLO, result], [*OSLO, first.message, *OSLO]):
        assert client.chat(messages=messages, **asked).message


def test_results_name_their_calls_by_id(stack: ServedStack, odd: UpstreamServer) -> None:
    made = [
        {"index": n, "id": f"call_{n}", "function": {"name": "get_weather", "arguments": told}}
        for n, told in enumerate(('{"city": "Oslo"}', '{"city": "Bergen"}'))
    ]
    odd.answers = [chunks(delta({"tool_calls": made}), finish("tool_calls"), usage())]
    asked: dict[str, Any] = {"model": "odd", "stream": False, "messages": OSLO}
    headers = {"Authorization": f"Bearer {stack.key}"}
    url = f"{stack.url}/api/chat"
    message = httpx.post(url, json=asked, headers=headers, timeout=60).json()["message"]
    assert message["tool_calls"] == [
        {
            "id": "call_0",
            "function": {"index": 0, "name": "get_weather", "arguments": {"city": "Oslo"}},
        },
        {
            "id": "call_1",
            "function": {"index": 1, "name": "get_weather", "arguments": {"city": "Bergen"}},
        },
    ]
    results = [
        {"role": "tool", "tool_call_id": "call_1", "content": "rainy"},
        {"role": "tool", "tool_call_id": "call_0", "content": "sunny"},
    ]
    odd.answers = [streamed("Sunny", " and rainy")]
    asked["messages"] = [*OSLO, message, *results]
    assert httpx.post(url, json=asked, headers=headers, timeout=60).status_code == 200
    answered = [(m["tool_call_id"], m["content"]) for m in odd.body["messages"][2:]]
    assert answered == [("call_0", "sunny"), ("call_1", "rainy")]


def test_images_reach_a_model_that_sees(client: ollama.Client, odd: UpstreamServer) -> None:
    shown = encoded("PNG")
    asked: Any = {"role": "user", "content": "What is this?", "images": [shown]}
    odd.answers = [streamed("A red", " square")]
    answer = client.chat("seeing", [asked, {**asked, "images": [shown, encoded("JPEG")]}])
    assert answer.message.content == "A red square"
    first, second = odd.body["messages"]
    assert first["content"][0] == {"type": "text", "text": "What is this?"}
    [part] = first["content"][1:]
    kind, _, sent = part["image_url"]["url"].partition(";base64,")
    assert (kind, base64.b64decode(sent)) == ("data:image/png", shown)
    assert len(second["content"]) == 3
    assert client.generate("seeing", "Look", images=[shown]).response == "A red square"
    with pytest.raises(ollama.ResponseError, match="The model demo reads no images") as caught:
        client.chat("demo", [asked])
    assert caught.value.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_sent_twice_with_one_key_runs_once(stack: ServedStack, stream: bool) -> None:
    key = make_key(stack)
    options = {**GREEDY, "temperature": 1.5}
    for path, asked in (
        ("/api/chat", {"messages": HELLO}),
        ("/api/generate", {"prompt": "Hello"}),
    ):
        body = {"model": "demo", "stream": stream, "options": options, **asked}
        headers = {"Idempotency-Key": f"{path}-{stream}"}
        with key.http(stack) as http:
            first, again = (http.post(path, json=body, headers=headers) for _ in range(2))
            other = http.post(path, json={**body, "think": False}, headers=headers)
        assert (first.status_code, first.content) == (200, again.content)
        assert first.headers["content-type"] == again.headers["content-type"]
        assert (other.status_code, list(other.json())) == (400, ["error"])
    rows = stack.sql("SELECT 1 FROM generations_generation WHERE api_key_id = %s", key.id)
    assert len(rows) == 2


def test_format_and_thinking_are_as_asked(client: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    bound = client.chat("demo", HELLO, format=schema, options=GREEDY)
    assert json.loads(bound.message.content or "")["colour"] in ("red", "green")
    made = client.generate("demo", "Hello", format="json", options={**GREEDY, "num_predict": 200})
    assert (made.response or "").startswith("{")
    thought = client.chat("demo", OSLO, think=True, options={**GREEDY, "num_predict": 300})
    assert thought.message.thinking
    assert not client.chat("demo", OSLO, think=False, options=GREEDY).message.thinking


def test_prompts_are_answered_or_continued(client: ollama.Client) -> None:
    answered = client.generate("demo", "Hello", system="Be brief.", options=GREEDY)
    assert answered.response
    assert answered.done
    parts = list(client.generate("demo", "Hello", system="Be brief.", options=GREEDY, stream=True))
    assert "".join(part.response or "" for part in parts) == answered.response
    raw = client.generate("demo", "The capital of France is", raw=True, options=GREEDY)
    assert (raw.response or "").startswith(" Paris")
    assert client.generate("demo", "").done_reason == "load"
    assert client.generate("demo", keep_alive=0).done_reason == "unload"
    assert client.chat("demo", keep_alive="0s").done_reason == "unload"
    filled = client.generate("tuned", "Once", suffix="the end.", options=GREEDY)
    assert filled.eval_count
    for fields, name in (
        ({"raw": True, "images": [encoded("PNG")]}, "images"),
        ({"suffix": "the end.", "images": [encoded("PNG")]}, "images"),
        ({"raw": True, "system": "Be kind"}, "system"),
    ):
        with pytest.raises(ollama.ResponseError, match=f"Invalid '{name}'") as caught:
            client.generate("tuned", "Once", **fields)
        assert caught.value.status_code == 400


@pytest.mark.parametrize("options", [{"num_predict": 8000}, {}])
def test_what_a_server_has_left_bounds_num_predict(
    client: ollama.Client, odd: UpstreamServer, options: dict[str, int]
) -> None:
    said = (
        "'max_tokens' or 'max_completion_tokens' is too large: 8000. This model's maximum context "
        "length is 4096 tokens and your request has 96 input tokens (8000 > 4096 - 96)."
    )

    def refuse(talk: Talk) -> None:
        talk.say(400, {"error": {"message": said, "type": "BadRequestError", "param": None}})

    choice = {"index": 0, "text": "Fits", "finish_reason": "stop"}
    fits = chunks({"object": "text_completion", "choices": [choice]}, usage())
    odd.answers, before = [refuse, fits], len(odd.asked)
    assert client.generate("odd", "Hello", raw=True, options=options).response == "Fits"
    most = options.get("num_predict", 2**31 - 1)
    assert [one.body.get("max_tokens") for one in odd.asked[before:]] == [most, 4000]
    if options:
        odd.answers = [refuse, streamed("Fits")]
        assert client.chat("odd", HELLO, options=options).message.content == "Fits"


def test_ignored_options_have_the_names_of_ollama(stack: ServedStack, odd: UpstreamServer) -> None:
    odd.answers = [streamed("Fits")]
    options = {"repeat_penalty": 1.1, "typical_p": 0.5}
    asked = {"model": "odd", "stream": False, "messages": HELLO, "options": options}
    headers = {"Authorization": f"Bearer {stack.key}"}
    answer = httpx.post(f"{stack.url}/api/chat", json=asked, headers=headers, timeout=60)
    named = answer.headers["x-unsupported-params"].split(",")
    assert sorted(named) == ["options.repeat_penalty", "options.typical_p"]
    # Ollama refuses to make a model think that cannot, and not to keep one from it.
    asked = {"model": "odd", "stream": False, "think": False}
    for path, said in (("/api/chat", {"messages": HELLO}), ("/api/generate", {"prompt": "a"})):
        answer = httpx.post(f"{stack.url}{path}", json={**asked, **said}, headers=headers)
        assert (answer.status_code, answer.headers["x-unsupported-params"]) == (200, "think")
        refused = httpx.post(
            f"{stack.url}{path}", json={**asked, **said, "think": True}, headers=headers
        )
        assert (refused.status_code, "'think'" in refused.json()["error"]) == (400, True)


def test_texts_are_embedded(client: ollama.Client) -> None:
    found = client.embed("demo-embedding", ["a word", "another"])
    assert [len(vector) for vector in found.embeddings] == [192, 192]
    assert found.prompt_eval_count
    assert len(client.embed("demo-embedding", "a word", dimensions=64).embeddings[0]) == 64
    single = client.embeddings("demo-embedding", "a word").embedding
    assert single == pytest.approx(found.embeddings[0], abs=1e-3)
    assert client.embed("demo-embedding", "").embeddings == []  # It only loads the model.
    assert client.embeddings("demo-embedding", "").embedding == []


def test_text_to_embed_is_cut_to_the_context(client: ollama.Client) -> None:
    words = "a story of the sea " * 100
    found = client.embed("demo-embedding", ["a word", words, f"{words} and more" * 50])
    assert found.embeddings[1] == pytest.approx(found.embeddings[2], abs=1e-3)
    assert (found.prompt_eval_count or 0) > 2 * 256
    with pytest.raises(ollama.ResponseError, match="maximum context length is 256"):
        client.embed("demo-embedding", words, truncate=False)


def test_models_are_listed_and_described(client: ollama.Client, http: httpx.Client) -> None:
    names = [model.model for model in client.list().models]
    assert {"demo", "demo-embedding", "scripted"} <= set(names)
    assert "demo" in [model.model for model in client.ps().models]
    shown = client.show("demo")
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities or ())
    assert shown.modelinfo
    assert "llama.context_length" in shown.modelinfo
    assert shown.details
    assert shown.details.quantization_level == "Q8_0"
    assert "<|im_start|>" in (shown.template or "")
    assert client.show("demo-embedding").capabilities == ["embedding"]
    assert http.get("/api/version").json()["version"]


def test_errors_have_the_form_of_ollama(
    client: ollama.Client, http: httpx.Client, stack: ServedStack
) -> None:
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError) as caught:
            list(client.chat("nothing", HELLO, stream=stream))
        assert caught.value.status_code == 404
        assert "nothing" in caught.value.error
    script: list[Any] = [{"role": "user", "content": '[{"fail": "broken"}]'}]
    with pytest.raises(ollama.ResponseError, match="broken") as caught:
        client.chat("scripted", script)
    assert caught.value.status_code == 500
    late: list[Any] = [{"role": "user", "content": '[{"text": "a "}, {"fail": "broken"}]'}]
    with pytest.raises(ollama.ResponseError, match="broken"):
        list(client.chat("scripted", late, stream=True))
    with ollama_client(stack, "sk-wrong") as other, pytest.raises(ollama.ResponseError) as caught:
        other.chat("demo", HELLO)
    assert caught.value.status_code == 401
    for path, body, status in [
        ("/api/chat", b"{", 400),
        ("/api/chat", b'{"model": "demo", "messages": [{"role": "model"}]}', 400),
        ("/api/generate", b'{"model": "demo", "prompt": "a", "options": {"top_p": 5}}', 400),
        ("/api/embed", b'{"model": "demo", "input": "a"}', 400),
        ("/api/pull", b'{"model": "demo"}', 403),
        ("/api/push", b"{}", 404),
        ("/api/create", b"{}", 404),
        ("/api/copy", b"{}", 404),
    ]:
        refused = http.post(path, content=body)
        assert refused.status_code == status, path
        assert list(refused.json()) == ["error"]
        assert isinstance(refused.json()["error"], str)
    assert http.get("/api/chat").json()["error"]
    for path, beginning in (("/api/chat", "messages"), ("/api/generate", "prompt")):
        # As Go's client writes what was not given.
        asked: dict[str, Any] = {"model": "demo", beginning: None, "options": None}
        assert http.post(path, json=asked).json()["done_reason"] == "load"
    options: dict[str, Any] = {"repeat_penalty": 0, "num_predict": 1e30, "stop": [""]}
    for option, value in options.items():
        asked = {"model": "demo", "prompt": "a", "options": {option: value}}
        refused = http.post("/api/generate", json=asked)
        assert refused.status_code == 400
        assert f"'options.{option}" in refused.json()["error"]


def test_what_is_asked_counts_in_the_limits_and_the_usage_of_the_key(stack: ServedStack) -> None:
    key = make_key(stack)
    with ollama_client(stack, key.secret) as other:
        other.chat("demo", HELLO, options=GREEDY)
    rows = stack.sql(
        "SELECT kind, status FROM generations_generation WHERE api_key_id = %s", key.id
    )
    assert rows == [("ollama", "completed")]
