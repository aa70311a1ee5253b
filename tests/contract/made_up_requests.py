"""Requests that schemathesis makes up from the OpenAPI document, and the checks of their answers.

Imported only by the test that asks them: of all that tests import schemathesis takes longest.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import schemathesis
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
    *("/v1/chat/render", "/v1/completions", "/v1/tokenize", "/infill"),
    "/v1/messages/count_tokens",
    *("/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
    *("/v1/conversations", "/v1/conversations/{conversation_id}/items"),
]
"""Their bodies are those of others again, or cost many generations each.

To make up one of each kind of item in each place of a conversation takes half of all the time.
"""


@schemathesis.deserializer("text/event-stream")
def _events(_: DeserializationContext, response: schemathesis.Response) -> list[Any]:
    """The data of each event but the last; the document describes nothing else."""
    found = re.findall(rb"^data: (.*)$", response.content, re.MULTILINE)
    assert found[-1] == b"[DONE]"
    return [json.loads(data) for data in found[:-1]]


@schemathesis.deserializer("application/x-ndjson")
def _lines(_: DeserializationContext, response: schemathesis.Response) -> list[Any]:
    """Each line."""
    return [json.loads(line) for line in response.content.splitlines()]


class MadeUpRequests:
    """All requests of the document, to be asked by operation.

    ``stored`` has an id of a stored completion for each method. The short form asks fewer.
    ``sent`` goes with each request.
    """

    def __init__(
        self, document: dict[str, Any], stored: dict[str, str], is_short: bool, **sent: Any
    ) -> None:
        self._stored, self._is_short, self._sent = stored, is_short, sent
        self._told = Counter[tuple[str, ...]]()
        examples = 2 if is_short else 20
        generation = {"max-examples": examples, "deterministic": True, "database": "none"}
        config = schemathesis.Config.from_dict({"generation": generation})
        self._described = schemathesis.openapi.from_dict(document, config=config)
        # As explicit ones: else those of the profile of all property tests come before them.
        self._settings = settings(
            self._described.config.get_hypothesis_settings(),
            suppress_health_check=[HealthCheck.too_slow],
        )

    def ask(self, path: str, method: str) -> None:
        """Ask every request of an operation. Raise if an answer is not as described.

        Beside those made at random there is one for each value that a place of it may have or may
        not have.
        """
        has_all = not (self._is_short and path in KNOWN_BODIES)
        modes = [HypothesisTestMode.FUZZING, *[HypothesisTestMode.COVERAGE] * has_all]
        config = HypothesisTestConfig(
            project=self._described.config,
            modes=modes,
            settings=self._settings,
            explicit_settings=self._settings,
        )
        operation: Any = self._described[path][method]

        def ask_one(case: schemathesis.Case[Any]) -> None:
            if not (self._is_short and _is_told(case, self._told)):
                _aim(case, self._stored)
                case.call_and_validate(checks=CHECKED, timeout=120, **self._sent)

        create_test(operation=operation, test_func=ask_one, config=config)()


def _is_told(case: schemathesis.Case[Any], told: Counter[tuple[str, ...]]) -> bool:
    """Whether the same field of the same operation had a value like this one, or two right ones.

    A field has many values: of each type, and at each place inside it. What is wrong with
    each is said by tests of the requests; here the answer is looked at, which is alike for all.
    """
    meta = case.meta
    if meta is None or meta.phase.name is not TestPhase.COVERAGE:
        return False
    mode, what = meta.generation.mode.value, str(getattr(meta.phase.data, "description", ""))
    operation = case.operation.label
    if mode == GenerationMode.NEGATIVE.value:
        what = re.split(r": | -> ", what)[0]
    else:
        field = (operation, mode, "field", *re.findall(r"'(\w+)'", what)[:1])
        told[field] += 1
        if len(field) > 3 and told[field] > 2:
            return True
    kind = (operation, mode, what)
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
        if case.path.startswith("/api/"):
            body["options"] = {"num_predict": 2}
        if isinstance(body.get("prompt"), list):
            del body["prompt"][4:]
    for name, value in (case.path_parameters or {}).items():
        if name == "completion_id" and len(str(value)) % 2:
            case.path_parameters[name] = stored.get(case.method.upper(), "x")
        elif name == "model_id" and len(str(value)) % 2:
            case.path_parameters[name] = "demo"
