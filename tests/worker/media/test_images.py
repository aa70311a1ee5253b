"""Images of a request: what is fetched, in which form, and what is refused."""

from __future__ import annotations

import base64
import io
from http.server import BaseHTTPRequestHandler

import httpx
import pytest
from PIL import Image
from pytest_django.fixtures import Settings

from inference_site.core.domain.request import (
    AudioPart,
    GenerationRequest,
    ImagePart,
    Message,
    TextPart,
)
from tests.image_server import ImageServer
from tests.images import JPEG, PNG, data_url, encoded, refusal, request_of, resolved
from worker import fetching
from worker.media import resolve_media

pytestmark = pytest.mark.usefixtures("private_network")

HELLO = TextPart("Hello")


def test_a_request_without_images_is_left_as_it_is() -> None:
    texts = GenerationRequest("m", messages=(Message("user", "Hello"),))
    sounds = request_of(HELLO, AudioPart("UklG", "wav", "p"))
    assert resolve_media(texts, 1) is texts
    assert resolve_media(sounds, 1) is sounds


def test_an_image_is_fetched(server: ImageServer) -> None:
    assert resolved(server.give("/a?b=c%20d", PNG)) == [data_url(PNG)]
    assert server.asked == ["/a?b=c%20d"]
    assert server.hosts == [f"127.0.0.1:{server.port}"]


def test_an_image_is_fetched_whatever_its_host_calls_it(server: ImageServer) -> None:
    assert resolved(server.give("/text.txt", JPEG)) == [data_url(JPEG, "image/jpeg")]


def test_what_is_around_the_images_keeps_its_place(server: ImageServer) -> None:
    url, sound = server.give("/a", PNG), AudioPart("UklG", "wav", "p")
    request = resolve_media(request_of(HELLO, ImagePart(url, "p"), sound, HELLO), 1)
    parts = request.messages[0].parts
    assert parts == (HELLO, ImagePart(data_url(PNG), "p"), sound, HELLO)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_followed(server: ImageServer, status: int) -> None:
    server.give("/there", PNG)
    assert resolved(server.redirect("/here", "/there", status)) == [data_url(PNG)]
    assert server.asked == ["/here", "/there"]


def test_three_redirects_are_followed_and_no_more(server: ImageServer) -> None:
    for hop in range(4):
        server.redirect(f"/{hop}", f"/{hop + 1}")
    server.give("/4", PNG)
    assert resolved(server.url("/1")) == [data_url(PNG)]
    assert "more than 3 redirects" in refusal(server.url("/0"))


def test_a_redirect_in_a_circle_ends(server: ImageServer) -> None:
    assert "more than 3 redirects" in refusal(server.redirect("/a", "/a"))
    assert len(server.asked) == 4


def test_an_image_in_the_request_is_checked_and_kept() -> None:
    assert resolved(data_url(PNG)) == [data_url(PNG)]


def test_the_bytes_say_what_an_image_is_and_not_its_name() -> None:
    assert resolved(data_url(PNG, "image/gif")) == [data_url(PNG)]
    assert resolved("DATA:;Base64," + base64.b64encode(PNG).decode()) == [data_url(PNG)]


@pytest.mark.parametrize("format_", ["WEBP", "GIF", "BMP"])
def test_what_engines_cannot_read_becomes_a_png(format_: str) -> None:
    (url,) = resolved(data_url(encoded(format_), f"image/{format_.lower()}"))
    head, _, content = url.partition(",")
    image = Image.open(io.BytesIO(base64.b64decode(content)))
    assert (head, image.format, image.size) == ("data:image/png;base64", "PNG", (7, 5))
    red, green, blue = image.convert("RGB").tobytes()[:3]
    assert red > 240
    assert max(green, blue) < 15


@pytest.mark.parametrize("format_", ["WEBP", "GIF"])
def test_an_animation_is_its_first_frame(format_: str) -> None:
    file = io.BytesIO()
    frames = [Image.new("RGB", (7, 5), color) for color in ("red", "blue")]
    frames[0].save(file, format_, save_all=True, append_images=frames[1:])
    (url,) = resolved(data_url(file.getvalue()))
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert image.tobytes()[0] > 240


