"""Grammars and schemas of clients: a limited process tries them before an engine gets them.

Engines compile a grammar, and step through it, in the thread that serves all requests. A grammar
that crashes that thread ends the worker, and a slow one stops all answers.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import orjson

from inference_site.core.domain.errors import InvalidRequest
from inference_site.core.domain.request import Constraint
from inference_site.core.limited_process import LimitedProcess

JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Whitespace in JSON. If it were free, a weak model would generate whitespace without end."""
PYTHON_PATTERN = "python_pattern"
"""The question whether Python compiles a pattern, in place of a kind of grammar."""
_SHOWN_PATTERN = 200
_ESCAPE_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)
_CACHED_TRIALS = 256
_TOO_COMPLEX = "it is too complex: it needs too much time or memory"

_trials = LimitedProcess("worker.engines.grammar_trial")


@lru_cache(_CACHED_TRIALS)
def _tried(kind: str, source: str) -> tuple[str, str]:
    """Return the error of a grammar, empty if it is valid, and its Lark form if it is GBNF."""
    error, lark = _trials.ask(kind, source) or (_TOO_COMPLEX, "")
    return error, lark


def check_grammar(constraint: Constraint) -> None:
    """Raise InvalidRequest for a grammar that is invalid or too complex."""
    if constraint.kind == "json_object":
        return
    error, _ = _tried(constraint.kind, constraint.source)
    if error:
        raise InvalidRequest(f"Invalid grammar: {error.strip()}", constraint.param)


def is_known_schema(schema: str, param: str) -> bool:
    """Whether llguidance supports all keywords of a JSON schema.

    Raise InvalidRequest for a schema that is invalid even without the unsupported keywords, and for
    one that is too complex.
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
    """Whether llguidance supports a schema's pattern; it has no lookahead, for example.

    Raise InvalidRequest for a pattern that is invalid or too complex.
    """
    error, _ = _tried("regex", pattern)
    if error and error != _TOO_COMPLEX:
        # Python's library has no limit of time: a kilobyte of ranges takes it minutes.
        error, _ = _tried(PYTHON_PATTERN, pattern)
        if not error:
            return False
    if error:
        shown = pattern if len(pattern) <= _SHOWN_PATTERN else f"{pattern[:_SHOWN_PATTERN]}…"
        raise InvalidRequest(f"Invalid schema: the pattern {shown!r}: {error}.", param)
    return True


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
    escaped = _ESCAPE_OR_SLASH.sub(lambda found: r"\/" if found[0] == "/" else found[0], source)
    return f"start: /{escaped}/"


def lark_or_schema(constraint: Constraint) -> str | dict[str, Any]:
    """Return the single part of a llguidance grammar: a Lark grammar, or a JSON schema.

    Raise InvalidRequest for other parts, and for several.
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
