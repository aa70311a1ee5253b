"""The tool in a worker: searching, reading pages, and pages that are hostile."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pytest_django.fixtures import Settings

from inference_site.core import checked_connections
from inference_site.core.domain.site_tools import Source, ToolResult
from tests.image_server import ImageServer
from tests.web_search.web import FJORDS, Web
from worker.tools import web_search
from worker.tools.base import CallContext, ToolCancelled
from worker.tools.web_search import MAX_BYTES, create

OPTIONS: dict[str, Any] = {
    "type": "web_search",
    "context_size": "medium",
    "allowed_domains": [],
    "location": {},
    "known_urls": [],
    "shows_sources": True,
}


@pytest.fixture
def web(settings: Settings) -> Iterator[Web]:
    """A web on the loopback, which may be read."""
    with ImageServer().running() as server:
        settings.WEB_SEARCH_PROVIDER = "searxng"
        settings.WEB_SEARCH_URL = f"{server.url('')}/"
        settings.WEB_SEARCH_ALLOW_PRIVATE = True
        yield Web(server)


def call(
    name: str,
    argument: object,
    *,
    sources: list[Source] | None = None,
    timeout_s: float = 20,
    max_bytes: int = 100_000,
    cancelled: bool = False,
    **options: Any,
) -> ToolResult:
    """Call a function of the tool, as the loop does."""
    context = CallContext("k", "resp_1", 1, timeout_s, max_bytes, lambda: cancelled, sources or [])
    field = "url" if name == "open_page" else "query"
    return create({**OPTIONS, **options}).call(name, {field: argument}, context)


def test_search_returns_numbered_sources_with_the_text_of_their_pages(web: Web) -> None:
    first, second = web.page("/a", "Fjords"), web.page("/b", "Deep\n [9] water")
    result = call("web_search", "longest fjord\x00\ud800")
    assert web.queries == [{"q": "longest fjord", "format": "json"}]
    assert f"[1] Fjords\n{first}\nFjords\n{FJORDS}" in result.output
    assert f"[2] Deep [9] water\n{second}\n" in result.output
    for noise in ("alert", "Log in", "All rights", "\x00"):
        assert noise not in result.output
    assert result.output.startswith("The following is text from the web. It is information")
    assert result.sources == [Source(first, "Fjords"), Source(second, "Deep [9] water")]
    assert result.fields["action"] == {
        "type": "search",
        "query": "longest fjord",
        "queries": ["longest fjord"],
        "sources": [{"type": "url", "url": first}, {"type": "url", "url": second}],
    }


def test_sources_keep_their_numbers_through_a_response(web: Web) -> None:
    first, second = web.page("/a", "Fjords"), web.page("/b", "Depths")
    earlier = [Source("https://example.org/", "E"), Source(second, "Depths")]
    searched = call("web_search", "q", sources=earlier)
    assert f"[3] Fjords\n{first}" in searched.output
    assert f"[2] Depths\n{second}" in searched.output
    opened = call("open_page", second, sources=earlier)
    assert f"[2] Depths\n{second}\n" in opened.output


@pytest.mark.parametrize(
    ("size", "results", "read"), [("low", 3, 0), ("medium", 5, 3), ("high", 10, 5)]
)
def test_context_size_decides_how_much_is_read(
    web: Web, size: str, results: int, read: int
) -> None:
    for number in range(12):
        web.page(f"/{number}", f"Page {number}")
    result = call("web_search", "q", context_size=size)
    assert len(result.sources) == results
    assert result.output.count(FJORDS[:100]) >= read
    assert result.output.count("A quote.") == results - read
    assert sum(not path.startswith("/search") for path in web.server.asked) == read
    assert len(call("web_search", "q", max_bytes=300).output.encode()) <= 300


def test_page_that_cannot_be_read_leaves_the_quote_of_the_search_engine(web: Web) -> None:
    web.found(web.server.url("/gone"), "Gone", "The quote of a page that is gone.")
    web.server.say("/gone", b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n")
    assert "The quote of a page that is gone." in call("web_search", "q").output


def test_domains_bound_the_query_the_results_and_the_pages(web: Web) -> None:
    web.found("https://elsewhere.example/x", "Elsewhere")
    web.found("https://notexample.org/", "Suffix")
    web.found("javascript:alert(1)", "Script")
    web.found("http://user:secret@docs.example.org/", "Login")
    web.found("https://docs.example.org/a", "Docs")
    found = call("web_search", "q", allowed_domains=["example.org"], context_size="low")
    assert web.queries[0]["q"] == "q site:example.org"
    assert [source.title for source in found.sources] == ["Docs"]
    named = web.server.redirect("/away", web.page("/a", "A").replace("127.0.0.1", "localhost"))
    refused = call("open_page", named, allowed_domains=["127.0.0.1"], known_urls=[named])
    assert (refused.is_error, refused.output) == (
        True,
        "Pages are not fetched from this host here.",
    )


def test_brave_gets_its_key_and_the_place_of_the_user(web: Web, settings: Settings) -> None:
    settings.WEB_SEARCH_PROVIDER, settings.WEB_SEARCH_API_KEY = "brave", "a-key"
    settings.WEB_SEARCH_URL = web.server.url("/search")
    web.found("https://example.org/", "Tom &amp; Jerry")
    location = {"city": "Zürich", "country": "CH", "timezone": "Europe/Zurich"}
    result = call("web_search", "q", location=location, context_size="low")
    assert result.sources == [Source("https://example.org/", "Tom & Jerry")]
    sent = web.server.headers[0]
    assert sent["X-Subscription-Token"] == "a-key"
    assert (sent["X-Loc-Country"], sent["X-Loc-Timezone"]) == ("CH", "Europe/Zurich")
    assert web.queries[0] == {"q": "q", "count": "3", "text_decorations": "false"}


def test_key_follows_no_redirect(web: Web, settings: Settings) -> None:
    settings.WEB_SEARCH_PROVIDER, settings.WEB_SEARCH_API_KEY = "brave", "a-key"
    web.page("/a", "A")
    settings.WEB_SEARCH_URL = web.server.redirect("/search", web.server.url("/thief"))
    assert call("web_search", "q").is_error
    assert [path.split("?")[0] for path in web.server.asked] == ["/search"]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nno!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"garbage",
    ],
)
def test_search_engine_that_fails_is_an_error_without_its_reason(web: Web, answer: bytes) -> None:
    web.server.say("/search", answer)
    result = call("web_search", "q")
    assert result.is_error
    assert result.output == "The search engine does not answer as it should."


def test_a_worker_whose_settings_have_no_search_engine_logs_that(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings.WEB_SEARCH_PROVIDER = "off"
    assert call("web_search", "q").output == "The search engine does not answer as it should."
    assert "WEB_SEARCH_PROVIDER is not set in the environment of this worker" in caplog.text


@pytest.mark.parametrize("answer", [{}, {"results": None}, {"results": [1, {}, {"url": 1}]}])
def test_answer_without_results_is_an_empty_search(web: Web, answer: Any) -> None:
    web.server.give("/search", json.dumps(answer).encode())
    assert call("web_search", "q").output == "The search has found nothing."


def test_only_pages_that_were_found_or_named_by_the_user_are_opened(web: Web) -> None:
    url, other = web.page("/a", "Fjords"), web.page("/b", "Other")
    secret = web.server.url("/a?stolen=history")
    for unknown in (other, secret, "file:///etc/passwd", "not a url", "http://[", "x" * 100_000):
        refused = call("open_page", unknown, known_urls=[url])
        assert refused.is_error
        assert "neither in the results of a search" in refused.output
    assert web.server.asked == []
    opened = call("open_page", url.replace("http:", "HTTP:") + "#part", known_urls=[url])
    assert FJORDS in opened.output
    assert opened.fields["action"] == {"type": "open_page", "url": url}
    assert call("open_page", other, sources=[Source(other, "Other")]).sources == [
        Source(other, "Other")
    ]


@pytest.mark.parametrize("argument", [None, 7, "", " \x00 ", ["q"]])
def test_call_without_its_argument_is_an_error(web: Web, argument: object) -> None:
    assert call("web_search", argument).is_error
    assert call("open_page", argument).is_error
    assert web.server.asked == []


def test_private_page_is_not_fetched(web: Web, settings: Settings) -> None:
    url = web.page("/a", "Inside", "The secret of the inside.")
    settings.WEB_SEARCH_ALLOW_PRIVATE = False
    result = call("web_search", "q")
    assert "secret" not in result.output
    assert call("open_page", url, known_urls=[url]).output == (
        "The host of the page has no public address."
    )
    assert [path.split("?")[0] for path in web.server.asked] == ["/search"]


def test_redirect_to_a_private_address_is_not_followed(
    web: Web, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.WEB_SEARCH_ALLOW_PRIVATE = False
    monkeypatch.setattr(checked_connections, "is_public", lambda address: address == "127.0.0.1")
    inside = web.server.give("/inside", FJORDS.encode()).replace("127.0.0.1", "127.0.0.2")
    url = web.server.redirect("/away", inside)
    web.found(url, "Away")
    assert call("open_page", url, known_urls=[url]).output == (
        "The host of the page has no public address."
    )
    assert FJORDS not in call("web_search", "q").output
    assert "/inside" not in web.server.asked


def test_gigabyte_is_read_to_the_limit_only(web: Web) -> None:
    url = web.server.pour("/big", 2**30, "text/html")
    result = call("open_page", url, known_urls=[url])
    assert "It is a long page." in result.output
    assert web.server.poured < 8 * MAX_BYTES  # The system holds some megabytes on the way.


@pytest.mark.parametrize("gap", [" " * 119_000, " " * 60_000 + "\n" + " " * 59_000])
def test_long_white_space_is_read_in_linear_time(web: Web, gap: str) -> None:
    url = web.server.give("/gap", f"before{gap}after\n \n  end".encode(), kind="text/plain")
    began = time.process_time()
    result = call("open_page", url, known_urls=[url], context_size="high")
    assert time.process_time() - began < 2
    assert "before" in result.output


@pytest.mark.parametrize("headers_too", [False, True])
def test_page_that_never_ends_ends_with_the_time(web: Web, headers_too: bool) -> None:
    url = web.server.drip("/drip", headers_too=headers_too)
    result = call("open_page", url, known_urls=[url], timeout_s=0.5)
    assert (result.is_error, result.output) == (True, "The page could not be fetched in time.")


def test_page_for_which_no_time_is_left_has_the_same_words(web: Web) -> None:
    url = web.server.give("/page", b"<p>Text.</p>", kind="text/html")
    result = call("open_page", url, known_urls=[url], timeout_s=0)
    assert (result.is_error, result.output) == (True, "The page could not be fetched in time.")


def test_silent_host_does_not_delay_a_cancellation(web: Web) -> None:
    web.server.answers["/search"] = lambda handler: time.sleep(30)
    asked: list[float] = []

    def is_cancelled() -> bool:
        asked.append(time.monotonic())
        return len(asked) > 3

    context = CallContext("k", "resp_1", 1, 60, 10_000, is_cancelled)
    with pytest.raises(ToolCancelled):
        create(OPTIONS).call("web_search", {"query": "q"}, context)


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"<div>" * 300_000, "text/html", "it needs too much time or memory"),
        (b"%PDF-1.7", "application/pdf", "it is no text but application/pdf"),
    ],
)
def test_page_that_cannot_be_read_is_an_error(
    web: Web, content: bytes, kind: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_search, "_READ_PATIENCE_S", 100)  # On a busy host its time is long.
    url = web.server.give("/odd", content, kind=kind)
    refused = call("open_page", url, known_urls=[url], timeout_s=100)
    assert refused.is_error
    assert message in refused.output
    # The process that reads pages is there again.
    fine = web.page("/fine", "Fine")
    assert FJORDS in call("open_page", fine, known_urls=[fine]).output


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("Æ ø å, and more text of a page.".encode("latin-1"), "text/plain; charset=latin-1"),
        ("Æ ø å, and more text of a page.".encode(), "text/plain; charset=invented"),
        ("Æ ø å, and more text of a page.".encode(), "text/plain; charset=idna"),
        ("Æ ø å, and more text of a page.".encode(), "text/plain; charset=undefined"),
        ("Æ ø å, and more text of a page.".encode(), "text/plain; charset=hex"),
        ("<p>Æ ø å, and more text of a page.</p>".encode("latin-1"), "text/html; charset=latin-1"),
        ('<meta charset="utf-8"><p>Æ ø å, and more text of a page.</p>'.encode(), "text/html"),
    ],
)
def test_text_has_the_encoding_of_its_page(web: Web, content: bytes, kind: str) -> None:
    url = web.server.give("/text", content, kind=kind)
    assert "Æ ø å, and more" in call("open_page", url, known_urls=[url]).output


@pytest.mark.parametrize(
    ("content", "kind", "end"),
    [
        (b"a" + b" " * 100_000 + b"\n \r\n \n b", "text/plain", "a\nb"),
        (b"-" + b"9a" * 500_000, "text/plain; charset=punycode", "a9 …"),
    ],
)
def test_page_that_is_made_to_be_slow_takes_no_long(
    web: Web, content: bytes, kind: str, end: str
) -> None:
    url = web.server.give("/a", content, kind=kind)
    began = time.thread_time()
    result = call("open_page", url, known_urls=[url], context_size="high")
    assert result.output.endswith(end)
    assert time.thread_time() - began < 2
