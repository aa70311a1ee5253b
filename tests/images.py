"""Small images, and what becomes of them in a request."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from inference_site.core.domain.errors import InvalidRequest
from inference_site.core.domain.request import GenerationRequest, ImagePart, Message, Part
from worker.media import resolve_media

PARAM = "messages[0].content[0].image_url.url"


def encoded(format_: str, size: tuple[int, int] = (7, 5), color: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, format_)
    return file.getvalue()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def request_of(*parts: Part) -> GenerationRequest:
    return GenerationRequest("m", messages=(Message("user", None, parts=parts),))


def resolved(*urls: str) -> list[str]:
    """Return what these URLs of images become."""
    request = resolve_media(request_of(*(ImagePart(url, PARAM) for url in urls)), 1)
    parts = request.messages[0].parts
    assert all(isinstance(part, ImagePart) and part.param == PARAM for part in parts)
    return [part.url for part in parts if isinstance(part, ImagePart)]


def refusal(*urls: str) -> str:
    """Return why these URLs of images are refused, which they must be."""
    with pytest.raises(InvalidRequest) as caught:
        resolved(*urls)
    assert caught.value.param == PARAM
    return str(caught.value)


PNG, JPEG = encoded("PNG"), encoded("JPEG")
