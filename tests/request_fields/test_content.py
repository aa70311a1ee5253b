"""The content of a message: text, or parts when there is more than text in it."""

from __future__ import annotations

import base64
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from completions.wire.chat import ChatCompletionRequest
from completions.wire.messages import UserMessage
from inference_site.core.domain.messages import AudioPart, ImagePart, Message, Part, TextPart
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.payload import parse
from inference_site.gateway.request_fields.capabilities import require_media
from inference_site.gateway.request_fields.mapping import to_content
from inference_site.gateway.submission.model_access import with_capabilities

# The catalogue asks Redis for the models of run time, and the database for their adapters.
pytestmark = [pytest.mark.redis, pytest.mark.django_db]

BLIND = ModelSpec("demo", "llama_cpp")
SEEING = ModelSpec(
    "demo", "llama_cpp", options={"mmproj": "p.gguf", "modalities": ["vision", "audio"]}
)
URL = "https://example.org/a.png"


def content_of(content: Any, spec: ModelSpec = SEEING) -> tuple[str | None, tuple[Part, ...]]:
    body = {"model": "demo", "messages": [{"role": "user", "content": content}]}
    [message] = parse(ChatCompletionRequest, body).messages
    assert isinstance(message, UserMessage)
    said, parts = to_content(message.content, "messages[0].content")
    require_media(with_capabilities(spec), [Message("user", said, parts=parts)])
    return said, parts


def refused(part: dict[str, Any], spec: ModelSpec = SEEING) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        content_of([part], spec)
    return caught.value


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def file(data: str, name: str | None = None) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": data, "filename": name}}


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


@given(st.lists(st.text()))
def test_texts_are_one_text_with_nothing_between(texts: list[str]) -> None:
    assert content_of([text(value) for value in texts]) == ("".join(texts), ())


def test_parts_keep_their_order_and_are_named_by_their_place() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}
    assert content_of([text("a"), image(URL), text("b"), sound, image("data:,")]) == (
        None,
        (
            TextPart("a"),
            ImagePart(URL, "messages[0].content[1].image_url.url"),
            TextPart("b"),
            AudioPart("UklG", "wav", "messages[0].content[3].input_audio.data"),
            ImagePart("data:,", "messages[0].content[4].image_url.url"),
        ),
    )


def test_single_image_needs_no_text() -> None:
    assert content_of([image(URL)])[1] == (ImagePart(URL, "messages[0].content[0].image_url.url"),)


@given(st.text(), st.sampled_from(["", "data:text/plain;base64,", "data:;base64,"]))
def test_file_of_text_is_its_text(content: str, prefix: str) -> None:
    data = prefix + encoded(content.encode())
    assert content_of([file(data)]) == (content, ())
    assert content_of([text("x"), file(data, "a.txt")]) == (f"xa.txt:\n{content}\n", ())


def test_file_may_be_an_image() -> None:
    url = "data:image/png;base64,iVBORw0KGgo="
    assert content_of([file(url)])[1] == (ImagePart(url, "messages[0].content[0].file.file_data"),)


@given(st.binary())
def test_file_that_is_no_text_is_refused_and_never_an_error(content: bytes) -> None:
    try:
        content.decode()
    except UnicodeDecodeError:
        error = refused(file(encoded(content)))
        assert (error.param, error.code) == (
            "messages[0].content[0].file.file_data",
            "unsupported_file",
        )


@given(st.text())
def test_data_that_is_no_base64_is_refused_and_never_an_error(data: str) -> None:
    with suppress(InvalidRequestError):
        content_of([file(data)])


@pytest.mark.parametrize(
    "url", ["", "a.png", "file:///etc/passwd", "ftp://example.org/a.png", "http//x", "http://[::1"]
)
def test_image_is_fetched_from_the_web_alone(url: str) -> None:
    error = refused(image(url))
    assert (error.param, error.code) == (
        "messages[0].content[0].image_url.url",
        "invalid_image_url",
    )


@pytest.mark.parametrize(
    ("part", "param"),
    [
        (image(URL), "image_url.url"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio"),
        (file("data:image/png;base64,"), "file.file_data"),
    ],
)
def test_model_that_only_reads_takes_no_media(part: dict[str, Any], param: str) -> None:
    error = refused(part, BLIND)
    assert (error.param, error.code) == (
        f"messages[0].content[0].{param}",
        "unsupported_parameter",
    )
