"""From ``response_format`` and ``grammar`` to the one constraint an engine is given."""

from __future__ import annotations

import json
from typing import Any

from completions.wire.chat import ChatCompletionRequest
from inference_site.request_fields.wire.constraint import Grammar, JsonObjectFormat, JsonSchemaFormat
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.api.parsers import is_too_deep
from inference_site.domain.generation import Constraint


def to_constraint(body: ChatCompletionRequest) -> Constraint | None:
    """Return what the text must match, or None. Raise InvalidRequestError for two constraints."""
    formatted = _from_format(body)
    if body.grammar is None:
        return formatted
    if formatted is not None:
        raise InvalidRequestError(
            "Request `grammar` and `response_format` were both provided but are mutually "
            "exclusive.",
            param="grammar",
        )
    return from_grammar(body.grammar)


def _from_format(body: ChatCompletionRequest) -> Constraint | None:
    match body.response_format:
        case JsonObjectFormat():
            return Constraint("json_object", "", "response_format")
        case JsonSchemaFormat(json_schema=wanted):
            schema = json.dumps(wanted.json_schema)
            return Constraint("json_schema", schema, "response_format")
        case _:
            return None


def from_grammar(grammar: str | Grammar) -> Constraint:
    """Return the constraint of a ``grammar``; bare text is GBNF. Raise InvalidRequestError."""
    if isinstance(grammar, str):
        return Constraint("gbnf", grammar, "grammar")
    takes_object = grammar.type in ("json_schema", "llguidance")
    value: Any = grammar.value
    if takes_object:
        value = json.dumps(_json_object(value))
    elif not isinstance(value, str):
        raise InvalidRequestError(
            f"Invalid type for 'grammar.value': a grammar of type '{grammar.type}' is a string.",
            param="grammar.value",
            code="invalid_type",
        )
    return Constraint(grammar.type, value, "grammar")


def _json_object(value: str | dict[str, Any]) -> dict[str, Any]:
    """Return the value as an object; its JSON text is good too."""
    try:
        decoded = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as exc:
        raise InvalidRequestError(
            f"Invalid 'grammar.value': it is not JSON ({exc}).", param="grammar.value"
        ) from exc
    if is_too_deep(decoded):
        raise InvalidRequestError(
            "Invalid 'grammar.value': it is nested too deeply.", param="grammar.value"
        )
    if not isinstance(decoded, dict):
        raise InvalidRequestError(
            "Invalid type for 'grammar.value': expected an object.",
            param="grammar.value",
            code="invalid_type",
        )
    return decoded
