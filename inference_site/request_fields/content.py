"""From the content of a message to text, or to parts when there is more than text in it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from urllib.parse import urlsplit

from inference_site.domain import messages as domain
from inference_site.errors.api_errors import InvalidRequestError
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


def to_content(content: Content, where: str) -> tuple[str | None, tuple[domain.Part, ...]]:
    """Return the text, or None and the parts. ``where`` is the content's place in the request.

    Raise InvalidRequestError for files that are neither text nor an image.
    """
    if isinstance(content, str):
        return content, ()
    return joined([to_part(part, f"{where}[{i}]") for i, part in enumerate(content)])


def joined(parts: Sequence[domain.Part]) -> tuple[str | None, tuple[domain.Part, ...]]:
    """Return the text of parts, or None and the parts when there is more than text in them."""
    texts = [part.text for part in parts if isinstance(part, domain.TextPart)]
    return ("".join(texts), ()) if len(texts) == len(parts) else (None, tuple(parts))


def to_part(part: Part, where: str) -> domain.Part:
    """Return one part. Raise InvalidRequestError."""
    match part:
        case TextPart():
            return domain.TextPart(part.text)
        case RefusalPart():
            return domain.TextPart(part.refusal)
        case ImagePart():
            return to_image(part.image_url.url, f"{where}.image_url.url")
        case AudioPart():
            sound = part.input_audio
            return domain.AudioPart(sound.data, sound.format, f"{where}.input_audio.data")
        case FilePart():
            return to_file(part.file, f"{where}.file")


def to_image(url: str, where: str) -> domain.ImagePart:
    """Return the image. Raise InvalidRequestError for a URL that nothing may be fetched from."""
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


def to_file(file: InputFile, where: str) -> domain.Part:
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
        return to_image(file.file_data, where)
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
