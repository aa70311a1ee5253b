"""Pages of other origins: what a browser is told of them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

PAGE = "https://app.example"
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}


def preflight(http: httpx.Client, origin: str, path: str = CHAT) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
        "Authorization": "",  # A browser sends none with it.
    }
    return http.options(path, headers=headers)


def test_page_may_ask_and_read_every_sort_of_answer(http: httpx.Client) -> None:
    allowed = preflight(http, PAGE)
    assert allowed.status_code == 204
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in allowed.headers["access-control-allow-headers"]
    answers = [
        http.post(CHAT, json=HELLO, headers={"Origin": PAGE}),
        http.post(CHAT, json={**HELLO, "stream": True}, headers={"Origin": PAGE}),
        http.post("/v1/responses", json={"model": "demo"}, headers={"Origin": PAGE}),
        http.post(CHAT, json=HELLO, headers={"Origin": PAGE, "Authorization": ""}),
        http.post(CHAT, content=b"x", headers={"Origin": PAGE, "Content-Type": "text/plain"}),
        http.get("/v1/nothing", headers={"Origin": PAGE}),
    ]
    assert [a.status_code for a in answers] == [200, 200, 400, 401, 415, 404]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-expose-headers"] == "*"
        assert "access-control-allow-credentials" not in answer.headers
        assert "Origin" in answer.headers["vary"]


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "https://app.example.evil", "null", "http://app.example"]
)
def test_other_pages_may_not(http: httpx.Client, origin: str) -> None:
    refused = preflight(http, origin)
    answered = http.post(CHAT, json=HELLO, headers={"Origin": origin})
    for answer in (refused, answered, http.get("/v1/models")):
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert "Origin" in answer.headers["vary"]
    assert refused.status_code != 204


def test_pages_of_the_admin_are_for_nobody_else(http: httpx.Client) -> None:
    for path in ("/admin/login/", "/console/streams"):
        answer = preflight(http, PAGE, path)
        assert not [name for name in answer.headers if name.startswith("access-control")]
