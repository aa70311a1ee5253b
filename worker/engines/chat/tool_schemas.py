"""JSON schemas of tools' arguments, as they stand inside a larger schema.

Clients make them from classes (pydantic, zod), with ``$defs`` and references to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inference_site.domain.request import Tool

Schema = dict[str, Any]
_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems"}
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_SINGLE = {"items", "additionalProperties", "not", "if", "then", "else", "contains"}
_OPENING = {"$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "unevaluatedProperties"}
"""Keywords beside which ``properties`` may not be all that an object has."""
_WHOLE = "whole-schema"
"""Name of the definition that a reference to the whole schema leads to."""


def arguments_schema(tool: Tool, pointer: str) -> Schema:
    """Return the schema of a forced call's arguments, for the place ``pointer`` of a schema.

    References lead to where the definitions are then. Objects that name their properties have no
    others, unless they say so: a model that is forced would invent some.
    """
    given = tool.parameters or {"properties": {}}
    return _closed({"type": "object", **_moved(given, pointer)})


def plain_schema(schema: Schema) -> Schema:
    """Return the same schema in the forms that llama.cpp reads.

    The schema ``true`` is ``{}``; ``prefixItems`` alone means what ``items: false`` beside it says
    elsewhere; and a reference to the whole leads to a definition.
    """
    plain = _plain(schema)
    named = _with_references(plain, _to_definition)
    if named == plain:
        return plain
    whole = {name: value for name, value in named.items() if name != "$defs"}
    return {**named, "$defs": {**named.get("$defs", {}), _WHOLE: whole}}


def _plain(schema: Schema) -> Schema:
    found = _with_parts(schema, _plain)
    if "prefixItems" in found and found.get("items") is False:
        del found["items"]
    return found


def _to_definition(reference: str) -> str:
    return f"#/$defs/{_WHOLE}" if reference == "#" else reference


def _with_parts(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """Return a copy of the schema, each of the schemas directly inside it changed."""

    def part(value: Any) -> Any:
        return change(value) if isinstance(value, dict) else {} if value is True else value

    found = dict(schema)
    for name, value in schema.items():
        if name in _SINGLE and isinstance(value, dict):
            found[name] = change(value)
        elif name in _LISTS and isinstance(value, list):
            found[name] = [part(each) for each in value]
        elif name in _BY_NAME and isinstance(value, dict):
            found[name] = {key: part(each) for key, each in value.items()}
    return found


def _moved(schema: Schema, pointer: str) -> Schema:
    """Return the schema with its references leading from the place it will have."""
    return _with_references(
        schema,
        lambda reference: pointer + reference[1:] if _is_pointer(reference) else reference,
    )


def _is_pointer(reference: str) -> bool:
    return reference == "#" or reference.startswith("#/")


def _with_references(schema: Schema, change: Callable[[str], str]) -> Schema:
    """Return the schema with each reference in it changed."""
    found = _with_parts(schema, lambda part: _with_references(part, change))
    if isinstance(reference := found.get("$ref"), str):
        found["$ref"] = change(reference)
    return found


def _closed(schema: Schema) -> Schema:
    found = _with_parts(schema, _closed)
    if "properties" in found and not _OPENING & found.keys():
        found.setdefault("additionalProperties", False)
    return found
