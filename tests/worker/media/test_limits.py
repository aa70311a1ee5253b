"""How much of a worker's time and memory the images of a request may take."""

from __future__ import annotations

import base64
import time
import zlib
from http.server import BaseHTTPRequestHandler

import pytest
from pytest_django.fixtures import Settings

from inference_site.core.domain.errors import InvalidRequest
from inference_site.core.domain.request import FilePart
from tests.image_server import ImageServer
from tests.images import PNG, data_url, encoded, refusal, request_of, resolved
from worker import media
from worker.document_text import text_of
from worker.media import resolve_media

pytestmark = pytest.mark.usefixtures("private_network")


def test_a_large_image_is_refused_by_its_header(server: ImageServer, settings: Settings) -> None:
    settings.MEDIA_MAX_BYTES = len(PNG) - 1
    assert f"at most {len(PNG) - 1} bytes" in refusal(server.give("/a", PNG))


def test_a_large_image_without_a_length_is_cut_off(server: ImageServer, settings: Settings) -> None:
    settings.MEDIA_MAX_BYTES = 100_000
    sent = 0

    def answer(handler: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            handler.wfile.write(bytes(10_000))
            sent += 10_000

    server.answers["/a"] = answer
    assert "at most 100000 bytes" in refusal(server.url("/a"))
    time.sleep(0.2)
    assert sent < 50_000_000  # The rest was never read; the sockets' buffers hold a little.


def test_an_image_in_the_request_has_the_same_limit(settings: Settings) -> None:
    settings.MEDIA_MAX_BYTES = len(PNG) - 1
    assert "bytes, all together" in refusal(data_url(PNG))
    settings.MEDIA_MAX_BYTES = len(PNG)
    assert resolved(data_url(PNG)) == [data_url(PNG)]


def test_the_limit_is_of_all_images_together(server: ImageServer, settings: Settings) -> None:
    settings.MEDIA_MAX_BYTES = 2 * len(PNG)
    url = server.give("/a", PNG, with_length=False)
    assert len(resolved(url, data_url(PNG))) == 2
    assert "bytes, all together" in refusal(url, data_url(PNG), url)


@pytest.mark.parametrize("headers_too", [False, True])
def test_a_slow_drip_is_cut_off(server: ImageServer, settings: Settings, headers_too: bool) -> None:
    settings.MEDIA_TIMEOUT_S = 0.4
    began = time.monotonic()
    assert "within 0.4 s" in refusal(server.drip("/a", headers_too=headers_too))
    assert time.monotonic() - began < 8


def test_a_host_that_says_nothing_is_given_up(server: ImageServer, settings: Settings) -> None:
    settings.MEDIA_TIMEOUT_S = 0.3
    server.answers["/a"] = lambda handler: time.sleep(1)
    assert "within 0.3 s" in refusal(server.url("/a"))


def test_the_time_is_that_of_all_images_together(server: ImageServer, settings: Settings) -> None:
    settings.MEDIA_TIMEOUT_S = 0.5
    content = server.give("/a", PNG)
    quick = server.answers["/a"]

    def slow(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.2)
        quick(handler)

    server.answers["/a"] = slow
    assert "within 0.5 s" in refusal(*[content] * 4)


def test_too_many_pixels_are_refused_before_they_are_decoded(settings: Settings) -> None:
    settings.MEDIA_MAX_PIXELS = 34
    for format_ in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        assert "has 35 pixels; at most 34" in refusal(data_url(encoded(format_)))
    settings.MEDIA_MAX_PIXELS = 35
    assert len(resolved(*[data_url(PNG)] * 4)) == 4
    assert "at most 140 pixels, all together" in refusal(*[data_url(PNG)] * 5)


def bomb(format_: str, side: int) -> bytes:
    """Return a small file that says it holds a square of this many pixels a side."""
    small = encoded(format_)
    if format_ == "PNG":
        header = b"IHDR" + side.to_bytes(4, "big") * 2 + small[24:29]
        return small[:12] + header + zlib.crc32(header).to_bytes(4, "big") + small[33:]
    # The screen and the frame, which is to be wiped when its time is over.
    control = b"\x21\xf9\x04\x08\x00\x00\x00\x00"
    screen = b"GIF89a" + side.to_bytes(2, "little") * 2 + b"\x80\x00\x00" + bytes(6)
    frame = b"\x2c" + bytes(4) + side.to_bytes(2, "little") * 2 + b"\x00"
    return screen + control + frame + b"\x02\x02\x44\x01\x00\x3b"


@pytest.mark.parametrize(("format_", "side"), [("PNG", 10_000), ("PNG", 60_000), ("GIF", 60_000)])
def test_a_decompression_bomb_is_never_decoded(format_: str, side: int) -> None:
    content = bomb(format_, side)
    assert len(content) < 200
    began = time.monotonic()
    assert "pixels" in refusal(data_url(content))
    assert time.monotonic() - began < 8


def refused_documents(count: int, pages: int) -> str:
    """Return why a request with this number of the same PDF is refused, which it must be."""
    content = b"BT /F1 9 Tf (" + b"word " * 1000 + b") Tj ET"
    kids = " ".join(["5 0 R"] * pages)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {pages} /Kids [{kids}] >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        b"<< /Length %d >>\nstream\n" % len(content) + content + b"\nendstream",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 99999 99] /Contents 4 0 R "
        b"/Resources << /Font << /F1 3 0 R >> >> >>",
    ]
    whole, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(whole))
        whole += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    whole += f"xref\n0 6\n0000000000 65535 f \n{table}trailer << /Size 6 /Root 1 0 R >>\n".encode()
    whole += f"startxref\n{whole.rindex(b'xref')}\n%%EOF".encode()
    encoded_pdf = base64.b64encode(whole).decode()
    parts = [FilePart(f"input[{n}]", content=encoded_pdf) for n in range(count)]
    with pytest.raises(InvalidRequest) as refused:
        resolve_media(request_of(*parts), 1)
    return str(refused.value)


def test_the_time_for_documents_is_that_of_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "_READING_S", 1.0)
    began = time.monotonic()
    assert "in time" in (told := refused_documents(100, 3)) or "within" in told
    assert time.monotonic() - began < 8


def test_the_characters_of_documents_are_those_of_all_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(media, "MAX_CHARACTERS", 10_000)
    assert "at most 40000 characters, all together" in refused_documents(2, 5)


def test_many_comments_before_a_text_take_no_long() -> None:
    page = b"<!-- a -->\n" * 300
    assert text_of(page + b"Fjords", "fjords.txt").endswith("Fjords")
    assert text_of(page + b"<html><p>Fjords</p>", "fjords.txt") == "Fjords"


@pytest.mark.parametrize(
    "page",
    [
        "<p>A café</p>".encode(),
        '<meta charset="windows-1252"><p>A café</p>'.encode("cp1252"),
        "<p>カフェ A café</p>".encode(),
        "<p>A café</p> thé".encode()[:-1],  # Cut inside a character.
        '<meta charset="iso-2022-jp"><p>カフェ</p>'.encode("iso2022_jp"),
    ],
)
def test_a_page_without_a_sure_sign_is_read_in_its_encoding(page: bytes) -> None:
    text = text_of(page, "menu.html")
    assert "A café" in text or text == "カフェ"
