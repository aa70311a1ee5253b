"""Errors of Anthropic's dialect: its envelope, and the path of what the client sent."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.e2e.keys import make_key
from tests.e2e.scripts import script
from tests.images import PNG
from tests.served_stack import ServedStack

SAID: dict[str, Any] = {"role": "user", "content": "Hello"}
MADE: dict[str, Any] = {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]}
BASE: dict[str, Any] = {"model": "demo", "max_tokens": 9, "messages": [SAID]}
TOOL: dict[str, Any] = {"name": "look", "input_schema": {"type": "object"}}
IMAGE: dict[str, Any] = {
    "type": "image",
    "source": {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(PNG).decode(),
    },
}
GARBAGE: dict[str, Any] = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "no base64"},
}
CALL: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "seen"}
TEXT: dict[str, Any] = {"type": "text", "text": "So?"}
LARGE: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": list(range(1001))}}}


def source(**fields: Any) -> dict[str, Any]:
    return {**IMAGE, "source": {**IMAGE["source"], **fields}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def by_url(kind: str, url: str) -> dict[str, Any]:
    return {"type": kind, "source": {"type": "url", "url": url}}


def within(block: dict[str, Any]) -> dict[str, Any]:
    """A document whose second block is this one."""
    return {"type": "document", "source": {"type": "content", "content": [TEXT, block]}}


def answered(*blocks: Any) -> dict[str, Any]:
    """A result of a tool with these blocks."""
    return {**RESULT, "content": list(blocks)}


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"messages": [SAID, user(source(media_type=5))]}, "messages.1.content.0.source.media_type"),
    ({"messages": [SAID, user(TEXT, {"type": "image"})]}, "messages.1.content.1.source"),
    ({"messages": [SAID, user(source(type="disk"))]}, "messages.1.content.0.source.type"),
    ({"messages": [SAID, user({"type": "text"})]}, "messages.1.content.0.text"),
    ({"messages": [SAID, user({})]}, "messages.1.content.0.type"),
    ({"messages": [SAID, user(5)]}, "messages.1.content.0"),
    ({"messages": [SAID, {"role": "user", "content": 5}]}, "messages.1.content"),
    ({"messages": [SAID, {"role": "user"}]}, "messages.1.content"),
    ({"messages": [SAID, {"role": "robot", "content": "x"}]}, "messages.1.role"),
    ({"messages": 5}, "messages"),
    (
        {"messages": [user(CALL | {"input": "x"})]},
        "messages.0.content.0.input",
    ),
    (
        {"messages": [SAID, user(answered(TEXT, {"type": "text", "text": 5}))]},
        "messages.1.content.0.content.1.text",
    ),
    (
        {"messages": [user(within({"type": "text", "text": 5}))]},
        "messages.0.content.0.source.content.1.text",
    ),
    ({"messages": [SAID, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm"}]}]}, "messages.1.content.0.signature"),
    ({"messages": [user(TEXT | {"cache_control": {"type": "x"}})]},
     "messages.0.content.0.cache_control.type"),
    ({"system": [TEXT, {"type": "text", "text": 5}]}, "system.1.text"),
    ({"system": 5}, "system"),
    ({"tools": [TOOL, TOOL | {"input_schema": 5}]}, "tools.1.input_schema"),
    ({"tools": [TOOL, TOOL | {"name": "a b"}]}, "tools.1.name"),
    ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "a", "configs": {"b": {"enabled": 5}}}]},
     "tools.0.configs.b.enabled"),
    ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "a"}]}, "tools.0.mcp_server_name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "none"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"mcp_servers": [{"type": "url", "name": 5}]}, "mcp_servers.0.name"),
    ({"mcp_servers": [{"type": "url", "name": "a\0"}]}, "mcp_servers.0.name"),
    ({"model": 5}, "model"),
]  # fmt: skip
"""What does not fit the wire models, and the path that the error must name."""

CONVERTED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [SAID, user(TEXT, IMAGE)]}, "messages.1.content.1.source.data"),
    ({"messages": [SAID, user(IMAGE)], "system": "Be brief."}, "messages.1.content.0.source.data"),
    ({"messages": [SAID, MADE, user(TEXT), user(TEXT, IMAGE)]}, "messages.3.content.1.source.data"),
    ({"messages": [SAID, MADE, {"role": "system", "content": "x"}, user(IMAGE)]},
     "messages.3.content.0.source.data"),
    ({"messages": [user(by_url("image", "ftp://a/b.png"))]}, "messages.0.content.0.source.url"),
    ({"messages": [user(by_url("document", "ftp://a/b"))]}, "messages.0.content.0.source.url"),
    ({"messages": [SAID, user(GARBAGE)]}, "messages.1.content.0.source.data"),
    ({"messages": [user(within(GARBAGE))]}, "messages.0.content.0.source.content.1.source.data"),
    ({"messages": [user({"type": "document", "source": {"type": "file", "file_id": "file-no"}})]},
     "messages.0.content.0.source.file_id"),
    ({"messages": [user({"type": "document", "source": {"type": "file", "file_id": "a\0"}})]},
     "messages.0.content.0.source.file_id"),
    ({"messages": [SAID, {"role": "assistant", "content": [CALL]}, user(answered(TEXT, IMAGE))]},
     "messages.2.content.0.content.1.source.data"),
    ({"messages": [SAID, user(TEXT, RESULT)]}, "messages.1.content.1"),
    ({"messages": [SAID, {"role": "assistant", "content": [TEXT, CALL]}, user(TEXT)]},
     "messages.1.content.1"),
    ({"messages": [SAID, {"role": "assistant", "content": [TEXT, CALL]}]}, "messages.1.content.1"),
    ({"messages": [SAID, {"role": "assistant", "content": [IMAGE]}]}, "messages.1.content.0"),
    ({"messages": [SAID, user(TEXT, CALL)]}, "messages.1.content.1"),
    ({"messages": [SAID, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm", "signature": "forged"}]}]},
     "messages.1.content.0.signature"),
    ({"messages": [SAID, {"role": "assistant", "content": [
        {"type": "mcp_tool_result", "tool_use_id": "a", "content": "x"}]}]},
     "messages.1.content.0.tool_use_id"),
    ({"tools": [TOOL, TOOL | {"name": "b", "input_schema": LARGE}]}, "tools.1.input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"mcp_servers": [{"type": "url", "name": "a", "url": "http://a.example/mcp"}]},
     "mcp_servers.0.url"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "a"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"},
      "tools": [{"type": "code_execution_20250522", "name": "code_execution"}]}, "tool_choice"),
    ({"output_config": {"format": {"type": "json_schema", "schema": LARGE}}},
     "output_config.format"),
    ({"output_format": {"type": "json_schema", "schema": LARGE}}, "output_format"),
    ({"model": "none"}, "model"),
]  # fmt: skip
"""What is refused when the request was converted, and the path in what the client has sent."""

GENERATING: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"stop_sequences": ["a", ""]}, "stop_sequences.1"),
    ({"stop_sequences": ["a", 5]}, "stop_sequences.1"),
    ({"metadata": {"user_id": "a\0b"}}, "metadata.user_id"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    ({"temperature": 9}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"service_tier": "gold"}, "service_tier"),
    # The worker, and the server of a model, refuse these.
    ({"model": "seeing", "messages": [SAID, user(TEXT, source(data="AAAA"))]},
     "messages.1.content.1.source.data"),
    ({"messages": [SAID, user(by_url("document", "http://127.0.0.1:9/a"))]},
     "messages.1.content.0.source.url"),
    ({"tools": [TOOL | {"input_schema": {"type": "ghost"}}]}, "tools.0.input_schema"),
    ({"tools": [TOOL, TOOL | {"name": "b", "input_schema": {
        "type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}}]},
     "tools.1.input_schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "ghost"}}}},
     "output_config.format.schema"),
    ({"output_format": {"type": "json_schema", "schema": {"type": "ghost"}}},
     "output_format.schema"),
    ({"messages": [SAID, MADE], "output_config": {
        "format": {"type": "json_schema", "schema": {"type": "object"}}}},
     "messages.1.content"),
]  # fmt: skip
"""The same for ``/v1/messages`` alone."""


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object, once the envelope has been checked."""
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["request-id"]
    body = answer.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    error: dict[str, Any] = body["error"]
    assert set(error) <= {"type", "message", "details"}
    assert error["message"]
    return error


