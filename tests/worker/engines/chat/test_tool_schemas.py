"""Schemas of tools inside a larger one: references lead to the same definitions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_site.core.domain.request import Tool
from worker.engines.chat.tools import arguments_schema, call_schema, plain_schema

NODE: dict[str, Any] = {
    "$defs": {"Node": {"properties": {"next": {"$ref": "#/$defs/Node"}, "up": {"$ref": "#"}}}},
    "properties": {"first": {"$ref": "#/$defs/Node"}},
}


def references(schema: Any) -> list[str]:
    """All references of a schema, in their order."""
    if isinstance(schema, list):
        return [found for part in schema for found in references(part)]
    if not isinstance(schema, dict):
        return []
    own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
    return own + [found for part in schema.values() for found in references(part)]


def at(schema: Any, pointer: str) -> Any:
    """What a JSON pointer leads to."""
    for name in pointer.split("/")[1:]:
        schema = schema[int(name)] if isinstance(schema, list) else schema[name]
    return schema


@given(st.integers(1, 4))
def test_references_lead_to_the_definitions_of_their_own_tool(tools: int) -> None:
    schema = call_schema(tuple(Tool(f"t{number}", None, NODE) for number in range(tools)))
    assert len(references(schema)) == 3 * tools
    for reference in references(schema):
        found = at(schema, reference)
        assert found.keys() >= {"properties"}
        assert found["properties"].keys() in ({"next", "up"}, {"first"})


def test_what_is_no_schema_is_left_as_it_is() -> None:
    schema = {
        "properties": {"$ref": {"type": "string"}, "a": {"const": {"$ref": "#"}}},
        "$ref": "other.json",
    }
    moved = arguments_schema(Tool("t", None, schema), "#/x")
    assert moved["properties"] == schema["properties"]
    assert moved["$ref"] == "other.json"


def test_references_of_a_part_with_a_name_are_relative_to_it() -> None:
    part = {"$id": "https://a.test/b", "$defs": {"n": {}}, "items": {"$ref": "#/$defs/n"}}
    schema = {"properties": {"part": part, "own": {"$ref": "#/properties/part"}}}
    moved = arguments_schema(Tool("t", None, schema), "#/x")["properties"]
    assert moved == {"part": part, "own": {"$ref": "#/x/properties/part"}}


@pytest.mark.parametrize("name", ["const", "default", "enum", "examples"])
def test_a_property_may_have_the_name_of_a_keyword(name: str) -> None:
    schema = {"properties": {name: {"$id": "no URI", "default": {"$id": "no URI"}}}}
    found = arguments_schema(Tool("t", None, schema), "#")["properties"]
    assert found == {name: {"default": {"$id": "no URI"}}}


def test_an_object_of_named_properties_has_no_others_unless_it_says_so() -> None:
    inner: dict[str, Any] = {"properties": {"a": {}}}
    opened = {"properties": {"a": {}}, "additionalProperties": {"type": "string"}}
    combined = {"properties": {"a": {}}, "allOf": [inner]}
    schema = {"properties": {"inner": inner, "opened": opened, "combined": combined}}
    found = arguments_schema(Tool("t", None, schema), "#")["properties"]
    assert found["inner"]["additionalProperties"] is False
    assert found["opened"] == opened
    assert "additionalProperties" not in found["combined"]


def test_plain_schema_has_the_forms_that_llama_cpp_reads() -> None:
    pair = {"prefixItems": [{"type": "string"}, True], "items": False}
    plain = plain_schema({"properties": {"any": True, "pair": pair, "self": {"$ref": "#"}}})
    assert plain["properties"]["any"] == {}
    assert plain["properties"]["pair"] == {"prefixItems": [{"type": "string"}, {}]}
    whole = at(plain, plain["properties"]["self"]["$ref"])
    assert whole["properties"].keys() == {"any", "pair", "self"}
    assert plain_schema(NODE["$defs"]["Node"]["properties"]["next"]) == {"$ref": "#/$defs/Node"}


COLOUR = {"$ref": "#/$defs/Colour"}
LEAST, MOST = {"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 9}


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        ({"allOf": [COLOUR], "default": "red"}, {**COLOUR, "default": "red"}),
        ({"allOf": [LEAST, MOST], "title": "n"}, {**LEAST, **MOST, "title": "n"}),
        ({"items": {"allOf": [{"allOf": [LEAST]}]}}, {"items": LEAST}),
        ({"allOf": [LEAST, {"minimum": 2}]}, None),
        ({"allOf": [COLOUR, MOST]}, None),
        ({"allOf": [COLOUR], "properties": {}}, None),
        ({"properties": {"a": {"allOf": [LEAST]}, "b": {"$ref": "#/properties/a/allOf/0"}}}, None),
    ],
)
def test_plain_schema_has_the_parts_of_all_of_where_they_do_not_clash(
    schema: dict[str, Any], plain: dict[str, Any] | None
) -> None:
    """llama.cpp takes ``allOf`` for an object: an integer became ``{}``."""
    assert plain_schema(schema) == (plain or schema)


@pytest.mark.parametrize(
    ("pattern", "plain"),
    [
        (r"^\d{5}$", "^[0-9]{5}$"),
        (r"^[\w.-]+\s\d$", "^[A-Za-z0-9_.-]+[ ][0-9]$"),
        (r"^\+?\.\\d$", r"^\+?\.\\d$"),
        (r"^[^@\s]+\d$", None),
        (r"^a.\d$", None),
        ("^é+[éa]$", "^[é]+[éa]$"),
    ],
)
def test_plain_patterns_have_classes_in_place_of_escapes(pattern: str, plain: str | None) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert plain_schema(schema) == {**schema, "pattern": plain or pattern}
