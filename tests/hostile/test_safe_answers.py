"""What every answer and every line of the log keeps to, whoever asks for what."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.hostile.test_login import log_in
from tests.served_stack import ServedStack, wait_until

CHAT = "/v1/chat/completions"


def exchanged(stack: ServedStack, sent: bytes) -> tuple[bytes, dict[str, str]]:
    """The status line, and the headers with small names, of the answer to these bytes."""
    with socket.create_connection(("127.0.0.1", stack.port), timeout=60) as connection:
        connection.sendall(sent)
        received = b""
        while b"\r\n\r\n" not in received and (part := connection.recv(65_536)):
            received += part
    status, *lines = received.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return status.encode(), {name.lower(): value.strip() for name, _, value in pairs}


def head(line: str, *headers: str) -> bytes:
    return "\r\n".join([line, "Host: 127.0.0.1", *headers, "", ""]).encode("latin-1")


@pytest.fixture(scope="module")
def answers(stack: ServedStack) -> list[tuple[str, int, httpx.Headers]]:
    """Answers of every kind: of the relay, of views, of Django, and of the server itself."""
    key = {"Authorization": f"Bearer {stack.key}"}
    made: list[tuple[str, int, httpx.Headers]] = []
    with httpx.Client(base_url=stack.url, timeout=60) as http:

        def ask(method: str, path: str, **options: object) -> None:
            answer = http.request(method, path, **options)  # type: ignore[arg-type]
            made.append(
                (f"{method} {path} {answer.status_code}", answer.status_code, answer.headers)
            )

        chat = {"model": "scripted", "messages": "x"}
        bodies: tuple[object, ...] = (
            chat,
            {**chat, "stream": True},
            {"model": "none", "messages": "x"},
            [],
            "{",
        )
        for body in bodies:
            content = body if isinstance(body, str) else json.dumps(body)
            ask("POST", CHAT, content=content, headers={**key, "Content-Type": "application/json"})
        ask("POST", CHAT, content="x", headers=key | {"Content-Type": "text/plain"})
        ask("POST", CHAT, json=chat)
        ask("POST", "/api/chat", json={"model": "scripted", "messages": []}, headers=key)
        for path in (
            *("/", "/v1", "/v1/models", "/v1/none", "/v1/openapi.json", "/docs", "/playground"),
            *(
                "/health",
                "/health/ready",
                "/version",
                "/metrics",
                "/favicon.ico",
                "/none",
                "/admin",
            ),
            *(
                "/admin",
                "/admin/",
                "/admin/login/",
                "/admin/none/",
                "/admin/reset/",
                "/admin/jsi18n/",
            ),
            *("/static/none.js", "/static/console/favicon.svg", "/v1/models?after=%00"),
            *("/admin/login/?next=%00", "/console/playground/responses", "/lora-adapters"),
        ):
            ask("GET", path, headers=key)
        ask("PUT", "/v1/models", headers=key)
        ask("OPTIONS", "/v1/models", headers={"Origin": "https://app.example"})
        ask("POST", "/admin/login/", content=b"x" * 2_000_000)
        ask("POST", "/admin/login/", data={"username": "a"})
        ask("GET", "/admin/login/", headers={"Host": "elsewhere.example"})
    for sent in (
        head("GET /v1/models HTTP/1.1", "Name: \x0b"),
        head(f"GET /{'x' * 20_000} HTTP/1.1"),
        head("GET / HTTP/1.1", f"Name: {'x' * 20_000}"),
    ):
        status, headers = exchanged(stack, sent)
        made.append((repr(sent[:60]), int(status.split()[1]), httpx.Headers(headers)))
    return made


def test_every_answer_forbids_guesses_of_its_type_and_says_who_may_keep_it(
    answers: list[tuple[str, int, httpx.Headers]],
) -> None:
    wrong = [
        (what, dict(headers))
        for what, _, headers in answers
        if headers.get("x-content-type-options") != "nosniff" or "cache-control" not in headers
    ]
    assert wrong == []
    assert [what for what, status, _ in answers if status >= 500] == []
    for what, _, headers in answers:
        names = [name.lower() for name, _ in headers.multi_items()]
        assert names.count("cache-control") == 1, what
        kept = headers["cache-control"] not in ("no-store", "no-cache")
        assert not kept or "/static/" in what or "no-store" in headers["cache-control"], what


def test_what_the_server_itself_refuses_is_answered_with_the_envelope(stack: ServedStack) -> None:
    sent = head("GET /v1/models HTTP/1.1", "Name: \x0b", "Connection: close")
    with socket.create_connection(("127.0.0.1", stack.port), timeout=60) as connection:
        connection.sendall(sent)
        with connection.makefile("rb") as file:
            answer = file.read()
    assert answer.startswith(b"HTTP/1.1 400")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}


class Log:
    """The log of the web process from now on."""

    def __init__(self, stack: ServedStack) -> None:
        self._path = stack.data_dir / "log" / "web.log"
        self._start = self._path.stat().st_size

    def text(self) -> str:
        return self._path.read_bytes()[self._start :].decode("utf-8", "replace")

    def with_(self, word: str) -> str:
        wait_until(lambda: word in self.text(), 30, word)
        return self.text()


@pytest.mark.parametrize(
    ("target", "content_type"),
    [
        ("http://127.0.0.1/v1/models?limit=1", "application/json"),
        ("HTTPS://127.0.0.1/v1/models", "application/json"),
        ("http://127.0.0.1/admin/login/", "text/html; charset=utf-8"),
        ("http://127.0.0.1?a=b", "text/html; charset=utf-8"),
    ],
)
def test_a_target_with_scheme_and_host_is_its_path(
    stack: ServedStack, target: str, content_type: str
) -> None:
    """As a client sends it that takes the site for a proxy; the host is that of the target."""
    path = "/" + target.partition("127.0.0.1")[2].removeprefix("/")
    key = f"Authorization: Bearer {stack.key}"
    lines = [f"GET {target} HTTP/1.1", "Host: other.example", key, "Connection: close", "", ""]
    status, headers = exchanged(stack, "\r\n".join(lines).encode())
    usual, same = exchanged(stack, head(f"GET {path} HTTP/1.1", key))
    assert (status, headers["content-type"]) == (usual, same["content-type"])
    assert headers["content-type"] == content_type


@pytest.fixture
def log(stack: ServedStack) -> Log:
    return Log(stack)


@pytest.fixture
def browser(stack: ServedStack) -> Iterator[httpx.Client]:
    """A browser in which the administrator is logged in."""
    password = re.search(r"password: (\S+)", stack.text())
    assert password
    with httpx.Client(base_url=stack.url, timeout=120) as opened:
        assert log_in(opened, "admin", password[1]).status_code == 302
        yield opened


@pytest.mark.parametrize("kind", ["invitation", "reset"])
def test_a_link_that_works_once_is_not_in_the_log(stack: ServedStack, log: Log, kind: str) -> None:
    token = "d2abcd-0123456789abcdef0123456789abcdef"
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        http.get(f"/admin/{kind}/Nw/{token}/")
        http.get(f"/admin/{kind}/Nw/{token}")  # Is redirected to the address with the slash.
        http.get("/admin/none", headers={"Referer": f"{stack.url}/admin/{kind}/Nw/{token}/"})
        text = log.with_("/admin/none")
        assert text.count(f"/admin/{kind}/Nw/[redacted]") == 2
        assert token not in text
        metrics = http.get("/metrics").text
    assert token not in metrics


def test_a_key_in_an_address_is_not_in_the_log(stack: ServedStack, log: Log) -> None:
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        http.get(f"/v1/models?api_key={stack.key}")
        http.get(f"/admin/{stack.key}/", params={"token": "a-secret-of-mine"})
        refused = http.get(f"/v1/models/{stack.key}", headers={"x-api-key": stack.key})
        assert refused.status_code == 404
        http.get("/v1/the-end")
    text = log.with_("/v1/the-end")
    assert stack.key not in text
    assert stack.key[:20] not in text
    assert "a-secret-of-mine" not in text

    def paths() -> list[str]:
        return [path for (path,) in stack.sql("SELECT path FROM request_log_refusal")]

    wait_until(lambda: "/v1/models/sk-[redacted]" in paths(), 30, "the request log")
    assert not any(stack.key[:20] in path for path in paths())


def test_control_characters_do_not_reach_the_log(stack: ServedStack, log: Log) -> None:
    for line, *headers in (
        ("G\x1b[31mT /v1/models HTTP/1.1",),
        ("GET /v1/%1B%5B31mred HTTP/1.1",),
        ("GET /admin/%1B%0Aforged/ HTTP/1.1", "Cookie: sessionid=\x1b"),
        ("GET /v1/models HTTP/1.1", "traceparent: \x1b", "X-Request-Id: \x1b"),
    ):
        with contextlib.suppress(OSError):
            exchanged(stack, head(line, *headers))
    httpx.get(f"{stack.url}/v1/the-end", timeout=60)
    text = log.with_("/v1/the-end")
    assert not re.search(r"[^\n\x20-\x7e\xa0-\uffff]", text), ascii(text)
    assert "\nforged" not in text


def test_a_wrong_host_is_a_short_line(stack: ServedStack, log: Log) -> None:
    for host in ("elsewhere.example", "a\x1b[31m", "'"):
        status, _ = exchanged(
            stack, f"GET /admin/login/ HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("latin-1")
        )
        assert status.startswith(b"HTTP/1.1 400")
    httpx.get(f"{stack.url}/v1/the-end", timeout=60)
    text = log.with_("/v1/the-end")
    assert "Invalid HTTP_HOST header: 'elsewhere.example'" in text
    assert "Traceback" not in text
    assert max(map(len, text.splitlines())) < 500
    assert len(text.splitlines()) <= 8


@pytest.mark.parametrize(
    "path",
    [
        "/admin/?model=%00",
        "/admin/usage/?model=%00",
        "/admin/generations/generation/?model=%00",
        "/admin/responses_api/storedresponse/?q=%00",
        "/admin/auth/user/?q=a%00b",
        "/admin/%00/",
        "/admin/auth/user/%00/change/",
    ],
)
def test_a_page_takes_no_nul_in_its_address(browser: httpx.Client, path: str) -> None:
    assert browser.get(path, follow_redirects=True).status_code == 400


def test_a_form_takes_no_nul(browser: httpx.Client) -> None:
    page = browser.get("/admin/auth/user/")
    token = re.search(r'csrfmiddlewaretoken" value="([^"]+)', page.text)
    assert token
    for form in (
        {"action": "delete_selected", "_selected_action": "\0"},
        {"action": "\0", "_selected_action": "1"},
    ):
        sent = {**form, "csrfmiddlewaretoken": token[1]}
        assert browser.post("/admin/auth/user/", data=sent).status_code == 400
    sent = {"username": "a\0", "password": "b", "csrfmiddlewaretoken": token[1]}
    assert browser.post("/admin/login/", data=sent).status_code == 400
