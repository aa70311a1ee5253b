"""Pages of the web: fetched from checked hosts, and read in a limited process."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message

from django.conf import settings

from inference_site.core.checked_connections import SecondsLeft
from inference_site.core.domain.errors import GenerationFailed
from worker.fetching import Fetched, FetchError, FetchPolicy, fetched
from worker.limited_process import LimitedProcess

MAX_BYTES = 2 * 2**20
"""The bytes of a page that are read; the rest of a longer page is not fetched."""
_READ_PATIENCE_S = 10
_HTML = ("text/html", "application/xhtml+xml")
_TEXT = ("application/json", "application/xml")

_reader = LimitedProcess("worker.tools.page_text")


@dataclass(frozen=True, slots=True)
class Page:
    """A page with its title, which may be empty, and its main text. ``url`` is the final one."""

    url: str
    title: str
    text: str


def read_page(url: str, allowed_hosts: Sequence[str], seconds_left: SecondsLeft) -> Page:
    """Fetch a page and return its text.

    Raise FetchError if it cannot or must not be fetched or read, and what ``seconds_left`` raises.
    """
    policy = FetchPolicy(
        "page",
        b"text/html,text/plain;q=0.9,application/json;q=0.8",
        allow_private=settings.WEB_SEARCH_ALLOW_PRIVATE,
        allowed_hosts=allowed_hosts,
    )
    with fetched(url, policy, seconds_left) as answer:
        media_type, charset = _media_type(answer)
        content = bytearray()
        for chunk in answer.chunks:
            content += chunk
            if len(content) >= MAX_BYTES:
                break
        final_url = str(answer.url)
    del content[MAX_BYTES:]
    if media_type not in _HTML:
        return Page(final_url, "", _decoded(bytes(content), charset))
    try:
        encoded = base64.b64encode(content).decode()
        patience_s = min(_READ_PATIENCE_S, seconds_left())
        read = _reader.ask(encoded, charset, patience_s=patience_s)
    except GenerationFailed as exc:
        raise FetchError("The page could not be read in time.") from exc
    if read is None:
        raise FetchError("The page could not be read: it needs too much time or memory.")
    title, text = read
    return Page(final_url, title, text)


def _media_type(answer: Fetched) -> tuple[str, str]:
    """Return the type of a page and its character encoding, which may be empty.

    Raise FetchError for content that has no text.
    """
    header = Message()
    header["Content-Type"] = answer.headers.get(b"content-type", b"").decode("latin-1")
    if answer.headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise FetchError("The page could not be read: its host compresses it without being asked.")
    media_type = header.get_content_type()
    if not (media_type in _HTML or media_type in _TEXT or media_type.startswith("text/")):
        raise FetchError(f"The page could not be read: it is no text but {media_type[:100]}.")
    charset = header.get_param("charset", "")
    return media_type, charset if isinstance(charset, str) else ""


def _decoded(content: bytes, charset: str) -> str:
    try:
        return content.decode(charset or "utf-8", "replace")
    except LookupError:
        return content.decode("utf-8", "replace")