def names(error: dict[str, Any]) -> str:
    """The path that the message of an error begins with."""
    path, separator, why = error["message"].partition(": ")
    assert separator, error
    assert why
    return str(path)


def without_none(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


@pytest.mark.parametrize(("change", "path"), [*INVALID, *CONVERTED])
@pytest.mark.parametrize("url", ["/v1/messages", "/v1/messages/count_tokens"])
def test_an_error_begins_with_the_path_of_its_field(
    http: httpx.Client, url: str, change: dict[str, Any], path: str
) -> None:
    body = {**BASE, **change}
    if url.endswith("tokens"):
        del body["max_tokens"]
    status = 404 if change == {"model": "none"} else 400
    error = refusal(http.post(url, json=body), status)
    assert names(error) == path


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("change", "path"), GENERATING)
def test_an_error_of_a_generation_begins_with_the_path_of_its_field(
    http: httpx.Client, change: dict[str, Any], path: str, stream: bool
) -> None:
    body = without_none({**BASE, **change, "stream": stream})
    error = refusal(http.post("/v1/messages", json=body))
    assert (names(error), error["type"]) == (path, "invalid_request_error")


def test_what_is_missing_and_of_the_wrong_type_is_told_as_by_anthropics_api(
    http: httpx.Client,
) -> None:
    missing = http.post("/v1/messages", json={"model": "demo", "messages": [SAID]})
    assert refusal(missing)["message"] == "max_tokens: Field required"
    wrong = http.post("/v1/messages", json={**BASE, "messages": [{"role": "user", "content": 5}]})
    message = "messages.0.content: expected an array, but got an integer instead."
    assert refusal(wrong)["message"] == message