def test_an_image_with_a_transparent_color_is_read() -> None:
    file = io.BytesIO()
    Image.new("P", (7, 5)).save(file, "GIF", transparency=0)
    (url,) = resolved(data_url(file.getvalue()))
    assert url.startswith("data:image/png;base64,")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("data:", "A data: URL must be"),
        ("data:image/png", "A data: URL must be"),
        ("data:image/png,abc", "A data: URL must be"),
        ("data:image/png;base64", "A data: URL must be"),
        ("data:image/png;base64,", "not an image"),
        ("data:image/png;base64,%%%%", "no valid base64"),
        ("data:image/png;base64,é", "no valid base64"),
        (data_url(PNG)[:-3], "no valid base64"),
        (data_url(PNG[:20]), "not an image"),
        (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "not an image"),
        (data_url(encoded("TIFF"), "image/tiff"), "not an image"),
        (data_url(encoded("WEBP")[:-9], "image/webp"), "damaged|not an image"),
        (data_url(b"%PDF-1.7\n%", "application/pdf"), "not an image"),
    ],
)
def test_what_is_no_image_is_refused(url: str, told: str) -> None:
    message = refusal(url)
    assert any(words in message for words in told.split("|"))


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("", "must begin with http://"),
        ("image.png", "must begin with http://"),
        ("//example.org/image.png", "must begin with http://"),
        ("file:///etc/passwd", "must begin with http://"),
        ("ftp://example.org/image.png", "must begin with http://"),
        ("gopher://127.0.0.1:6379/_INFO", "must begin with http://"),
        ("unix:///run/docker.sock", "must begin with http://"),
        ("http://", "not valid"),
        ("http:///image.png", "not valid"),
        ("http://[::1/image.png", "not valid"),
        ("http://example.org:99999/", "not valid"),
        ("http://example.org/\r\nX: y", "not valid"),
        ("http://me:secret@example.org/", "no user name or password"),
        ("http://me@example.org/", "no user name or password"),
    ],
)
def test_what_is_no_web_address_is_refused(url: str, told: str) -> None:
    assert told in refusal(url)


@pytest.mark.parametrize(
    ("location", "told"),
    [
        ("file:///etc/passwd", "must begin with http://"),
        ("data:image/png;base64,AAAA", "must begin with http://"),
        ("http://me:secret@127.0.0.1/", "no user name or password"),
        ("http://[::1/", "no valid URL"),
    ],
)
def test_a_redirect_leads_to_web_addresses_only(
    server: ImageServer, location: str, told: str
) -> None:
    assert told in refusal(server.redirect("/a", location))


@pytest.mark.parametrize("status", [204, 304, 401, 404, 500])
def test_another_status_is_told_without_its_text(server: ImageServer, status: int) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_error(status, "secret", "secret")

    server.answers["/a"] = answer
    assert refusal(server.url("/a")) == f"The image could not be fetched: HTTP status {status}."


def test_a_text_is_refused_without_its_words(server: ImageServer) -> None:
    message = refusal(server.give("/a", b'{"password": "secret"}'))
    assert "not an image" in message
    assert "secret" not in message


def test_a_host_that_does_not_answer_is_told(server: ImageServer) -> None:
    with ImageServer().running() as gone:
        url = gone.url("/")
    assert "does not answer" in refusal(url)


def test_a_host_that_breaks_off_is_told(server: ImageServer) -> None:
    cut_off = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort"
    for answer in (b"nonsense\r\n\r\n", cut_off, b""):
        assert "closed the connection" in refusal(server.say("/a", answer))


def test_only_the_hosts_of_the_settings_are_fetched_from(
    server: ImageServer, settings: Settings
) -> None:
    url = server.give("/a", PNG)
    settings.MEDIA_ALLOWED_HOSTS = ["images.example.org", ".example.com"]
    assert refusal(url) == "Images are not fetched from this host here."
    assert server.asked == []
    settings.MEDIA_ALLOWED_HOSTS = ["127.0.0.1"]
    assert resolved(url) == [data_url(PNG)]
    moved = server.redirect("/b", server.url("/a", "localhost"))
    assert refusal(moved) == "Images are not fetched from this host here."


def test_no_proxy_is_taken_from_the_environment(
    server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert resolved(server.give("/a", PNG)) == [data_url(PNG)]


def test_a_port_that_speaks_no_tls_is_told(server: ImageServer) -> None:
    url = httpx.URL(server.give("/a", PNG)).copy_with(scheme="https")
    assert "could not be fetched" in refusal(str(url))


def test_redirects_are_counted_as_the_documentation_says() -> None:
    assert fetching.MAX_REDIRECTS == 3
