"""Constraints: what an answer's text must match, from the fields of a request, within bounds.

The bounds on grammars and schemas keep what is compiled from them small. The worker finds out what
a grammar within them costs, by a trial (``worker.engines.grammars``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Protocol

import orjson

from inference_site.core.domain.request import Constraint, ConstraintKind, Tool, objects_in
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.json_bodies import is_too_deep
from inference_site.gateway.request_fields.wire import (
    ConstraintFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
)

STRUCTURAL_TAG = "structured_outputs.structural_tag"
"""This field constrains parts of an answer; it is passed on to model servers as it is."""
_MOST_GRAMMAR_BYTES = 65_536
_MOST_SCHEMA_BYTES = 262_144
_MOST_RULES = _MOST_ALTERNATIVES = _MOST_VALUES = _MOST_PROPERTIES = _MOST_REFERENCES = 1_000
_MOST_INLINE_SCHEMAS = 100
_VALUES = ("enum", "anyOf", "oneOf", "allOf", "prefixItems", "type")
"""Lists in a schema whose entries are counted."""
_INLINE_SCHEMA = re.compile(r"%json\s*")
_DECODER = json.JSONDecoder()


class NamedSchema(Protocol):
    """A format of a request that gives its schema a name."""

    @property
    def name(self) -> str:
        """The name of the schema."""

    @property
    def description(self) -> str | None:
        """What the schema is for."""

    @property
    def strict(self) -> bool | None:
        """Whether the schema must be met exactly."""


def to_constraint(body: ConstraintFields, formatted: Constraint | None = None) -> Constraint | None:
    """Return the constraint of the request: ``formatted`` or that of an extension, or None.

    Raise InvalidRequestError for two different constraints, and for one beyond the bounds. The same
    one may be there twice: guidance sends vLLM's field for it and the one of earlier versions.
    """
    distinct: dict[tuple[str, str], Constraint] = {}
    for one in (*([formatted] if formatted else []), *_of_extensions(body)):
        distinct.setdefault((one.kind, one.source), one)
    found = list(distinct.values())
    if found and body.structured_outputs and body.structured_outputs.structural_tag is not None:
        found.append(Constraint("json_object", "", STRUCTURAL_TAG))
    if len(found) > 1:
        first, second = (constraint.param.partition(".")[0] for constraint in found[:2])
        if first == second:
            first, second = (constraint.param for constraint in found[:2])
        raise InvalidRequestError(
            f"Request `{second}` and `{first}` were both provided but are mutually exclusive.",
            param=second,
        )
    return check_constraint(found[0] if found else None)


def response_format_constraint(given: ResponseFormat | None) -> Constraint | None:
    """Return the constraint of a ``response_format``, None for text."""
    match given:
        case JsonObjectFormat():
            return json_object_constraint(given, "response_format")
        case JsonSchemaFormat(json_schema=wanted):
            return json_schema_constraint(wanted.json_schema, "response_format", wanted)
        case _:
            return None


def json_object_constraint(given: JsonObjectFormat, param: str) -> Constraint:
    """Return the constraint of the format ``json_object``, with llama-server's ``schema``."""
    if given.json_schema is None:
        return Constraint("json_object", "", param)
    return json_schema_constraint(given.json_schema, f"{param}.schema")


def json_schema_constraint(
    schema: dict[str, Any], param: str, named: NamedSchema | None = None
) -> Constraint:
    """Return the constraint of a schema, with its name, description and strictness.

    Raise InvalidRequestError for one that is too large.
    """
    facts = {
        key: value
        for key in ("name", "description", "strict")
        if (value := getattr(named, key, None)) is not None
    }
    return Constraint("json_schema", encode_schema(schema, param), param, facts)


