"""The images and files of a request: engines get bytes and text, never addresses.

Stored files are read from their storage, and the text of PDF and DOCX files is extracted. Images
and files with a URL are fetched by HTTP from public hosts only (``fetching``).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote, urlsplit

from django.conf import settings

from inference_site.catalogue.catalogue import catalogue
from inference_site.catalogue.engines.registry import model_capabilities
from inference_site.core.domain.errors import ImageNotSupported, InvalidRequest
from inference_site.core.domain.request import (
    FilePart,
    GenerationRequest,
    ImagePart,
    Message,
    Part,
    TextPart,
)
from inference_site.core.storage.postgresql import release_connection_after
from inference_site.files import storage
from inference_site.files.models import StoredFile
from worker.document_text import MAX_CHARACTERS, UnreadableDocument, text_of
from worker.fetching import FetchError, FetchPolicy, FetchTimedOut, fetched

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_FORMATS_OF_ENGINES = ("PNG", "JPEG")
_DOCUMENTS = (b"%PDF-", b"PK\x03\x04")
"""How files begin whose text is extracted."""
_SNIFFED = 4096
_IMAGES = 4
"""How many images of the largest size one request may have; more images must be smaller."""
_TEXTS = 4
"""The same for documents with the longest text: a kilobyte can have one of 4 million characters."""
_READING_S = 60.0
"""For the texts of all documents of a request."""


class MediaError(Exception):
    """An image or a file cannot be used. The client sees the message, which names no address."""


@dataclass
class Allowance:
    """Bytes, pixels, characters and time that the remaining images and files of a request may use.

    The limits are for the request: with a limit for each image, a request could name a thousand of
    them. ``deadline`` is a time of the monotonic clock, for fetching; ``reading_s`` is for the
    texts of documents, while the request holds a slot.
    """

    size_bytes: int
    pixels: int
    deadline: float
    characters: int
    reading_s: float

    @classmethod
    def full(cls) -> Allowance:
        """Return the allowance of a new request, from the settings."""
        return cls(
            settings.MEDIA_MAX_BYTES,
            settings.MEDIA_MAX_PIXELS * _IMAGES,
            time.monotonic() + settings.MEDIA_TIMEOUT_S,
            _TEXTS * MAX_CHARACTERS,
            _READING_S,
        )

    def seconds_left(self) -> float:
        """Return the time left for all fetches. Raise MediaError if it is over."""
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise _timed_out("image or file")
        return seconds

    def check_bytes(self, size_bytes: int) -> None:
        """Raise MediaError if an image of this size exceeds the allowance."""
        if size_bytes > self.size_bytes:
            raise MediaError(
                "The images and files of a request may have at most "
                f"{settings.MEDIA_MAX_BYTES} bytes, all together."
            )

    def take_bytes(self, size_bytes: int) -> None:
        """Use bytes. Raise MediaError if they exceed the allowance."""
        self.check_bytes(size_bytes)
        self.size_bytes -= size_bytes

    def take_pixels(self, pixels: int) -> None:
        """Use the pixels of one image. Raise MediaError if it has too many."""
        limit = settings.MEDIA_MAX_PIXELS
        if pixels > limit:
            raise MediaError(f"The image has {pixels} pixels; at most {limit} are allowed.")
        if pixels > self.pixels:
            raise MediaError(
                f"The images of a request may have at most {_IMAGES * limit} pixels, all together."
            )
        self.pixels -= pixels

    def text_of(self, content: bytes, filename: str) -> str:
        """Return the text of a document, and take its characters and the time that it needs.

        Raise UnreadableDocument, and MediaError for too many characters or too much time.
        """
        if self.reading_s <= 0:
            raise MediaError(
                "The documents of a request could not be read within "
                f"{_READING_S:g} s, all together."
            )
        began = time.monotonic()
        text = text_of(content, filename, self.reading_s)
        self.reading_s -= time.monotonic() - began
        self.characters -= len(text)
        if self.characters < 0:
            raise MediaError(
                "The documents of a request may have at most "
                f"{_TEXTS * MAX_CHARACTERS} characters, all together."
            )
        return text


def _timed_out(noun: str) -> MediaError:
    return MediaError(f"The {noun} could not be fetched within {settings.MEDIA_TIMEOUT_S} s.")


def resolve_media(request: GenerationRequest, project_id: int) -> GenerationRequest:
    """Return the request with its files as text or images, and its images as ``data:`` URLs.

    Images are checked. A request without media is returned as it is. Stored files are those of the
    project. Blocks while it fetches. Raise InvalidRequest, for the part's field, if an image or
    file cannot be fetched or decoded, or is not allowed; ImageNotSupported if a file is an image,
    and the model reads none.
    """
    if not has_media(request):
        return request
    allowance = Allowance.full()

    def resolved(part: Part) -> Part:
        if not isinstance(part, ImagePart | FilePart):
            return part
        try:
            if isinstance(part, FilePart):
                found = _read_file(part, project_id, allowance)
                # Until the file is read, nobody knows that it is an image.
                if isinstance(found, ImagePart) and not _sees(request.model):
                    message = f"The model {request.model} reads no images."
                    raise ImageNotSupported(message, part.param)
                return found
            if part.url[:5].lower() == "data:":
                content = _decode_data_url(part.url, allowance)
            else:
                policy = FetchPolicy(
                    "image",
                    b"image/*",
                    allow_private=settings.MEDIA_ALLOW_PRIVATE,
                    allowed_hosts=settings.MEDIA_ALLOWED_HOSTS,
                    schemes=("http://", "https://", "data:"),
                )
                content = _fetch(part.url, policy, allowance)
            return replace(part, url=_image_url(content, allowance))
        except (MediaError, UnreadableDocument) as exc:
            raise InvalidRequest(str(exc), part.param) from exc

    messages = (_with_parts(m, tuple(map(resolved, m.parts))) for m in request.messages)
    return replace(request, messages=tuple(messages))


def _sees(model: str) -> bool:
    spec = catalogue().models.get(model)
    return spec is None or "vision" in model_capabilities(spec)


def has_media(request: GenerationRequest) -> bool:
    """Whether the request has images or files to resolve."""
    media = ImagePart | FilePart
    return any(isinstance(part, media) for turn in request.messages for part in turn.parts)


def with_judged_images(
    request: GenerationRequest, tools: Sequence[Mapping[str, Any]], project_id: int
) -> tuple[GenerationRequest, Sequence[Mapping[str, Any]]]:
    """Return the request with the media of its judged messages resolved, and its tools' options.

    The options of the moderation get these images and their hash.
    The images are fetched once, for the judgement and for the answer: a URL could give another
    image later. Blocks while it fetches. Raise InvalidRequest (see ``resolve_media``).
    """
    newest = sum(options.get("judged_messages", 0) for options in tools)
    if not newest:
        return request, tools
    earlier, judged = request.messages[:-newest], request.messages[-newest:]
    judged = resolve_media(replace(request, messages=judged), project_id).messages
    parts = [part for message in judged if message.role != "system" for part in message.parts]
    images = [part for part in parts if isinstance(part, ImagePart)]
    found = {
        "images": images,
        "images_hash": hashlib.sha256("\n".join(one.url for one in images).encode()).hexdigest(),
    }
    return replace(request, messages=(*earlier, *judged)), [
        {**options, **found} if options.get("judged_messages") else options for options in tools
    ]


def _with_parts(message: Message, parts: tuple[Part, ...]) -> Message:
    """Return the message with these parts, or with their text if they are all text."""
    if not parts or not all(isinstance(part, TextPart) for part in parts):
        return replace(message, parts=parts)
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    return replace(message, text=text, parts=())


def _read_file(part: FilePart, project_id: int, allowance: Allowance) -> Part:
    """Return the text of a file, after its name, or its image.

    A stored file of an earlier turn may have been deleted: a note takes its place.
    """
    name = part.filename
    if part.url is not None:
        policy = FetchPolicy(
            "file",
            b"*/*",
            allow_private=settings.MEDIA_ALLOW_PRIVATE,
            allowed_hosts=settings.MEDIA_ALLOWED_HOSTS,
        )
        content = _fetch(part.url, policy, allowance)
        name = name or unquote(urlsplit(part.url).path.rpartition("/")[2])
    elif part.file_id is None:
        content = _decode_data_url(f"data:;base64,{part.content}", allowance)
    else:
        with release_connection_after():
            file = StoredFile.objects.readable(project_id).filter(public_id=part.file_id).first()
        deleted = TextPart(f"[The file {part.file_id} was deleted.]")
        if file is None:
            return deleted
        allowance.take_bytes(file.size_bytes)
        try:
            name, content = file.filename, b"".join(storage.read(file))
        except storage.FileDeleted:
            return deleted
    # Most of what has a URL is HTML, in any encoding. The formats of images have null bytes.
    is_page = part.url is not None and b"\0" not in content[:_SNIFFED]
    if is_page or content.startswith(_DOCUMENTS):
        text = allowance.text_of(content, name or "")
    else:
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            return ImagePart(_image_url(content, allowance), part.param)
    return TextPart(f"{name}:\n{text}\n" if name else text)


def _decode_data_url(url: str, allowance: Allowance) -> bytes:
    """Return the bytes of a ``data:`` URL, and take them from the allowance."""
    media_type, comma, encoded = url[5:].partition(",")
    if not comma or not media_type.lower().endswith(";base64"):
        raise MediaError("A data: URL must be data:image/<type>;base64,<data>.")
    allowance.check_bytes(len(encoded) // 4 * 3 - 2)
    try:
        content = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise MediaError("The data: URL holds no valid base64.") from exc
    allowance.take_bytes(len(content))
    return content


def _image_url(content: bytes, allowance: Allowance) -> str:
    """Return the image as a ``data:`` URL, converted to PNG if it is neither PNG nor JPEG.

    Of an animation, the first frame is used. Raise MediaError if the content is no image or is too
    large.
    """
    from PIL import Image  # Most workers never read an image.

    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)  # Reads the header only.
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:
        # Pillow's own limit is far above ours.
        raise MediaError("The image has too many pixels.") from exc
    except Exception as exc:  # A decoder of hostile files may raise anything.
        raise MediaError(
            "This is not an image that can be read; it must be PNG, JPEG, WebP, GIF or BMP."
        ) from exc
    allowance.take_pixels(image.width * image.height)
    format_ = image.format
    if format_ not in _FORMATS_OF_ENGINES:
        format_, file = "PNG", io.BytesIO()
        try:
            # Compression level 1: the file does not leave this process.
            image.convert("RGB").save(file, "PNG", compress_level=1)
        except Exception as exc:  # As above.
            raise MediaError("The image is damaged.") from exc
        content = file.getvalue()
    return f"data:image/{format_.lower()};base64,{base64.b64encode(content).decode()}"


def _fetch(url: str, policy: FetchPolicy, allowance: Allowance) -> bytes:
    """Return the content behind the URL, and take its bytes from the allowance.

    Raise MediaError if it cannot or must not be fetched.
    """
    content = bytearray()
    try:
        with fetched(url, policy, allowance.seconds_left) as file:
            allowance.check_bytes(file.announced_bytes)
            for chunk in file.chunks:
                allowance.take_bytes(len(chunk))
                content += chunk
    except FetchTimedOut as exc:
        raise _timed_out(policy.noun) from exc
    except FetchError as exc:
        raise MediaError(str(exc)) from exc
    return bytes(content)
