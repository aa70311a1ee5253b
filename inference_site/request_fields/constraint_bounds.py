"""Bounds on grammars and schemas, checked before a request is accepted.

They keep what is built of one small. What a grammar within them costs is found out by its trial in
the worker (``worker.engines.grammars``).
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from inference_site.api.parsers import is_too_deep
from inference_site.domain.request import Constraint, Tool, objects_in
from inference_site.errors.api_errors import InvalidRequestError

_MOST_GRAMMAR_BYTES = 65_536
_MOST_SCHEMA_BYTES = 262_144
_MOST_RULES = _MOST_ALTERNATIVES = _MOST_VALUES = _MOST_PROPERTIES = _MOST_REFERENCES = 1_000
_MOST_INLINE_SCHEMAS = 100
_VALUES = ("enum", "anyOf", "oneOf", "allOf", "prefixItems", "type")
"""Lists in a schema whose entries are counted."""
_INLINE_SCHEMA = re.compile(r"%json\s*")
_DECODER = json.JSONDecoder()


def checked(constraint: Constraint | None) -> Constraint | None:
    """Return the constraint. Raise InvalidRequestError naming its parameter past the bounds."""
    match constraint:
        case None:
            pass
        case Constraint(kind="json_object" | "json_schema", source=source, param=param):
            _check_size(source, _MOST_SCHEMA_BYTES, param)
            _check_schema(json.loads(source or "{}"), param)
        case Constraint(kind="llguidance", source=source, param=param):
            _check_size(source, _MOST_SCHEMA_BYTES, param)
            decoded = json.loads(source)
            _check_schema(decoded, param)
            for part in objects_in(decoded):
                if isinstance(lark := part.get("lark_grammar"), str):
                    _check_grammar(lark, param)
        case Constraint(source=source, param=param):
            _check_grammar(source, param)
    return constraint


def encoded_schema(schema: dict[str, Any], param: str) -> str:
    """Return the schema's text. Raise InvalidRequestError for one that is too large.

    That is found out by orjson, in a seventh of the time: Python runs nothing else meanwhile.
    """
    try:
        size = len(orjson.dumps(schema))  # Never longer than the text: that has spaces.
    except orjson.JSONEncodeError:
        size = 0  # It holds what only JSON within JSON may hold, like a number of 100 digits.
    _check_count(size, _MOST_SCHEMA_BYTES, "bytes", param)
    return json.dumps(schema)


def check_tools(tools: tuple[Tool, ...], param: str) -> None:
    """Raise InvalidRequestError for tools with parameters past the bounds of schemas."""
    for tool in tools:
        _check_size(encoded_schema(tool.parameters, param), _MOST_SCHEMA_BYTES, param)
        _check_schema(tool.parameters, param)
        checked(tool.grammar)


def _check_grammar(source: str, param: str) -> None:
    """Check a grammar of any kind; signs in its texts are counted too, which does no harm."""
    _check_size(source, _MOST_GRAMMAR_BYTES, param)
    starts = [match.end() for match in _INLINE_SCHEMA.finditer(source)]
    _check_count(len(starts), _MOST_INLINE_SCHEMAS, "JSON schemas", param)
    colons, counted_to = source.count(":"), 0
    for start in starts:
        schema, end = _inline_schema(source, start)
        if is_too_deep(schema):
            _refuse(param, "no schema that is nested so deeply")
        _check_schema(schema, param)
        if start >= counted_to:
            colons, counted_to = colons - source.count(":", start, end), end
    colons -= source.count("::=")  # GBNF has two for a rule.
    _check_count(colons, _MOST_RULES, "rules", param)
    _check_count(source.count("|"), _MOST_ALTERNATIVES, "alternatives", param)


def _inline_schema(source: str, start: int) -> tuple[Any, int]:
    """Return the JSON of a Lark grammar that begins here, and its end; nothing for what is none."""
    try:
        return _DECODER.raw_decode(source, start)
    except (ValueError, RecursionError):
        return None, start


def _check_schema(schema: Any, param: str) -> None:
    values = properties = references = 0
    for inner in objects_in(schema):
        values += sum(len(inner[key]) for key in _VALUES if isinstance(inner.get(key), list))
        properties += len(named) if isinstance(named := inner.get("properties"), dict) else 0
        references += isinstance(inner.get("$ref"), str)
    _check_count(values, _MOST_VALUES, "values and alternatives", param)
    _check_count(properties, _MOST_PROPERTIES, "properties", param)
    _check_count(references, _MOST_REFERENCES, "references", param)


def _check_size(source: str, most: int, param: str) -> None:
    _check_count(len(source.encode()), most, "bytes", param)


def _check_count(count: int, most: int, what: str, param: str) -> None:
    if count > most:
        _refuse(param, f"at most {most} {what}; this one has {count}")


def _refuse(param: str, allowed: str) -> None:
    raise InvalidRequestError(
        f"Invalid '{param}': a grammar or schema may have {allowed}.", param=param
    )
