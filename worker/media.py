"""The images of a request, fetched and decoded: engines are given bytes, never addresses."""

from __future__ import annotations

import base64
import binascii
import io
import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import httpcore
import httpx
from django.conf import settings
from PIL import Image

from inference_site.domain.addresses import is_listed, is_public
from inference_site.domain.errors import InvalidRequest
from inference_site.domain.messages import ImagePart, Message, Part
from inference_site.domain.request import GenerationRequest

_IMAGES = 4
"""How many images of the largest size one request may have; smaller ones may be more."""


class MediaError(Exception):
    """An image cannot be used. The message is for the client: it says nothing of the network."""


@dataclass
class Allowance:
    """What is left for the rest of a request. ``deadline`` is of the monotonic clock."""

    size_bytes: int
    pixels: int
    deadline: float

    @classmethod
    def full(cls) -> Allowance:
        """Return what a request begins with, from the settings."""
        return cls(
            settings.MEDIA_MAX_BYTES,
            settings.MEDIA_MAX_PIXELS * _IMAGES,
            time.monotonic() + settings.MEDIA_TIMEOUT_S,
        )

    def seconds_left(self) -> float:
        """Return the time for all that is still to be fetched. Raise MediaError if it is over."""
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise time_is_up()
        return seconds

    def check_bytes(self, size_bytes: int) -> None:
        """Raise MediaError if an image of this size is more than is left."""
        if size_bytes > self.size_bytes:
            raise MediaError(
                "The images of a request may have at most "
                f"{settings.MEDIA_MAX_BYTES} bytes, all together."
            )

    def take_bytes(self, size_bytes: int) -> None:
        """Use some up. Raise MediaError if they are more than is left."""
        self.check_bytes(size_bytes)
        self.size_bytes -= size_bytes

    def take_pixels(self, pixels: int) -> None:
        """Use the pixels of an image up. Raise MediaError if it has too many."""
        limit = settings.MEDIA_MAX_PIXELS
        if pixels > limit:
            raise MediaError(f"The image has {pixels} pixels; at most {limit} are allowed.")
        if pixels > self.pixels:
            raise MediaError(
                f"The images of a request may have at most {_IMAGES * limit} pixels, all together."
            )
        self.pixels -= pixels


def time_is_up() -> MediaError:
    """Return the error of a fetch that took too long."""
    return MediaError(f"The image could not be fetched within {settings.MEDIA_TIMEOUT_S} s.")