def test_the_official_client_has_the_path(stack: ServedStack) -> None:
    with anthropic.Anthropic(base_url=stack.url, api_key=stack.key, max_retries=0) as client:
        said: Any = [SAID, user(source(media_type=5))]
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(model="demo", max_tokens=9, messages=said)
        body: Any = caught.value.body
        assert names(body["error"]) == "messages.1.content.0.source.media_type"
        assert caught.value.request_id == caught.value.response.headers["request-id"]
        tools: Any = [TOOL, TOOL | {"input_schema": 5}]
        with pytest.raises(anthropic.BadRequestError) as counted:
            client.messages.count_tokens(model="demo", messages=said[:1], tools=tools)
        body = counted.value.body
        assert names(body["error"]) == "tools.1.input_schema"


HOSTILE = ["a'b", 'a"b', "a\nb: c", "a\r\nset-cookie: x", "a`b", "\u202eabc", "x" * 1_000_000]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_name_is_bounded_and_cleaned(http: httpx.Client, name: str) -> None:
    toolset = {"type": "mcp_toolset", "mcp_server_name": "a", "configs": {name: {"enabled": 5}}}
    error = refusal(http.post("/v1/messages", json={**BASE, "tools": [toolset]}))
    assert len(error["message"]) < 300
    assert error["message"].isprintable()
    assert error["message"].startswith("tools.0.configs.")
    assert ".enabled: expected a boolean" in error["message"]
    ids = user({**RESULT, "tool_use_id": name})
    error = refusal(http.post("/v1/messages", json={**BASE, "messages": [ids]}))
    assert len(error["message"]) < 400
    assert error["message"].isprintable()
    chat = {"model": "demo", "messages": [SAID], "metadata": {name[:64]: 5}}
    told = http.post("/v1/chat/completions", json=chat).json()["error"]
    assert told["param"].startswith("metadata.")
    assert (told["message"] + told["param"]).isprintable()


def nested(levels: int) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "text", "text": 5}
    for _ in range(levels):
        block = {"type": "document", "source": {"type": "content", "content": [block]}}
    return block


def test_deep_and_many_errors_are_one_short_error(http: httpx.Client) -> None:
    deep = "[" * 2_000 + "]" * 2_000
    text = json.dumps({**BASE, "messages": "deep"}).replace('"deep"', deep)
    headers = {"content-type": "application/json"}
    assert "depth" in refusal(http.post("/v1/messages", content=text, headers=headers))["message"]
    error = refusal(http.post("/v1/messages", json={**BASE, "messages": [user(nested(40))]}))
    path = f"messages.0.content.0{'.source.content.0' * 40}.text"
    assert names(error) == path
    many = {**BASE, "messages": [{"role": "x"}] * 25_000}
    error = refusal(http.post("/v1/messages", json=many))
    assert names(error).startswith("messages.0.")
    assert len(error["message"]) < 300
    wrong = {**BASE, "stop_sequences": [5] * 900_000}
    error = refusal(http.post("/v1/messages", json=wrong))
    assert names(error) == "stop_sequences.0"
    assert http.post("/v1/messages", json={**BASE, "max_tokens": 1}).status_code == 200


