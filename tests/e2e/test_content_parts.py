"""Parts of a message: texts, files, images and sounds, for a model that only reads."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import openai
import pytest


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def file(**fields: Any) -> dict[str, Any]:
    return {"type": "file", "file": fields}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def prompt_of(http: httpx.Client, *parts: dict[str, Any], role: str = "user") -> str:
    """What the model would read."""
    messages = [{"role": role, "content": list(parts)}, {"role": "user", "content": "x"}]
    response = http.post("/v1/chat/render", json={"model": "demo", "messages": messages})
    assert response.status_code == 200, response.text
    prompt: str = response.json()["prompt"]
    return prompt


def test_texts_of_any_role_are_joined_as_they_are(http: httpx.Client) -> None:
    for role in ("system", "developer", "user", "assistant"):
        prompt = prompt_of(http, text("What is "), text("the capital?"), role=role)
        assert "\nWhat is the capital?<|im_end|>" in prompt


def test_refusal_of_an_assistant_is_its_text(http: httpx.Client) -> None:
    prompt = prompt_of(http, {"type": "refusal", "refusal": "I will not."}, role="assistant")
    assert "assistant\nI will not.<|im_end|>" in prompt


@pytest.mark.parametrize("prefix", ["", "data:text/plain;base64,"])
def test_file_of_text_is_read_under_its_name(http: httpx.Client, prefix: str) -> None:
    data = prefix + encoded("Grüße".encode())
    assert "a.txt:\nGrüße\n" in prompt_of(
        http, text("Read: "), file(file_data=data, filename="a.txt")
    )
    assert "Read: Grüße<|im_end|>" in prompt_of(http, text("Read: "), file(file_data=data))


def test_file_reaches_the_model(client: openai.OpenAI) -> None:
    question = encoded(b"What is the capital of Japan?")
    messages: Any = [{"role": "user", "content": [file(file_data=question)]}]
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    assert "Tokyo" in (answer.choices[0].message.content or "")


PNG = encoded(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    ("part", "param", "code"),
    [
        (image(f"data:image/png;base64,{PNG}"), "image_url.url", "unsupported_parameter"),
        (image("https://example.org/a.png"), "image_url.url", "unsupported_parameter"),
        (file(file_data=f"data:image/png;base64,{PNG}"), "file.file_data", "unsupported_parameter"),
        (
            {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
            "input_audio",
            "unsupported_parameter",
        ),
        (file(file_data=PNG), "file.file_data", "unsupported_file"),
        (file(file_data="not base64!"), "file.file_data", "unsupported_file"),
        (file(file_data="data:application/pdf;base64,JVBERi0x\u00ff"), "file.file_data", None),
        (file(file_id="file-1"), "file.file_id", None),
        (file(filename="a.txt"), "file.file_data", "missing_required_parameter"),
        ({"type": "image_url"}, "image_url", "missing_required_parameter"),
        ({"type": "image_url", "image_url": {}}, "image_url.url", "missing_required_parameter"),
        ({"type": "text"}, "text", "missing_required_parameter"),
        ({"type": "video"}, "type", "invalid_value"),
    ],
)  # fmt: skip
def test_part_that_cannot_be_taken_is_400_and_named(
    client: openai.OpenAI, part: Any, param: str, code: str | None
) -> None:
    messages: Any = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [text("Look: "), part]},
    ]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=messages)
    assert caught.value.param == f"messages[1].content[1].{param}"
    assert caught.value.code == code


@pytest.mark.parametrize(
    "url", ["", "a.png", "file:///etc/passwd", "ftp://example.org/a.png", "http://[::1"]
)
def test_image_is_fetched_from_the_web_alone(client: openai.OpenAI, url: str) -> None:
    messages: Any = [{"role": "user", "content": [image(url)]}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="seeing", messages=messages)
    assert caught.value.param == "messages[0].content[0].image_url.url"
    assert caught.value.code == "invalid_image_url"


def test_image_in_the_result_of_a_tool_is_named_by_its_place(client: openai.OpenAI) -> None:
    """Results are put in the order of their calls; their places stay those of the request."""
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    seen = [text("x"), image("https://example.org/a.png")]
    messages: Any = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{**call, "id": "a"}, {**call, "id": "b"}]},
        {"role": "tool", "tool_call_id": "b", "content": "fine"},
        {"role": "tool", "tool_call_id": "a", "content": seen},
    ]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=messages)
    assert caught.value.param == "messages[3].content[1].image_url.url"
