"""From the content of a message to text, or to parts when there is more than text in it."""

from __future__ import annotations

import base64
from urllib.parse import urlsplit

from inference_site.domain import messages as domain
from inference_site.domain.model_spec import ModelSpec
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.request_fields.capabilities import require
from inference_site.request_fields.wire.content import (
    AudioPart,
    Content,
    FilePart,
    ImagePart,
    InputFile,
    Part,
    RefusalPart,
    TextPart,
)


def to_content(
    content: Content, where: str, spec: ModelSpec
) -> tuple[str | None, tuple[domain.Part, ...]]:
    """Return the text, or None and the parts. ``where`` is the content's place in the request.

    Raise InvalidRequestError for media that the model cannot take, and for files that are neither
    text nor an image.
    """
    if isinstance(content, str):
        return content, ()
    parts = tuple(to_part(part, f"{where}[{i}]", spec) for i, part in enumerate(content))
    if all(isinstance(part, domain.TextPart) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, domain.TextPart)), ()
    return None, parts


def to_part(part: Part, where: str, spec: ModelSpec) -> domain.Part:
    """Return one part. Raise InvalidRequestError."""
    match part:
        case TextPart():
            return domain.TextPart(part.text)
        case RefusalPart():
            return domain.TextPart(part.refusal)
        case ImagePart():
            return to_image(part.image_url.url, f"{where}.image_url.url", spec)
        case AudioPart():
            require("audio", f"{where}.input_audio", spec)
            sound = part.input_audio
            return domain.AudioPart(sound.data, sound.format, f"{where}.input_audio.data")
        case FilePart():
            return to_file(part.file, f"{where}.file", spec)


def to_image(url: str, where: str, spec: ModelSpec) -> domain.ImagePart:
    """Return the image. Raise InvalidRequestError for a URL that nothing may be fetched from."""
    require("vision", where, spec)
    try:
        scheme = urlsplit(url).scheme.lower()
    except ValueError:
        scheme = ""
    if scheme not in ("http", "https", "data"):
        raise InvalidRequestError(
            f"Invalid '{where}': expected an http(s) URL or a 'data:' URL.",
            param=where,
            code="invalid_image_url",
        )
    return domain.ImagePart(url, where)


def to_file(file: InputFile, where: str, spec: ModelSpec) -> domain.Part:
    """Return the text of a file, under its name, or its image. Raise InvalidRequestError."""
    if file.file_id is not None:
        raise InvalidRequestError(
            f"Invalid '{where}.file_id': there is no file '{file.file_id[:100]}'.",
            param=f"{where}.file_id",
        )
    if file.file_data is None:
        raise InvalidRequestError(
            f"Missing required parameter: '{where}.file_data'.",
            param=f"{where}.file_data",
            code="missing_required_parameter",
        )
    where = f"{where}.file_data"
    if file.file_data.startswith("data:image/"):
        return to_image(file.file_data, where, spec)
    return domain.TextPart(_named(file.filename, _decode(file.file_data, where)))


def _decode(data: str, where: str) -> str:
    encoded = data.partition(",")[2] if data.startswith("data:") else data
    try:
        return base64.b64decode(encoded, validate=True).decode("utf-8")
    except ValueError as exc:  # No base64, or no UTF-8.
        raise InvalidRequestError(
            f"Invalid '{where}': expected base64 of a text in UTF-8, or of an image with its type "
            "in a 'data:' URL.",
            param=where,
            code="unsupported_file",
        ) from exc


def _named(name: str | None, text: str) -> str:
    return f"{name}:\n{text}\n" if name else text
