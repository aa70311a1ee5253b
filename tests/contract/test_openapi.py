"""The OpenAPI document, and the API held against it with requests made up from it."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from django.urls import URLPattern, URLResolver, get_resolver
from drf_spectacular.validation import validate_schema
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.deserialization import DeserializationContext
from schemathesis.generation.hypothesis.builder import (
    HypothesisTestConfig,
    HypothesisTestMode,
    create_test,
)
from schemathesis.generation.meta import TestPhase
from schemathesis.generation.modes import GenerationMode

from inference_site.accounts.models import Scope
from inference_site.api.openapi import document as document_of_this_site
from tests.e2e.keys import make_key
from tests.served_stack import ServedStack

METHODS = ("get", "post", "put", "patch", "delete")
load_all_checks()
CHECKED: Any = CHECKS.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "unsupported_method",
        "allow_header_conformance",
    ]
)
KNOWN_BODIES = [
    *("/v1/chat/render", "/v1/completions", "/v1/tokenize"),
    *("/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens"),
    "/v1/conversations/{conversation_id}/items",
]
"""Their bodies are those of others again, or cost many generations each."""
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
    validate_schema(document)  # type: ignore[no-untyped-call]  # Untyped there.


def test_every_route_of_the_api_is_described(document: dict[str, Any]) -> None:
    described = {(path, m) for path, item in document["paths"].items() for m in item}
    routes = {route for route in _routes() if route[0].startswith(("/v1/", "/health", "/version"))}
    assert described == routes


def test_every_description_has_a_summary(document: dict[str, Any]) -> None:
    for path, method, operation in _operations(document):
        assert operation["summary"], (path, method)
        assert operation["operationId"], (path, method)


def test_what_needs_a_key_says_so_and_is_refused_without(
    stack: ServedStack, document: dict[str, Any]
) -> None:
    for path, method, operation in _operations(document):
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
        sources = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert len(sources) >= 3
        for source in sources:
            assert source.startswith(("/static/", "/docs?"))
            part = anybody.get(html.unescape(source))
            assert part.status_code == 200
            if source.startswith("/docs?"):
                assert "/v1/openapi.json" in part.text


@schemathesis.deserializer("text/event-stream")
def _events(_: DeserializationContext, response: schemathesis.Response) -> list[Any]:
    """The data of each event but the last; the document describes nothing else."""
    found = re.findall(rb"^data: (.*)$", response.content, re.MULTILINE)
    assert found[-1] == b"[DONE]"
    return [json.loads(data) for data in found[:-1]]


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
    told = Counter[tuple[str, ...]]()

    def ask(case: schemathesis.Case[Any]) -> None:
        if is_short and _is_told(case, told):
            return
        _aim(case, stored)
        case.call_and_validate(
            base_url=stack.url,
            headers={"Authorization": f"Bearer {key}"},
            checks=CHECKED,
            timeout=120,
            session=session,
        )

    generation = {"max-examples": 5 if is_short else 20, "deterministic": True, "database": "none"}
    config = schemathesis.Config.from_dict({"generation": generation})
    described = schemathesis.openapi.from_dict(document, config=config)
    with requests.Session() as session:
        session.trust_env = False  # It would look for a proxy before each request.
        for path, method, _ in _operations(document):
            has_all = not (is_short and path in KNOWN_BODIES)
            with subtests.test(path, method=method):
                _requests_for(described, described[path][method], ask, has_all)()


def _requests_for(
    described: Any, operation: Any, ask: Callable[[Any], None], has_all: bool
) -> Callable[[], None]:
    """Make requests of an operation up; return what asks them all.

    ``has_all`` adds one for each value that a place of it may have or may not have. They are made
    up when the test runs: the decorator of schemathesis makes them up in each process that collects
    tests, for ten seconds of a processor.
    """
    modes = [HypothesisTestMode.FUZZING, *[HypothesisTestMode.COVERAGE] * has_all]
    # As explicit ones: else those of the profile of all property tests come before them.
    explicit = settings(
        described.config.get_hypothesis_settings(), suppress_health_check=[HealthCheck.too_slow]
    )
    config = HypothesisTestConfig(
        project=described.config, modes=modes, settings=explicit, explicit_settings=explicit
    )
    made: Callable[[], None] = create_test(operation=operation, test_func=ask, config=config)
    return made


def _is_told(case: schemathesis.Case[Any], told: Counter[tuple[str, ...]]) -> bool:
    """Whether the same field of the same operation had a value as right or as wrong as this one.

    A field has many wrong values: of each type, and at each place inside it. What is wrong with
    each is said by tests of the requests; here the answer is looked at, which is alike for all.
    """
    meta = case.meta
    if meta is None or meta.phase.name is not TestPhase.COVERAGE:
        return False
    mode, what = meta.generation.mode.value, str(getattr(meta.phase.data, "description", ""))
    if mode == GenerationMode.NEGATIVE.value:
        what = re.split(r": | -> ", what)[0]
    kind = (case.operation.label, mode, what)
    told[kind] += 1
    return told[kind] > 1


def _aim(case: schemathesis.Case[Any], stored: dict[str, str]) -> None:
    """Have most requests reach a model and get a short answer; half of the ids are of something."""
    body: Any = case.body
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = ("demo", "scripted", body["model"])[len(body) % 3]
        known = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
        limits = known & {*body} or {"max_output_tokens" if "input" in body else "max_tokens"}
        for name in limits:
            if body.get(name) is None or (isinstance(body[name], int) and body[name] > 3):
                body[name] = 2
        if isinstance(body.get("prompt"), list):
            del body["prompt"][4:]
    for name, value in (case.path_parameters or {}).items():
        if name == "completion_id" and len(str(value)) % 2:
            case.path_parameters[name] = stored.get(case.method.upper(), "x")
        elif name == "model_id" and len(str(value)) % 2:
            case.path_parameters[name] = "demo"


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
