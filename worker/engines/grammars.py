"""Grammars of clients: each is tried in a process of its own before an engine is given it.

Engines compile a grammar, and step through it, in the thread that serves everybody. A grammar that
ends that thread ends the worker, and one that is slow stops all answers.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import orjson

from inference_site.domain.errors import InvalidRequest
from inference_site.domain.request import Constraint
from worker.engines.limited_process import LimitedProcess

JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space between the parts of JSON; a model that may would put it there without end."""
_TRIALS_KEPT = 256
_TOO_COMPLEX = "it is too complex: it needs too much time or memory"

_trials = LimitedProcess("worker.engines.grammar_trial")


@lru_cache(_TRIALS_KEPT)
def _tried(kind: str, source: str) -> tuple[str, str]:
    """Return what is wrong with a grammar, and its Lark form if it is GBNF."""
    error, lark = _trials.ask(kind, source) or (_TOO_COMPLEX, "")
    return error, lark


def check_grammar(constraint: Constraint) -> None:
    """Raise InvalidRequest for a grammar that is wrong, or that would keep an engine too busy."""
    if constraint.kind == "json_object":
        return
    error, _ = _tried(constraint.kind, constraint.source)
    if error:
        raise InvalidRequest(f"Invalid grammar: {error.strip()}", constraint.param)


def is_known_schema(schema: str, param: str) -> bool:
    """Return whether llguidance knows all of a JSON schema.

    Raise InvalidRequest for one that is wrong whatever else it says, and for one that would keep an
    engine too busy.
    """
    error, _ = _tried("json_schema", schema)
    if error and error != _TOO_COMPLEX:
        lenient = {**orjson.loads(schema), "x-guidance": {**JSON_FORM, "lenient": True}}
        fault, _ = _tried("json_schema", orjson.dumps(lenient).decode())
    else:
        fault = error
    if fault:
        raise InvalidRequest(f"Invalid schema: {fault.strip()}.", param)
    return not error


def knows_pattern(pattern: str, param: str) -> bool:
    """Return whether llguidance knows all of a schema's pattern, such as what looks ahead.

    Raise InvalidRequest for one that is no regular expression, or that is too complex.
    """
    error, _ = _tried("regex", pattern)
    if not error:
        return True
    try:
        re.compile(pattern)
    except re.error as exc:
        raise InvalidRequest(f"Invalid schema: the pattern {pattern!r}: {exc}.", param) from exc
    if error == _TOO_COMPLEX:
        raise InvalidRequest(f"Invalid schema: the pattern {pattern!r}: {error}.", param)
    return False


def gbnf_as_lark(constraint: Constraint) -> str:
    """Return a Lark grammar of the same texts. Raise InvalidRequest as ``check_grammar`` does."""
    check_grammar(constraint)
    return _tried(constraint.kind, constraint.source)[1]


def llguidance_grammar(constraint: Constraint) -> str:
    """Return the constraint in llguidance's own form. Raise as ``check_grammar`` does."""
    from llguidance import grammar_from

    check_grammar(constraint)
    match constraint.kind:
        case "json_object":
            return _json_grammar({"type": "object"})
        case "json_schema":
            return _json_grammar(orjson.loads(constraint.source))
        case "gbnf":
            return grammar_from("lark", gbnf_as_lark(constraint))
        case kind:
            return grammar_from(kind, constraint.source)


def _json_grammar(schema: Any) -> str:
    from llguidance import grammar_from

    if isinstance(schema, dict):
        schema = {"x-guidance": JSON_FORM, **schema}
    return grammar_from("json_schema", orjson.dumps(schema).decode())


def regex_as_lark(source: str) -> str:
    """Return a Lark grammar that matches what the expression matches."""
    escaped = source.replace("/", "\\/")
    return f"start: /{escaped}/"


def lark_or_schema(constraint: Constraint) -> str | dict[str, Any]:
    """Return the only part of a llguidance grammar: a Lark grammar, or a JSON schema.

    Raise InvalidRequest for a grammar of other or of several parts.
    """
    match orjson.loads(constraint.source).get("grammars"):
        case [{"lark_grammar": str(lark)}]:
            return lark
        case [{"json_schema": dict(schema)}]:
            return schema
        case _:
            raise InvalidRequest(
                "A llguidance grammar must be {'grammars': [{'lark_grammar': …}]} or "
                "{'grammars': [{'json_schema': …}]} here.",
                constraint.param,
            )
