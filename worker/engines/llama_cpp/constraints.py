"""Constraints in llama.cpp's words: a schema, or a grammar of its own or of llguidance.

A JSON schema can be given in two ways. llama.cpp's own lets the model think before the constrained
answer, but its grammar lets weights that are no good end a string in half a character, which its
parser then fails on. llguidance's allows whole characters only, and is faster; it holds from the
first token on.
"""

from __future__ import annotations

from typing import Any

import orjson

from inference_site.domain.request import Constraint
from worker.engines.chat.tool_schemas import plain_schema
from worker.engines.grammars import check_grammar, check_references, lark_or_schema, regex_as_lark
from worker.engines.llama_cpp.bounds import check_groups

_LLGUIDANCE = "%llguidance {}\n"
_GUIDANCE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space between the parts of JSON; a model that may would put it there without end."""


def constraint_fields(constraint: Constraint | None, *, from_start: bool) -> dict[str, Any]:
    """Return the fields of llama.cpp's request that hold the constraint.

    ``from_start``: the answer begins with the constrained text, without thoughts or calls before.
    Raise InvalidRequest for a grammar that is wrong, for a llguidance grammar of more than one
    part, and for GBNF past bounds.
    """
    if constraint is None:
        return {}
    check_grammar(constraint)
    source = constraint.source
    match constraint.kind:
        case "json_object":
            return schema_fields({"type": "object"}, from_start=from_start)
        case "json_schema":
            return schema_fields(orjson.loads(source), from_start=from_start)
        case "gbnf":
            check_groups(source, constraint.param)
            return {"grammar": source}
        case "lark":
            return {"grammar": f"{_LLGUIDANCE}{source}"}
        case "regex":
            return {"grammar": f"{_LLGUIDANCE}{regex_as_lark(source)}"}
        case "llguidance":
            part = lark_or_schema(constraint)
            if isinstance(part, str):
                return {"grammar": f"{_LLGUIDANCE}{part}"}
            return schema_fields(part, from_start=from_start)


def schema_fields(schema: dict[str, Any], *, from_start: bool) -> dict[str, Any]:
    """Return the fields for a JSON schema; llguidance's where it can be, and knows all of it."""
    from llguidance import LLMatcher, grammar_from

    encoded = orjson.dumps({"x-guidance": _GUIDANCE, **schema})
    check_references(encoded)
    text = encoded.decode()
    if from_start and not LLMatcher.validate_grammar(grammar_from("json_schema", text)):
        return {"grammar": f"{_LLGUIDANCE}start: %json {text}"}
    plain = {"schema": plain_schema(schema)}
    return {"response_format": {"type": "json_schema", "json_schema": plain}}
