"""The fields of llama.cpp's request that constrain an answer: a JSON schema, or a grammar.

llama.cpp has two engines for a JSON schema. Its own lets the model reason before the constrained
answer, but may end a string inside a character, on which its parser then fails, and it has no limit
of time; so the schemas for it are checked first. llguidance is faster and allows whole characters
only, but constrains the output from the first token on. The grammars of clients go to llguidance.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any

import orjson

from inference_site.core.domain.errors import InvalidRequest
from inference_site.core.domain.request import Constraint, objects_in
from worker.engines.chat.tools import plain_schema
from worker.engines.grammars import (
    JSON_FORM,
    check_grammar,
    gbnf_as_lark,
    is_known_schema,
    lark_or_schema,
    regex_as_lark,
)

_LLGUIDANCE = "%llguidance {}\n"
TRIAL = f'{_LLGUIDANCE}start: "a"'
"""A grammar that a build without llguidance refuses."""

_MAX_OPTIONAL = 200
"""Optional properties of one object. llama.cpp's time grows with the square of their number: 200
take a fifth of a second before the answer begins, 1,000 take 20 s."""
_MAX_OPERATORS = 50
"""Operators in one pattern, multiplied by the counts of repeated groups. With 200 optional letters
each token takes 20 s."""
_OPERATOR = re.compile(r"[?*+|{]")
_GROUP_COUNT = re.compile(r"\)\{(?:\d*,)?(\d{0,9})")


def fields_without_llguidance(constraint: Constraint | None) -> dict[str, Any]:
    """Return the fields for a build of llama.cpp without llguidance.

    Raise InvalidRequest for a kind of constraint that it lacks.
    """
    if constraint is None:
        return {}
    if constraint.kind in ("json_object", "json_schema"):
        return constraint_fields(constraint, from_start=False)
    if constraint.kind != "gbnf":
        raise InvalidRequest(
            "This model's build of llama.cpp knows no constraints of the type "
            f"'{constraint.kind}'.",
            constraint.param,
        )
    check_grammar(constraint)
    return {"grammar": constraint.source}


def constraint_fields(constraint: Constraint | None, *, from_start: bool) -> dict[str, Any]:
    """Return the fields of llama.cpp's request for a constraint.

    ``from_start``: the answer begins with the constrained text, without reasoning or calls before.
    Raise InvalidRequest for a grammar that is invalid or too complex, and for a llguidance grammar
    of more than one part.
    """
    if constraint is None:
        return {}
    source, param = constraint.source, constraint.param
    match constraint.kind:
        case "json_object":
            return schema_fields({"type": "object"}, param, from_start=from_start)
        case "json_schema":
            return schema_fields(orjson.loads(source), param, from_start=from_start)
        case "gbnf":
            return {"grammar": f"{_LLGUIDANCE}{gbnf_as_lark(constraint)}"}
        case "lark":
            check_grammar(constraint)
            return {"grammar": f"{_LLGUIDANCE}{source}"}
        case "regex":
            check_grammar(constraint)
            return {"grammar": f"{_LLGUIDANCE}{regex_as_lark(source)}"}
        case "llguidance":
            check_grammar(constraint)
            part = lark_or_schema(constraint)
            if isinstance(part, str):
                return {"grammar": f"{_LLGUIDANCE}{part}"}
            return schema_fields(part, param, from_start=from_start)


def fields_of_tokens(ids: Sequence[int]) -> dict[str, Any]:
    """Return the fields for an answer of these tokens only.

    The grammar never ends: at its end llama.cpp would allow the end token, listed or not.
    """
    listed = ",".join(map(str, dict.fromkeys(ids)))
    return {"grammar": f"{_LLGUIDANCE}start: <[{listed}]> start"}


def schema_fields(schema: dict[str, Any], param: str, *, from_start: bool) -> dict[str, Any]:
    """Return the fields for a JSON schema: llguidance's if it supports all keywords of the schema.

    Raise InvalidRequest for a schema that is invalid or too complex.
    """
    text = orjson.dumps({"x-guidance": JSON_FORM, **schema}).decode()
    if is_known_schema(text, param) and from_start:
        return {"grammar": f"{_LLGUIDANCE}start: %json {text}"}
    plain = plain_schema(schema)
    check_schemas(plain, param)
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": plain}}}


def check_schemas(schemas: Any, param: str) -> None:
    """Raise InvalidRequest for schemas that llama.cpp would need too much time for.

    They are the parameters of tools that a model may call, and schemas for answers after thoughts.
    """
    cost = 0
    for inner in objects_in(schemas):
        properties, required = inner.get("properties"), inner.get("required")
        if isinstance(properties, dict):
            names = required if isinstance(required, list) else []
            cost += sum(name not in names for name in properties) ** 2
        if isinstance(pattern := inner.get("pattern"), str):
            counts = (int(count or 0) for count in _GROUP_COUNT.findall(pattern))
            repeats = prod(max(1, count) for count in counts)
            if len(_OPERATOR.findall(pattern)) * repeats > _MAX_OPERATORS:
                raise InvalidRequest(
                    "A pattern of the schema is too complex for this model.", param
                )
    if cost > _MAX_OPTIONAL**2:
        raise InvalidRequest("The schema has too many optional properties for this model.", param)
