"""What would take llama.cpp past the end of its stack is refused before it sees it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from inference_site.domain.errors import InvalidRequest
from inference_site.domain.messages import Message
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import Constraint, GenerationRequest, Tool
from worker.engines.llama_cpp.payload import encode_chat

SPEC = ModelSpec("m", "llama_cpp")


def _encode(**fields: Any) -> bytes:
    return encode_chat(GenerationRequest("m", messages=(Message("user", "hi"),), **fields), SPEC)


def _chain(length: int) -> dict[str, Any]:
    links = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


def test_schemas_may_refer_to_each_other() -> None:
    assert _encode(constraint=_schema(_chain(900)))


def test_a_chain_of_references_ends_before_the_stack_does() -> None:
    with pytest.raises(InvalidRequest):
        _encode(constraint=_schema(_chain(1_001)))
    with pytest.raises(InvalidRequest):
        _encode(tools=(Tool("f", None, _chain(1_001)),))


def test_references_in_a_text_are_no_references() -> None:
    text = orjson.dumps(_chain(2_000)).decode()
    assert encode_chat(GenerationRequest("m", messages=(Message("user", text),)), SPEC)


def test_the_groups_of_a_grammar_are_bounded() -> None:
    assert _encode(constraint=_groups(5_000))
    with pytest.raises(InvalidRequest) as refused:
        _encode(constraint=_groups(5_001))
    assert refused.value.param == "grammar"


def _schema(schema: dict[str, Any]) -> Constraint:
    return Constraint("json_schema", orjson.dumps(schema).decode(), "response_format")


def _groups(levels: int) -> Constraint:
    return Constraint("gbnf", "root ::= " + "(" * levels + '"a"' + ")" * levels, "grammar")
