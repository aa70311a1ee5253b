"""What holds for every body that anybody could send: it is taken, or it is a clear 400."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache
from io import BytesIO
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.json_bodies import JsonParser
from inference_site.gateway.api.payload import WireRequest, parse

EXAMPLES = settings().max_examples
_LONGEST_MESSAGE = 2_000
_DEEPEST = 4


def _requests(base: type[WireRequest] = WireRequest) -> Iterator[type[WireRequest]]:
    """Every wire model of requests of the API apps."""
    for app in ("completions.wire", "completions.views", "responses_api.wire"):
        for module in pkgutil.iter_modules(importlib.import_module(app).__path__, f"{app}."):
            importlib.import_module(module.name)
    for model in base.__subclasses__():
        if model.__module__.startswith(("completions", "responses_api")):
            yield model
        yield from _requests(model)


def _named_in(annotation: Any) -> Iterator[type[WireRequest]]:
    if isinstance(annotation, type) and issubclass(annotation, WireRequest):
        yield annotation
    for part in get_args(annotation):
        yield from _named_in(part)


def _parts(model: type[WireRequest]) -> set[type[WireRequest]]:
    """The models that a model has fields of."""
    fields = model.model_fields.values()
    return {part for field in fields for part in _named_in(field.annotation)} - {model}


_MODELS = set(_requests())
BODIES = _MODELS.difference(*map(_parts, _MODELS))
"""The models that are no part of another."""
ODD: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)  # What orjson decodes.
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "\0", "\ud7ff", "a" * 3_000, "auto", "user", "{", "0", "💥\u202e", "[]"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.just([])
    | st.just({})
    | st.just([[[{"type": ["text"]}]]])
)


_SIMPLE: dict[str, st.SearchStrategy[Any]] = {
    "object": st.dictionaries(st.text(max_size=5), ODD, max_size=3),
    "string": st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
    "integer": st.integers(-2, 3),
    "number": st.integers(-2, 3),
    "boolean": st.booleans(),
    "null": st.none(),
}


def _mostly(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 19).flatmap(lambda number: strategy if number else ODD)


def _values(schema: Any, definitions: Any, depth: int = 0) -> st.SearchStrategy[Any]:
    """Values that fit a JSON schema, with odd ones among them."""
    while isinstance(schema, dict) and "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return ODD
    if branches := schema.get("anyOf") or schema.get("oneOf"):
        return st.deferred(
            lambda: st.one_of(*(_values(one, definitions, depth + 1) for one in branches))
        )
    if fixed := schema.get("enum") or ([schema["const"]] if "const" in schema else None):
        return _mostly(st.sampled_from(fixed))
    if "properties" in schema:
        return _mostly(st.deferred(lambda: _objects(schema, definitions, depth)))
    if schema.get("type") == "array":
        return _mostly(st.lists(_values(schema.get("items"), definitions, depth + 1), max_size=3))
    return _mostly(_SIMPLE.get(schema.get("type", ""), ODD))


def _objects(schema: Any, definitions: Any, depth: int) -> st.SearchStrategy[Any]:
    """Objects that have the required fields and some others."""
    fields = {
        name: _values(one, definitions, depth + 1) for name, one in schema["properties"].items()
    }
    required = {name: fields.pop(name) for name in schema.get("required", ())}
    return st.fixed_dictionaries(required, optional=fields)


@cache
def _schema(model: type[WireRequest]) -> dict[str, Any]:
    return model.model_json_schema()


def _taken(call: Callable[[], Any]) -> Any:
    """What a call returns; None, if it raises an error that is a clear 400."""
    try:
        return call()
    except InvalidRequestError as exc:
        error = exc
    told = json.loads(error.body)["error"]
    assert error.status == 400
    assert 0 < len(told["message"]) < _LONGEST_MESSAGE
    assert told["param"] is None or isinstance(told["param"], str)
    return None


@pytest.mark.parametrize("model", sorted(BODIES, key=str))
@given(data=st.data())
@settings(max_examples=EXAMPLES // 4, deadline=None)
def test_any_json_is_a_request_or_a_clear_400(
    model: type[WireRequest], data: st.DataObject
) -> None:
    schema = _schema(model)
    body = data.draw(_values(schema, schema.get("$defs", {})))
    request = _taken(lambda: parse(model, body))
    assert request is None or all(isinstance(name, str) for name in request.ignored_params)


@given(
    st.binary(max_size=200) | st.text(alphabet='{}[]":,0e-\\u\0 tn', max_size=100).map(str.encode)
)
def test_any_bytes_are_json_or_a_clear_400(content: bytes) -> None:
    _taken(lambda: JsonParser().parse(BytesIO(content)))
