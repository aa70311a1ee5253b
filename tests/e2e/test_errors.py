"""Errors over HTTP: the envelope, the status, the parameter, the headers."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.keys import make_key
from tests.served_stack import ServedStack, wait_until

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, once the envelope has been checked."""
    assert response.headers["content-type"].startswith("application/json")
    assert response.headers["x-request-id"]
    assert response.headers["openai-processing-ms"].isdigit()
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, None),
        ({"Authorization": "Basic abc"}, None),
        ({"Authorization": "Bearer"}, None),
        ({"Cookie": "sessionid=admin"}, None),
        ({"Authorization": "Bearer sk-wrong-but-long-enough"}, "invalid_api_key"),
        ({"x-api-key": "password"}, "invalid_api_key"),
    ],
)
def test_without_a_good_key_it_is_401(
    stack: ServedStack, headers: dict[str, str], code: str | None
) -> None:
    response = httpx.post(f"{stack.url}{CHAT}", json=HELLO, headers=headers, timeout=60)
    assert response.status_code == 401
    error = error_of(response)
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert response.headers["www-authenticate"] == "Bearer"
    assert not {"sk-wrong-but-long-enough", "password"} & set(re.findall(r"[\w-]+", response.text))
    if "sk-wrong" in str(headers):
        assert "sk-wr***gh" in error["message"]


def test_revoked_key_is_refused_soon(stack: ServedStack) -> None:
    key = make_key(stack)
    client = stack.client(key.secret)
    client.models.list()
    stack.sql("UPDATE accounts_apikey SET revoked_at = now() WHERE id = %s", key.id)
    refusals: list[openai.AuthenticationError] = []

    def is_refused() -> bool:
        try:
            client.models.list()
        except openai.AuthenticationError as exc:
            refusals.append(exc)
        return bool(refusals)

    wait_until(is_refused, 120, "keys are remembered for five seconds, however often they come")
    assert refusals[0].code == "invalid_api_key"


def test_key_in_x_api_key_is_good_too(stack: ServedStack) -> None:
    for headers in ({"x-api-key": stack.key}, {"Authorization": f"bearer  {stack.key}"}):
        response = httpx.get(f"{stack.url}/v1/models", headers=headers, timeout=60)
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "model", "missing_required_parameter"),
        ({"model": "demo"}, "messages", "missing_required_parameter"),
        ({**HELLO, "model": "  "}, "model", "missing_required_parameter"),
        ({**HELLO, "messages": []}, "messages", "empty_array"),
        (
            {**HELLO, "messages": [*HELLO["messages"], {"role": "user", "content": 5}]},
            "messages[1].content",
            "invalid_type",
        ),
        (
            {**HELLO, "messages": [{"role": "ghost", "content": "x"}]},
            "messages[0].role",
            "invalid_value",
        ),
        ({**HELLO, "temperature": "hot"}, "temperature", "invalid_type"),
        ({**HELLO, "temperature": 3}, "temperature", None),
        ({**HELLO, "repetition_penalty": 1e-40}, "repetition_penalty", "decimal_below_min_value"),
        ({**HELLO, "dry_allowed_length": 2**31}, "dry_allowed_length", "integer_above_max_value"),
        ({**HELLO, "max_tokens": 0}, "max_tokens", "integer_below_min_value"),
        ({**HELLO, "stream_options": {"include_usage": True}}, "stream_options", None),
        ({**HELLO, "stop": ["a"] * 5}, "stop", "array_above_max_length"),
    ],
)
def test_bad_body_is_400_and_names_the_parameter(
    http: httpx.Client, body: dict[str, Any], param: str, code: str | None
) -> None:
    response = http.post(CHAT, json=body)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    if code:
        assert error["code"] == code


@pytest.mark.parametrize(
    "content", [b"[1]", b'"text"', b"{", b"", b"\xff\xfe", b'{"a": NaN}', b"[1,]"]
)
def test_body_that_is_no_json_object_is_400(http: httpx.Client, content: bytes) -> None:
    response = http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    if content not in (b"[1]", b'"text"', b""):
        assert "could not parse the JSON body" in error["message"]
    if content:
        assert (error["param"], error["code"]) == (None, None)


def test_body_may_come_in_chunks_without_a_length(http: httpx.Client) -> None:
    pieces = iter((b'{"model": "demo", "max_tokens": 1, "messages": ', b'"Hello"}'))
    sent = {"Content-Type": "application/json"}
    assert http.post(CHAT, content=pieces, headers=sent).status_code == 200


