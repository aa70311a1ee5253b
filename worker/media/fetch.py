"""Fetching an image by HTTP, from public hosts only.

Redirects are followed by hand, so that each address on the way is looked at like the first. Neither
proxies nor passwords are taken from the environment.
"""

from __future__ import annotations

import ssl
from functools import cache

import httpcore
import httpx
from django.conf import settings

from inference_site.domain.addresses import is_listed
from worker.media.allowance import Allowance, MediaError, time_is_up
from worker.media.network import CheckedBackend

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
