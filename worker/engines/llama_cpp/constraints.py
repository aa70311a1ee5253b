"""Constraints in llama.cpp's words: a schema, or a grammar of its own or of llguidance.

A JSON schema can be given in two ways. llama.cpp's own lets the model think before the constrained
answer, but its grammar lets weights that are no good end a string in half a character, which its
parser then fails on. llguidance's allows whole characters only, and is faster; it holds from the
first token on. llama.cpp's is also without bounds, so a schema for it is checked for what would
keep it busy. Grammars of clients are always llguidance's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from inference_site.domain.errors import InvalidRequest
from inference_site.domain.request import Constraint
from worker.engines.chat.tools import plain_schema
from worker.engines.grammars import (
    JSON_FORM,
    check_grammar,
    gbnf_as_lark,
    is_known_schema,
    lark_or_schema,
    regex_as_lark,
)
from worker.engines.llama_cpp.bounds import check_schemas

_LLGUIDANCE = "%llguidance {}\n"


TRIAL = f'{_LLGUIDANCE}start: "a"'
"""A grammar that a build without llguidance refuses."""


def fields_without_llguidance(constraint: Constraint | None) -> dict[str, Any]:
    """Return the fields for a build of llama.cpp that has its own grammars only.

    Raise InvalidRequest for a constraint that it has no form for.
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
    """Return the fields of llama.cpp's request that hold the constraint.

    ``from_start``: the answer begins with the constrained text, without thoughts or calls before.
    Raise InvalidRequest for a grammar that is wrong or too complex, and for a llguidance grammar of
    more than one part.
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
    check_grammar(constraint)
    match constraint.kind:
        case "lark":
            return {"grammar": f"{_LLGUIDANCE}{source}"}
        case "regex":
            return {"grammar": f"{_LLGUIDANCE}{regex_as_lark(source)}"}
        case "llguidance":
            part = lark_or_schema(constraint)
            if isinstance(part, str):
                return {"grammar": f"{_LLGUIDANCE}{part}"}
            return schema_fields(part, param, from_start=from_start)


def fields_of_tokens(ids: Sequence[int]) -> dict[str, Any]:
    """Return the fields for an answer of these tokens only.

    The grammar has no end, where llama.cpp would allow the token that ends the answer: as any other
    it comes only if it is one of these.
    """
    listed = ",".join(map(str, dict.fromkeys(ids)))
    return {"grammar": f"{_LLGUIDANCE}start: <[{listed}]> start"}


def schema_fields(schema: dict[str, Any], param: str, *, from_start: bool) -> dict[str, Any]:
    """Return the fields for a JSON schema; llguidance's where it can be, and knows all of it.

    Raise InvalidRequest for one that is wrong or too complex.
    """
    text = orjson.dumps({"x-guidance": JSON_FORM, **schema}).decode()
    if is_known_schema(text, param) and from_start:
        return {"grammar": f"{_LLGUIDANCE}start: %json {text}"}
    plain = plain_schema(schema)
    check_schemas(plain, param)
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": plain}}}