class CheckedBackend(httpcore.NetworkBackend):
    """Opens the connections of one request's fetches, all within its time."""

    def __init__(self, allowance: Allowance, inner: httpcore.NetworkBackend | None = None) -> None:
        self._allowance = allowance
        self._inner = inner or httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first address that answers. Raise MediaError unless all are public."""
        addresses = resolve(host, self._allowance)
        if not addresses or not (settings.MEDIA_ALLOW_PRIVATE or all(map(is_public, addresses))):
            # One message for both: which internal names exist is nobody's business.
            raise MediaError("The host of the image has no public address.")
        for untried, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            share_s = self._allowance.seconds_left() / untried
            try:
                stream = self._inner.connect_tcp(
                    address, port, share_s, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
            return TimedStream(stream, self._allowance)
        raise MediaError("The image could not be fetched: its host does not answer.")


class TimedStream(httpcore.NetworkStream):
    """A stream whose waits add up to no more than the time left, however little each brings."""

    def __init__(self, inner: httpcore.NetworkStream, allowance: Allowance) -> None:
        self._inner, self._allowance = inner, allowance

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return what has come."""
        return self._inner.read(max_bytes, self._allowance.seconds_left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send all of it."""
        self._inner.write(buffer, self._allowance.seconds_left())

    def close(self) -> None:
        """Hang up."""
        self._inner.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        """Go on encrypted; the certificate is checked for the name, not for the address."""
        seconds = self._allowance.seconds_left()
        encrypted = self._inner.start_tls(ssl_context, server_hostname, seconds)
        return TimedStream(encrypted, self._allowance)

    def get_extra_info(self, info: str) -> Any:
        """Return what httpcore wants to know of the socket."""
        return self._inner.get_extra_info(info)


def resolve(host: str, allowance: Allowance) -> list[str]:
    """Return the addresses of a host name or number; none for one that does not exist.

    The system's resolver knows no time limit, so it runs on a thread that may be left behind.
    """
    found: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    threading.Thread(target=lambda: found.put(look_up(host)), daemon=True).start()
    try:
        return found.get(timeout=allowance.seconds_left())
    except queue.Empty:
        raise time_is_up() from None


def look_up(host: str) -> list[str]:
    """Ask the system for the addresses of a host, in the order in which they are to be tried."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


MAX_REDIRECTS = 3
_REDIRECTS = {301, 302, 303, 307, 308}
_FAILURES = (
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.ProxyError,
    httpcore.UnsupportedProtocol,
)


def fetch(url: str, allowance: Allowance) -> bytes:
    """Return what the URL leads to, and take its bytes from the allowance.

    Raise MediaError if it is not to be had, or not to be fetched.
    """
    backend = CheckedBackend(allowance)
    try:
        with httpcore.ConnectionPool(_ssl_context(), network_backend=backend) as pool:
            return _follow(pool, _checked(url), allowance)
    except httpcore.TimeoutException as exc:
        raise time_is_up() from exc
    except _FAILURES as exc:
        raise MediaError("The image could not be fetched: its host closed the connection.") from exc


def _follow(pool: httpcore.ConnectionPool, url: httpx.URL, allowance: Allowance) -> bytes:
    for _ in range(MAX_REDIRECTS + 1):
        with pool.stream("GET", _target(url), headers=_headers(url)) as response:
            headers = {name.lower(): value for name, value in response.headers}
            if response.status not in _REDIRECTS or b"location" not in headers:
                return _body(response, headers, allowance)
            url = _joined(url, headers[b"location"].decode("latin-1"))
    raise MediaError(f"The image is behind more than {MAX_REDIRECTS} redirects.")


def _body(response: httpcore.Response, headers: dict[bytes, bytes], allowance: Allowance) -> bytes:
    if response.status != 200:
        raise MediaError(f"The image could not be fetched: HTTP status {response.status}.")
    if (length := headers.get(b"content-length", b"")).isdigit():
        allowance.check_bytes(int(length))
    content = bytearray()
    for chunk in response.iter_stream():
        allowance.take_bytes(len(chunk))
        content += chunk
    return bytes(content)


def _joined(url: httpx.URL, location: str) -> httpx.URL:
    try:
        return _checked(str(url.join(location)))
    except httpx.InvalidURL as exc:
        raise MediaError("The image's host redirects to no valid URL.") from exc


def _checked(url: str) -> httpx.URL:
    """Return the URL, taken apart. Raise MediaError if it is not one to be fetched."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as exc:
        raise MediaError("The image's URL is not valid.") from exc
    if parsed.scheme not in ("http", "https"):
        raise MediaError("The image's URL must begin with http://, https:// or data:.")
    if parsed.userinfo:
        raise MediaError("The image's URL must hold no user name or password.")
    if not parsed.host or not 0 < (parsed.port or 80) < 65536:
        raise MediaError("The image's URL is not valid.")
    if settings.MEDIA_ALLOWED_HOSTS and not is_listed(parsed.host, settings.MEDIA_ALLOWED_HOSTS):
        raise MediaError("Images are not fetched from this host here.")
    return parsed


def _target(url: httpx.URL) -> httpcore.URL:
    # By its parts: httpcore would take a text apart in a way of its own.
    return httpcore.URL(
        scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
    )


def _headers(url: httpx.URL) -> list[tuple[bytes, bytes]]:
    return [
        (b"Host", url.netloc),
        (b"User-Agent", b"inference-site"),
        (b"Accept", b"image/*"),
        (b"Accept-Encoding", b"identity"),  # The limit is one of what arrives.
    ]


@cache
def _ssl_context() -> ssl.SSLContext:
    return httpcore.default_ssl_context()


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_READ_BY_ENGINES = ("PNG", "JPEG")


def image_url(content: bytes, allowance: Allowance) -> str:
    """Return the image as a ``data:`` URL, a PNG if it was neither that nor a JPEG.

    Of an animation it is the first frame. Raise MediaError for what is no image, or too large.
    """
    image = _opened(content)
    allowance.take_pixels(image.width * image.height)
    if image.format in _READ_BY_ENGINES:
        return _data_url(image.format, content)
    return _data_url("PNG", _as_png(image))


def _opened(content: bytes) -> Image.Image:
    """Read the header and no more."""
    try:
        return Image.open(io.BytesIO(content), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as exc:
        # Pillow has a limit of its own, far above ours.
        raise MediaError("The image has too many pixels.") from exc
    except Exception as exc:  # A reader of hostile files may raise anything.
        raise MediaError(
            "This is not an image that can be read; it must be PNG, JPEG, WebP, GIF or BMP."
        ) from exc


def _as_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    try:
        # Level 1: the file goes no further than this process.
        image.convert("RGB").save(file, "PNG", compress_level=1)
    except Exception as exc:  # As above.
        raise MediaError("The image is damaged.") from exc
    return file.getvalue()


def _data_url(format_: str, content: bytes) -> str:
    return f"data:image/{format_.lower()};base64,{base64.b64encode(content).decode()}"


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
