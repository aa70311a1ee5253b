"""The OpenAPI document, and the API held against it with requests made up from it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import httpx
import jsonschema_rs
import pytest
import requests
from django.urls import URLPattern, URLResolver, get_resolver

from inference_site.accounts.models import Scope
from inference_site.gateway.api.field_descriptions import FIELDS
from inference_site.gateway.api.openapi import document as document_of_this_site
from tests.e2e.keys import make_key
from tests.served_stack import ServedStack

METHODS = ("get", "post", "put", "patch", "delete")
CHAT = "/v1/chat/completions"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "Hello"}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    {"role": "user", "content": "Please."},
]


@pytest.fixture(scope="module")
def document(stack: ServedStack) -> dict[str, Any]:
    """The document, as anybody gets it."""
    answer = httpx.get(f"{stack.url}/v1/openapi.json", timeout=60)  # It is built now.
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def test_the_document_is_valid_openapi(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    assert document == json.loads(document_of_this_site())
    # The schema of OpenAPI 3.1; what drf-spectacular holds documents against takes six seconds.
    schema = files("drf_spectacular.validation").joinpath("openapi_3_1_schema.json").read_text()
    jsonschema_rs.validate(json.loads(schema), document)


def test_every_route_of_the_api_is_described(document: dict[str, Any]) -> None:
    described = {(path, m) for path, item in document["paths"].items() for m in item}
    api = ("/v1/", "/api/", "/health", "/infill", "/version", "/lora-adapters")
    routes = {route for route in _routes() if route[0].startswith(api)}
    assert described == routes | {("/metrics", "get")}


def test_every_description_has_a_summary(document: dict[str, Any]) -> None:
    for path, method, operation in _operations(document):
        assert operation["summary"], (path, method)
        assert operation["operationId"], (path, method)


def test_every_field_is_described(document: dict[str, Any]) -> None:
    names, undescribed = set(), []
    for component, schema in document["components"]["schemas"].items():
        model = re.sub(r"^.*__|-(Input|Output)$", "", component)
        for name, field in schema.get("properties", {}).items():
            names |= {name, f"{model}.{name}"}
            if not field.get("description"):
                undescribed.append((component, name))
    for path, method, operation in _operations(document):
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "query":
                names.add(parameter["name"])
                if not parameter.get("description"):
                    undescribed.append((f"{method} {path}", parameter["name"]))
    assert not undescribed
    assert FIELDS.keys() <= names


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("BatchObject.expires_at", "completion window"),
        ("StoreObject.expires_at", "unless it is used"),
        ("ProjectKey.expires_at", "key"),
        ("OllamaLoadedModel.expires_at", "model is unloaded"),
        ("RequestCounts.completed", "requests"),
        ("FileCounts.completed", "files"),
        ("UsageBucket_Costs_.results", "costs"),
        ("UsageBucket_ImagesUsage_.results", "usage"),
        ("Ranking.results", "documents"),
        ("ChatCompletion.moderation", "results"),
        ("IndexingError.message", "file"),
    ],
)
def test_a_name_with_several_meanings_is_described_for_each_model(
    document: dict[str, Any], field: str, words: str
) -> None:
    model, _, name = field.partition(".")
    schema = document["components"]["schemas"][model]
    assert words in schema["properties"][name]["description"]


def test_what_needs_a_key_says_so_and_is_refused_without(
    stack: ServedStack, document: dict[str, Any]
) -> None:
    for path, method, operation in _operations(document):
        if path == "/metrics":  # It has a token of its own, which peers of this machine need not.
            continue
        answer = httpx.request(method, stack.url + re.sub(r"\{\w+\}", "x", path), timeout=60)
        needs_key = "security" in operation
        assert needs_key == (answer.status_code == 401) == ("401" in operation["responses"])


def test_streams_are_described_by_their_events(document: dict[str, Any]) -> None:
    content = document["paths"][CHAT]["post"]["responses"]["200"]["content"]
    event = content["text/event-stream"]["schema"]
    assert event == {"$ref": "#/components/schemas/ChatCompletionChunk"}


def test_the_page_for_people_needs_nothing_from_elsewhere(stack: ServedStack) -> None:
    with httpx.Client(base_url=stack.url, timeout=60) as anybody:
        page = anybody.get("/docs")
        assert page.status_code == 200
        sources = set(re.findall(r'(?:src|href)="([^"]+)"', page.text)) - {"/admin/"}
        assert len(sources) >= 3
        for source in sources:
            assert source.startswith(("/static/", "/docs?"))
            part = anybody.get(html.unescape(source))
            assert part.status_code == 200
            if source.startswith("/docs?"):
                assert "/v1/openapi.json" in part.text


@pytest.fixture(scope="module")
def stored(stack: ServedStack, key: str) -> dict[str, str]:
    """Ids of stored completions for each method: what one deletes, another cannot read."""
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=stack.url, headers=headers, timeout=60) as http:
        body = {"model": "demo", "messages": MESSAGES, "max_tokens": 2, "store": True}
        ids = [http.post(CHAT, json=body).json()["id"] for _ in range(2)]
    return {"GET": ids[0], "POST": ids[0], "DELETE": ids[1]}


@pytest.fixture(scope="module")
def key(stack: ServedStack) -> str:
    """A key that opens everything but the models: others need them."""
    return make_key(stack, *(set(Scope.values) - {Scope.MODELS})).secret


@pytest.mark.timeout(900)  # Each operation is a subtest of it.
@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=pytest.mark.stress)])
def test_every_answer_is_as_described(
    stack: ServedStack,
    document: dict[str, Any],
    stored: dict[str, str],
    key: str,
    subtests: pytest.Subtests,
    is_short: bool,
) -> None:
    from tests.contract.made_up_requests import MadeUpRequests

    headers = {"Authorization": f"Bearer {key}"}
    with requests.Session() as session:
        session.trust_env = False  # It would look for a proxy before each request.
        sent = {"base_url": stack.url, "headers": headers, "session": session}
        made = MadeUpRequests(document, stored, is_short, **sent)
        for path, method, _ in _operations(document):
            with subtests.test(path, method=method):
                made.ask(path, method)


ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello"},
    {"type": "local_shell_call_output", "id": "call_1", "output": "done"},
    {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
    {"type": "of_tomorrow", "depth": [1]},
]


def test_items_that_clients_bring_are_described(
    stack: ServedStack, document: dict[str, Any]
) -> None:
    with stack.http() as http:
        made = http.post("/v1/conversations", json={"items": ITEMS}).json()["id"]
        listed = http.get(f"/v1/conversations/{made}/items").json()
    assert len(listed["data"]) == len(ITEMS)
    path = "/v1/conversations/{conversation_id}/items"
    _validate(document, path, "get", 200, listed)
    del listed["data"][-1]["content"]  # A message has its own form.
    with pytest.raises(jsonschema_rs.ValidationError):
        _validate(document, path, "get", 200, listed)


def test_an_error_with_a_partial_answer_is_described(
    stack: ServedStack, document: dict[str, Any]
) -> None:
    content = json.dumps([{"text": "half"}, {"fail": "it breaks"}])
    asked = {"model": "scripted", "messages": [{"role": "user", "content": content}]}
    with stack.http() as http:
        answer = http.post(CHAT, json=asked)
    assert answer.json()["error"]["partial_response"]["choices"]
    _validate(document, CHAT, "post", answer.status_code, answer.json())


def _validate(
    document: dict[str, Any], path: str, method: str, status: int, answer: dict[str, Any]
) -> None:
    """Raise ValidationError if an answer is not as described."""
    content = document["paths"][path][method]["responses"][str(status)]["content"]
    schema = {**content["application/json"]["schema"], "components": document["components"]}
    jsonschema_rs.validate(schema, answer)


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method in item:
            yield path, method, item[method]


def _routes(
    patterns: list[URLPattern | URLResolver] | None = None, prefix: str = "/"
) -> Iterator[tuple[str, str]]:
    """Every path of the site's views and its methods."""
    for pattern in get_resolver().url_patterns if patterns is None else patterns:
        path = prefix + re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", str(pattern.pattern))
        if isinstance(pattern, URLResolver):
            yield from _routes(pattern.url_patterns, path)
        else:
            view = getattr(pattern.callback, "cls", None)
            yield from ((path, method) for method in METHODS if hasattr(view, method))
