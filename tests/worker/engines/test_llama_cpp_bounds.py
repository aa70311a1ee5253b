"""Schemas that would keep llama.cpp's own grammar engine busy are refused before it sees them."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest

from inference_site.core.domain.errors import InvalidRequest
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import Constraint, GenerationRequest, Message, Tool
from tests.worker.engines.llama_payloads import chat_payload

SPEC = ModelSpec("m", "llama_cpp")


def _encode(**fields: Any) -> dict[str, Any]:
    return chat_payload(GenerationRequest("m", messages=(Message("user", "hi"),), **fields), SPEC)


def _optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(count)}}


def _pattern(pattern: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"p": {"type": "string", "pattern": pattern}}}


@pytest.mark.parametrize(
    "schema",
    [
        _optional(200),
        {"properties": {f"o{n}": _optional(20) for n in range(50)}, "required": ["o0"]},
        _pattern(r"^(\([0-9]{3}\))?[0-9]{3}-[0-9]{4}$"),
        _pattern(r"^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$"),
    ],
)
def test_ordinary_schemas_pass(schema: dict[str, Any]) -> None:
    assert _encode(constraint=_schema(schema))
    assert _encode(tools=(Tool("f", None, schema),))


@pytest.mark.parametrize(
    "schema",
    [
        _optional(201),
        {"properties": {f"o{n}": _optional(100) for n in range(5)}},
        _pattern("[a-z]?" * 200),
        _pattern("([a-z]?){60}"),
        _pattern("((a?){20}){20}"),
    ],
)
def test_schemas_that_take_long_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        _encode(constraint=_schema(schema))
    assert refused.value.param == "response_format"
    with pytest.raises(InvalidRequest) as refused:
        _encode(tools=(Tool("f", None, schema),))
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    "pattern",
    [
        "(?i)(?=a)" + "[\u0100-\U0001ffff]" * 2_000,
        "(?:" + "x" * 100_000 + "|" + "x" * 100_000 + ")(?=a)",
        "(?=" + "(" * 5_000 + ")" * 5_001,
        "(?=a{99999999999999})",
    ],
    ids=["ranges", "prefix", "depth", "count"],
)
def test_pattern_that_cannot_be_compiled_holds_no_worker(pattern: str) -> None:
    """Python compiles none of these within minutes, or without an error of its own kind."""
    before = time.monotonic()
    with pytest.raises(InvalidRequest, match="pattern") as refused:
        _encode(tools=(Tool("f", None, _pattern(pattern)),))
    assert refused.value.param == "tools"
    assert len(str(refused.value)) < 1_000
    assert time.monotonic() - before < 20


def test_pattern_that_only_llguidance_lacks_is_left_out() -> None:
    payload = _encode(tools=(Tool("f", None, _pattern("(?=a)b")),))
    [tool] = payload["tools"]
    assert tool["function"]["parameters"]["properties"]["p"] == {"type": "string"}


def _schema(schema: dict[str, Any]) -> Constraint:
    return Constraint("json_schema", orjson.dumps(schema).decode(), "response_format")