def _of_extensions(body: ConstraintFields) -> Iterator[Constraint]:
    """Yield the constraint of each extension that was sent."""
    if isinstance(body.grammar, str):  # A bare text is GBNF.
        yield Constraint("gbnf", body.grammar, "grammar")
    elif (grammar := body.grammar) is not None:
        value: Any = grammar.value
        if grammar.type in ("json_schema", "llguidance"):
            value = encode_schema(_json_object(value, "grammar.value"), "grammar")
        elif not isinstance(value, str):
            raise InvalidRequestError(
                f"Invalid type for 'grammar.value': a grammar of type '{grammar.type}' is a "
                "string.",
                param="grammar.value",
                code="invalid_type",
            )
        yield Constraint(grammar.type, value, "grammar")
    if body.json_schema is not None:
        schema = _json_object(body.json_schema, "json_schema")
        yield json_schema_constraint(schema, "json_schema")
    if body.regex is not None:
        yield Constraint("regex", body.regex, "regex")
    if body.ebnf is not None:
        yield Constraint(_kind_of_grammar(body.ebnf), body.ebnf, "ebnf")
    if (wanted := body.structured_outputs) is not None:
        if wanted.json_object:
            yield Constraint("json_object", "", "structured_outputs.json_object")
        yield from _guided(
            "structured_outputs.", wanted.json_schema, wanted.regex, wanted.choice, wanted.grammar
        )
    yield from _guided(
        "guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
    )


def _guided(
    prefix: str,
    schema: str | dict[str, Any] | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> Iterator[Constraint]:
    if schema is not None:
        param = f"{prefix}json"
        yield json_schema_constraint(_json_object(schema, param), param)
    if regex is not None:
        yield Constraint("regex", regex, f"{prefix}regex")
    if choice is not None:
        # An escaped line break would be a line break in the grammar that holds the expression.
        escaped = ("\\n".join(map(re.escape, text.split("\n"))) for text in choice)
        yield Constraint("regex", f"({'|'.join(escaped)})", f"{prefix}choice")
    if grammar is not None:
        yield Constraint(_kind_of_grammar(grammar), grammar, f"{prefix}grammar")


def _kind_of_grammar(grammar: str) -> ConstraintKind:
    return "gbnf" if "::=" in grammar else "lark"


def _json_object(value: str | dict[str, Any], param: str) -> dict[str, Any]:
    """Return the object, or the object that a JSON text encodes, within the bounds of a body."""
    try:
        decoded = orjson.loads(value) if isinstance(value, str) else value
    except ValueError as exc:
        raise InvalidRequestError(
            f"Invalid '{param}': it is not JSON ({exc}).", param=param
        ) from exc
    if is_too_deep(decoded):
        raise InvalidRequestError(f"Invalid '{param}': it is nested too deeply.", param=param)
    if not isinstance(decoded, dict):
        raise InvalidRequestError(
            f"Invalid type for '{param}': expected an object.",
            param=param,
            code="invalid_type",
        )
    return decoded


def encode_schema(schema: dict[str, Any], param: str) -> str:
    """Return the schema as JSON. Raise InvalidRequestError for one that is too large.

    orjson finds the size in a seventh of the time: Python runs nothing else meanwhile.
    """
    try:
        size = len(orjson.dumps(schema))  # Never longer than the result, which has spaces.
    except orjson.JSONEncodeError:
        size = 0  # It holds what only JSON within JSON may hold, like a number of 100 digits.
    _check_count(size, _MOST_SCHEMA_BYTES, "bytes", param)
    return json.dumps(schema)


def check_tools(tools: tuple[Tool, ...], param: str) -> None:
    """Raise InvalidRequestError for tools with parameters beyond the bounds of schemas."""
    for tool in tools:
        where = tool.param or param
        _check_size(encode_schema(tool.parameters, where), _MOST_SCHEMA_BYTES, where)
        _check_schema(tool.parameters, where)
        check_constraint(tool.grammar)


def check_constraint(constraint: Constraint | None) -> Constraint | None:
    """Return the constraint. Raise InvalidRequestError if it is beyond the bounds."""
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


def _check_grammar(source: str, param: str) -> None:
    """Check a grammar of any kind. Signs inside its texts count too, which does no harm."""
    _check_size(source, _MOST_GRAMMAR_BYTES, param)
    starts = [match.end() for match in _INLINE_SCHEMA.finditer(source)]
    _check_count(len(starts), _MOST_INLINE_SCHEMAS, "JSON schemas", param)
    colons, counted_to = source.count(":"), 0
    for start in starts:
        try:
            schema, end = _DECODER.raw_decode(source, start)
        except (ValueError, RecursionError):
            schema, end = None, start
        if is_too_deep(schema):
            _refuse(param, "no schema that is nested so deeply")
        _check_schema(schema, param)
        if start >= counted_to:
            colons, counted_to = colons - source.count(":", start, end), end
    colons -= source.count("::=")  # GBNF has two for a rule.
    _check_count(colons, _MOST_RULES, "rules", param)
    _check_count(source.count("|"), _MOST_ALTERNATIVES, "alternatives", param)


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
