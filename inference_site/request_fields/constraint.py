"""Bounds on grammars and schemas, checked before a request is accepted.

They keep what is built of one small. What a grammar within them costs is found out by its trial in
the worker (``worker.engines.grammars``).

From the fields that bind an answer's text to what it must match.

``grammar`` is of mistral.rs and llama.cpp, ``json_schema`` of llama.cpp;
``structured_outputs`` and ``guided_…`` are of vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Protocol

import orjson

from inference_site.api.parsers import is_too_deep
from inference_site.domain.request import Constraint, Tool
from inference_site.domain.schemas import objects_in
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.request_fields.wire import (
    ConstraintFields,
    Grammar,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
)

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


STRUCTURAL_TAG = "structured_outputs.structural_tag"
"""It binds parts of an answer, and is passed on as it is."""


class NamedSchema(Protocol):
    """A format of a request that gives its schema a name."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def description(self) -> str | None:
        """What it is for."""

    @property
    def strict(self) -> bool | None:
        """Whether it has to be met exactly."""


def to_constraint(body: ConstraintFields, formatted: Constraint | None = None) -> Constraint | None:
    """Return what the text must match: what is ``formatted`` or what a field asks for, or None.

    Raise InvalidRequestError for two constraints, and for one past the bounds.
    """
    found = [*([formatted] if formatted else []), *_given(body)]
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
    return checked(found[0] if found else None)


def of_response_format(given: ResponseFormat | None) -> Constraint | None:
    """Return the constraint of a ``response_format``, None for text."""
    match given:
        case JsonObjectFormat():
            return of_json_object(given, "response_format")
        case JsonSchemaFormat(json_schema=wanted):
            return of_json_schema(wanted.json_schema, "response_format", wanted)
        case _:
            return None


def of_json_object(given: JsonObjectFormat, param: str) -> Constraint:
    """Return the constraint of the format ``json_object``, with llama-server's ``schema``."""
    if given.json_schema is None:
        return Constraint("json_object", "", param)
    return of_json_schema(given.json_schema, f"{param}.schema")


def of_json_schema(
    schema: dict[str, Any], param: str, named: NamedSchema | None = None
) -> Constraint:
    """Return the constraint of a schema, with what the client says of it.

    Raise InvalidRequestError for one that is too large.
    """
    facts = {
        key: value
        for key in ("name", "description", "strict")
        if (value := getattr(named, key, None)) is not None
    }
    return Constraint("json_schema", encoded_schema(schema, param), param, facts)


def _given(body: ConstraintFields) -> Iterator[Constraint]:
    """Yield what each extension asks for."""
    if body.grammar is not None:
        yield from_grammar(body.grammar)
    if body.json_schema is not None:
        yield of_json_schema(_json_object(body.json_schema, "json_schema"), "json_schema")
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
        yield of_json_schema(_json_object(schema, param), param)
    if regex is not None:
        yield Constraint("regex", regex, f"{prefix}regex")
    if choice is not None:
        yield Constraint("regex", _one_of(choice), f"{prefix}choice")
    if grammar is not None:
        yield Constraint("gbnf" if "::=" in grammar else "lark", grammar, f"{prefix}grammar")


def _one_of(texts: list[str]) -> str:
    """Return the expression that each of these texts matches, and nothing else does."""
    # An escaped line break would be a line break in the grammar that holds the expression.
    escaped = ("\\n".join(map(re.escape, text.split("\n"))) for text in texts)
    return f"({'|'.join(escaped)})"


def from_grammar(grammar: str | Grammar) -> Constraint:
    """Return the constraint of a ``grammar``; bare text is GBNF. Raise InvalidRequestError."""
    if isinstance(grammar, str):
        return Constraint("gbnf", grammar, "grammar")
    takes_object = grammar.type in ("json_schema", "llguidance")
    value: Any = grammar.value
    if takes_object:
        value = encoded_schema(_json_object(value, "grammar.value"), "grammar")
    elif not isinstance(value, str):
        raise InvalidRequestError(
            f"Invalid type for 'grammar.value': a grammar of type '{grammar.type}' is a string.",
            param="grammar.value",
            code="invalid_type",
        )
    return Constraint(grammar.type, value, "grammar")


def _json_object(value: str | dict[str, Any], param: str) -> dict[str, Any]:
    """Return the value as an object; its JSON text is good too, under the rules of a body."""
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
