"""From the fields that bind an answer's text to what it must match.

``grammar`` is of mistral.rs and llama.cpp, ``json_schema`` of llama.cpp;
``structured_outputs`` and ``guided_…`` are of vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Protocol

import orjson

from inference_site.api.json_bodies import is_too_deep
from inference_site.domain.request import Constraint
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.request_fields.constraint_bounds import checked, encoded_schema
from inference_site.request_fields.mapping import ToolPlan
from inference_site.request_fields.wire.constraint import (
    ConstraintFields,
    Grammar,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
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


def text_constraint(constraint: Constraint | None, plan: ToolPlan) -> Constraint | None:
    """Return what the text must match: nothing, in an answer that must be a call.

    Libraries that read an answer into a class send its schema as the format and as a tool. Raise
    InvalidRequestError for a constraint of another field, which would be meant for the call.
    """
    if constraint is None or not plan.must_call:
        return constraint
    if not constraint.param.startswith(("response_format", "text.format")):
        raise InvalidRequestError(
            f"Invalid '{constraint.param}': it cannot be met by an answer that must be a call.",
            param=constraint.param,
        )
    return None


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