def test_body_beyond_the_limit_is_413(http: httpx.Client) -> None:
    response = http.post(
        CHAT, content=b" " * (20 * 1024 * 1024 + 1), headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 413
    error_of(response)


def test_other_content_types_are_415(http: httpx.Client) -> None:
    for headers in ({"Content-Type": "text/plain"}, {}):
        response = http.post(CHAT, content=json.dumps(HELLO), headers=headers)
        assert response.status_code == 415
        assert error_of(response)["code"] == "unsupported_content_type"
    assert http.post(CHAT, data={"model": "demo"}).status_code == 415


def test_compressed_body_is_415_and_says_so(http: httpx.Client) -> None:
    body = gzip.compress(json.dumps(HELLO).encode())
    for coding, sent in (("gzip", body), ("gzip, GZIP", gzip.compress(body))):
        headers = {"Content-Type": "application/json", "Content-Encoding": coding}
        response = http.post(CHAT, content=sent, headers=headers)
        assert response.status_code == 415
        assert "must not be compressed" in error_of(response)["message"]
    plain = http.post(CHAT, json=HELLO, headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200


def test_wrong_method_is_405_and_says_which_are_right(http: httpx.Client) -> None:
    response = http.put(CHAT, json=HELLO)
    assert response.status_code == 405
    assert "POST" in response.headers["allow"]
    assert error_of(response)["code"] == "method_not_supported"


@pytest.mark.parametrize("path", ["/v1/nothing/here", "/v1", "/v1/", f"{CHAT}/x/y"])
def test_unknown_path_is_404_before_authentication(stack: ServedStack, path: str) -> None:
    response = httpx.post(f"{stack.url}{path}", json={}, timeout=60)
    assert response.status_code == 404
    assert error_of(response)["message"] == f"Invalid URL (POST {path.rstrip('/')})"


def test_trailing_slash_is_tolerated_and_never_redirects(http: httpx.Client) -> None:
    assert http.get("/v1/models/").status_code == 200
    assert http.post(f"{CHAT}/", json=HELLO).status_code == 200


def test_unknown_model_is_404(client: openai.OpenAI) -> None:
    for name in ("ghost", "org/model:tag", "a b"):
        with pytest.raises(openai.NotFoundError, match=f"`{name}`") as caught:
            client.chat.completions.create(**{**HELLO, "model": name})
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError, match=f"The model '{name}' does not exist") as got:
            client.models.retrieve(name)
        assert (got.value.code, got.value.param) == ("model_not_found", "model")


def test_request_id_of_the_caller_is_kept_when_well_formed(http: httpx.Client) -> None:
    for good in ("mine-1.2:3", "a.B_c", "x" * 128):
        answer = http.get("/v1/models", headers={"x-request-id": good})
        assert answer.headers["x-request-id"] == good
    made = set()
    for bad in (b"", b"two words", b"x" * 129, "\u00e9".encode(), b"a,b"):
        answer = http.get("/health", headers={b"x-request-id": bad})
        made.add(answer.headers["x-request-id"])
        assert answer.headers["openai-version"] == "2020-10-01"
    assert len(made) == 5
    assert all(one.startswith("req_") for one in made)
    with http.stream("POST", CHAT, json={**HELLO, "stream": True}) as stream:
        assert stream.headers["x-request-id"].startswith("req_")
        assert stream.headers["openai-processing-ms"].isdigit()
        stream.read()


@pytest.mark.parametrize("accept", ["text/event-stream", "application/json", "text/html", "x/y"])
def test_accept_header_is_never_negotiated(http: httpx.Client, accept: str) -> None:
    response = http.post(CHAT, json={**HELLO, "stream": True}, headers={"Accept": accept})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    models = http.get("/v1/models", headers={"Accept": accept})
    assert (models.status_code, models.headers["content-type"]) == (200, "application/json")


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    here = {"demo", "scripted", "demo-embedding", "reranker", "tuned"}
    # Another test puts a file into the folder of models.
    assert set(listed) - {"dropped"} == here | {
        "hooked",
        "hooked-demo",
        "old",
        "remote",
        "odd",
        "away",
        "told",
        "seeing",
        "judge",
        "ranker",
        "guard",
        "seeing-guard",
        "told-guard",
        "sounds",
        "wide",
    }
    found = client.models.retrieve("demo")
    assert found == listed["demo"]
    assert found.model_dump()["status"] == "loaded"
    assert client.models.retrieve("DEMO").id == "demo"


def test_health_is_open_and_ready_names_its_parts(stack: ServedStack) -> None:
    assert httpx.get(f"{stack.url}/health", timeout=60).json() == {"status": "ok"}
    ready = httpx.get(f"{stack.url}/health/ready", timeout=60)
    assert ready.status_code == 200
    assert ready.json()["checks"] == {"postgres": "ok", "redis": "ok", "workers": "ok"}


def test_session_of_the_admin_opens_no_api(stack: ServedStack) -> None:
    password = re.search(r"password: (\S+)", stack.text())
    assert password
    with httpx.Client(base_url=stack.url, follow_redirects=True, timeout=60) as browser:
        page = browser.get("/admin/login/")
        token = re.search(r'csrfmiddlewaretoken" value="([^"]+)', page.text)
        assert token
        form = {
            "username": "admin",
            "password": password[1],
            "csrfmiddlewaretoken": token[1],
            "next": "/admin/",
        }
        assert "Generations" in browser.post("/admin/login/", data=form).text
        assert "Select generation" in browser.get("/admin/generations/generation/").text
        assert browser.get("/v1/models").status_code == 401