# --- Envelopes ------------------------------------------------------------------------------------

VERSION = {"anthropic-version": "2023-06-01"}
OPENAI = {"message", "type", "param", "code"}


@pytest.fixture
def anyone(stack: ServedStack) -> Iterator[httpx.Client]:
    """A client without a key."""
    with httpx.Client(base_url=stack.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize(
    ("method", "url", "status", "kind"),
    [
        ("GET", "/v1/models/none", 404, "not_found_error"),
        ("POST", "/v1/models", 405, "invalid_request_error"),
        ("DELETE", "/v1/models/demo", 405, "invalid_request_error"),
        ("GET", "/v1/models?limit=0", 400, "invalid_request_error"),
        ("GET", "/v1/models?limit=many", 400, "invalid_request_error"),
        ("GET", "/v1/models?after_id=none", 400, "invalid_request_error"),
        ("GET", "/v1/models?before_id=none", 400, "invalid_request_error"),
        ("GET", "/v1/models?after_id=%00", 400, "invalid_request_error"),
    ],
)
def test_errors_of_models_are_in_the_envelope_of_their_client(
    http: httpx.Client, method: str, url: str, status: int, kind: str
) -> None:
    assert refusal(http.request(method, url, headers=VERSION), status)["type"] == kind
    plain = http.request(method, url)
    if "?" in url and "%00" not in url:
        assert plain.status_code == 200  # Lists of OpenAI's have no pages of models.
    else:
        assert plain.status_code == status
        assert set(plain.json()["error"]) == OPENAI


def test_a_page_of_models_names_the_field_that_is_wrong(http: httpx.Client) -> None:
    for query in ("limit=0", "limit=many", "after_id=none", "before_id=none"):
        error = refusal(http.get(f"/v1/models?{query}", headers=VERSION))
        assert names(error) == query.partition("=")[0]


@pytest.mark.parametrize("url", ["/v1/models", "/v1/models/demo"])
@pytest.mark.parametrize("key", [None, "sk-wrong-but-long-enough"])
def test_a_bad_key_is_told_in_the_envelope_of_the_client(
    anyone: httpx.Client, url: str, key: str | None
) -> None:
    headers = {} if key is None else {"x-api-key": key}
    answer = anyone.get(url, headers={**headers, **VERSION})
    assert refusal(answer, 401)["type"] == "authentication_error"
    plain = anyone.get(url, headers=headers)
    assert plain.status_code == 401
    assert set(plain.json()["error"]) == OPENAI


def test_the_official_client_pages_through_the_models(stack: ServedStack) -> None:
    with anthropic.Anthropic(base_url=stack.url, api_key=stack.key, max_retries=0) as client:
        whole = [model.id for model in client.models.list()]
        paged = client.models.list(limit=2)
        assert [model.id for model in paged.data] == whole[:2]
        assert paged.has_more
        assert [model.id for model in paged] == whole
        back = client.models.list(limit=2, before_id=whole[4])
        assert [model.id for model in back.data] == whole[2:4]
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.models.retrieve("none")
        assert caught.value.request_id is not None
        assert caught.value.type == "not_found_error"


@pytest.mark.parametrize("url", ["/v1/messages", "/v1/messages/count_tokens"])
def test_what_is_refused_before_the_view_is_in_the_envelope(
    anyone: httpx.Client, http: httpx.Client, url: str
) -> None:
    assert refusal(anyone.post(url, json=BASE), 401)["type"] == "authentication_error"
    wrong = {"x-api-key": "sk-wrong-but-long-enough"}
    assert refusal(anyone.post(url, json=BASE, headers=wrong), 401)
    assert refusal(http.get(url), 405)["type"] == "invalid_request_error"
    kind = {"content-type": "text/plain"}
    assert refusal(http.post(url, content=b"x", headers=kind), 415)
    kind = {"content-type": "application/json"}
    assert refusal(http.post(url, content=b"{", headers=kind))
    assert refusal(http.post(url, content=b"[]", headers=kind))
    assert refusal(http.post(f"{url}?a=%00", json=BASE))
    large = http.post(url, content=b"x" * (21 * 1024 * 1024), headers=kind)
    assert refusal(large, 413)["type"] == "request_too_large"
    again = {b"idempotency-key": "é".encode()}
    error = refusal(http.post(url, json=BASE, headers=again))
    assert names(error) == "Idempotency-Key"
    assert refusal(http.post("/v1/messages/none/other", json={}), 404)["type"] == "not_found_error"


def test_a_key_that_is_sent_with_another_request_is_refused_in_the_envelope(
    http: httpx.Client,
) -> None:
    headers = {"idempotency-key": "messages-errors"}
    body = {**BASE, "model": "scripted"}
    assert http.post("/v1/messages", json=body, headers=headers).status_code == 200
    error = refusal(http.post("/v1/messages", json={**body, "max_tokens": 8}, headers=headers))
    assert names(error) == "Idempotency-Key"


def test_limits_and_scopes_are_refused_in_the_envelope(stack: ServedStack) -> None:
    with make_key(stack, requests_per_minute=1).http(stack) as http:
        said = {**BASE, "messages": [{"role": "user", "content": script({"text": "a"})}]}
        said["model"] = "scripted"
        assert http.post("/v1/messages", json=said).status_code == 200
        assert refusal(http.post("/v1/messages", json=said), 429)["type"] == "rate_limit_error"
    with make_key(stack, "usage:read").http(stack) as http:
        for url in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"):
            assert refusal(http.post(url, json=BASE), 403)["type"] == "permission_error"
        answer = http.get("/v1/models", headers=VERSION)
        assert refusal(answer, 403)["type"] == "permission_error"
    with make_key(stack, allowed_models=["scripted"]).http(stack) as http:
        error = refusal(http.post("/v1/messages", json=BASE), 403)
        assert names(error) == "model"


@pytest.mark.parametrize("url", ["", "/none", "/none/cancel", "/none/results"])
def test_batches_of_messages_have_the_envelope(
    http: httpx.Client, anyone: httpx.Client, url: str
) -> None:
    url = f"/v1/messages/batches{url}"
    method = "POST" if url.endswith("cancel") else "GET"
    assert refusal(anyone.request(method, url), 401)["type"] == "authentication_error"
    if url.endswith("batches"):
        for query in ("limit=0", "limit=x", "after_id=none", "before_id=none"):
            assert names(refusal(http.get(f"{url}?{query}"))) == query.partition("=")[0]
    else:
        assert refusal(http.request(method, url), 404)["type"] == "not_found_error"
    assert refusal(http.put(url, json={}), 405)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("requests", "path"),
    [
        (5, "requests"),
        ([{"params": {}}], "requests.0.custom_id"),
        ([{"custom_id": "a", "params": {}}, {"custom_id": "b"}], "requests.1.params"),
        ([{"custom_id": "a", "params": {}}, {"custom_id": "a", "params": {}}],
         "requests.1.custom_id"),
    ],
)  # fmt: skip
def test_a_bad_entry_of_a_batch_is_named(http: httpx.Client, requests: Any, path: str) -> None:
    error = refusal(http.post("/v1/messages/batches", json={"requests": requests}))
    assert names(error) == path


def test_a_failure_before_the_first_event_is_a_status_and_after_it_an_event(
    http: httpx.Client,
) -> None:
    def asked(*steps: dict[str, Any]) -> dict[str, Any]:
        said = {"role": "user", "content": script(*steps)}
        return {**BASE, "model": "scripted", "messages": [said], "stream": True}

    refused = http.post("/v1/messages", json=asked({"fail": "boom"}))
    assert refusal(refused, 500)["type"] == "api_error"
    broken = http.post("/v1/messages", json=asked({"text": "a"}, {"fail": "boom"}))
    *_, last = [part for part in broken.text.split("\n\n") if part]
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_a_head_that_is_too_long_is_refused_in_the_envelope_of_its_path(
    stack: ServedStack, path: str
) -> None:
    for url, headers, status in (
        (f"{path}?{'x' * 20_000}", {}, 414),
        (path, {"x-long": "y" * 20_000}, 431),
    ):
        answer = httpx.get(f"{stack.url}{url}", headers=headers, timeout=60)
        assert answer.status_code == status
        assert (answer.json().get("type") == "error") is (path == "/v1/messages")
