"""The images of a request, brought in: engines are given bytes, never addresses."""

from __future__ import annotations

import base64
import binascii
from dataclasses import replace

from inference_site.domain.errors import InvalidRequest
from inference_site.domain.messages import ImagePart, Message, Part
from inference_site.domain.request import GenerationRequest
from worker.media.allowance import Allowance, MediaError
from worker.media.fetch import fetch
from worker.media.images import image_url


def resolve_media(request: GenerationRequest) -> GenerationRequest:
    """Return the request with each image as a checked ``data:`` URL; the same one without images.

    Blocks while it fetches. Raise InvalidRequest, for the image's field, for one that cannot be
    had, read or allowed.
    """
    if not has_images(request):
        return request
    allowance = Allowance.full()
    return replace(request, messages=tuple(_resolved(turn, allowance) for turn in request.messages))


def has_images(request: GenerationRequest) -> bool:
    """Whether there is anything to resolve."""
    return any(isinstance(part, ImagePart) for turn in request.messages for part in turn.parts)


def _resolved(message: Message, allowance: Allowance) -> Message:
    return replace(message, parts=tuple(_resolved_part(part, allowance) for part in message.parts))


def _resolved_part(part: Part, allowance: Allowance) -> Part:
    if not isinstance(part, ImagePart):
        return part
    try:
        return replace(part, url=image_url(_content(part.url, allowance), allowance))
    except MediaError as exc:
        raise InvalidRequest(str(exc), part.param) from exc


def _content(url: str, allowance: Allowance) -> bytes:
    if url[:5].lower() == "data:":
        return _decoded(url[5:], allowance)
    return fetch(url, allowance)


def _decoded(data: str, allowance: Allowance) -> bytes:
    """Return the bytes of a ``data:`` URL, without that, and take them from the allowance."""
    media_type, comma, encoded = data.partition(",")
    if not comma or not media_type.lower().endswith(";base64"):
        raise MediaError("A data: URL must be data:image/<type>;base64,<data>.")
    allowance.check_bytes(len(encoded) // 4 * 3 - 2)
    try:
        content = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise MediaError("The data: URL holds no valid base64.") from exc
    allowance.take_bytes(len(content))
    return content
