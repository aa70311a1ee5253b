"""Grammars and schemas of clients: they are tried and measured before an engine gets them.

Engines compile a grammar, and step through it, in the thread that serves all requests. A grammar
that crashes that thread ends the server, and a slow one stops all answers. So a limited process
tries each grammar. llama.cpp also makes grammars of schemas, without limits: these are measured.
"""

from __future__ import annotations

import re
from functools import lru_cache
from math import prod
from typing import Any

import orjson

from inference_site.core.domain.errors import InvalidRequest
from inference_site.core.domain.request import Constraint, objects_in
from inference_site.core.limited_process import LimitedProcess

JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Whitespace in JSON. If it were free, a weak model would generate whitespace without end."""
PYTHON_PATTERN = "python_pattern"
"""The question whether Python compiles a pattern, in place of a kind of grammar."""
_SHOWN_PATTERN = 200
_ESCAPE_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)
_CACHED_TRIALS = 256
_MAX_OPTIONAL = 200
"""Optional properties of one object. llama.cpp's time grows with the square of their number: 200
take a fifth of a second before the answer begins, 1,000 take 20 s."""
_MAX_OPERATORS = 50
"""Operators in one pattern, multiplied by the counts of repeated groups. With 200 optional letters
each token takes 20 s."""
_MAX_CHOICES = 1_000
"""Schemas that one value may have, with references followed. llama.cpp follows each of two equal
references on its own: its server stands still for 2**40 of them, and one that leads back to itself
ends its process."""
_CHOICES = ("allOf", "anyOf", "oneOf")
_NOT_IN_URI = re.compile(r"[^A-Za-z0-9:/?#\[\]@!$&'()*+,;=._~%-]")
_VALUES = ("const", "default", "enum", "examples")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose objects have schemas by any names."""
_DIALECT = re.compile(
    r"http://json-schema\.org/draft-0[3467]/schema#?"
    r"|https://json-schema\.org/draft/20(?:19-09|20-12)/schema#?"
)
"""The values of ``$schema`` that llguidance knows."""
_OPERATOR = re.compile(r"[?*+|{]")
_GROUP_COUNT = re.compile(r"\)\{(?:\d*,)?(\d{0,9})")
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
        fault, _ = _tried("json_schema", lenient_schema(schema))
    else:
        fault = error
    if fault:
        raise InvalidRequest(f"Invalid schema: {fault.strip()}.", param)
    return not error


def lenient_schema(schema: str) -> str:
    """Return the JSON schema with llguidance's option to ignore the keywords that it lacks."""
    lenient = {**orjson.loads(schema), "x-guidance": {**JSON_FORM, "lenient": True}}
    return orjson.dumps(lenient).decode()


def unnamed_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without a ``$schema`` that llguidance does not know, and without its name.

    llguidance refuses a name that is no URI, also that of a part, and the references of a named
    schema that is a part of another one. A schema whose references use names keeps its own.
    """
    unnamed: dict[str, Any] = _without_unusable_ids(schema)
    if not _DIALECT.fullmatch(str(schema.get("$schema"))):
        unnamed.pop("$schema", None)
    references = (inner.get("$ref") for inner in objects_in(schema))
    if all(str(reference or "#").startswith("#") for reference in references):
        unnamed.pop("$id", None)
    return unnamed


def _without_unusable_ids(schema: Any, *, is_by_name: bool = False) -> Any:
    """Return the schema without each ``$id`` that is no URI, which no reference can name.

    Objects that are values, not schemas, stay as they are. ``is_by_name``: the keys are names.
    """
    if isinstance(schema, list):
        return [_without_unusable_ids(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if is_by_name:
        return {name: _without_unusable_ids(part) for name, part in schema.items()}
    return {
        key: part if key in _VALUES else _without_unusable_ids(part, is_by_name=key in _BY_NAME)
        for key, part in schema.items()
        if key != "$id" or not isinstance(part, str) or not _NOT_IN_URI.search(part)
    }


def check_schemas(schemas: Any, param: str) -> None:
    """Raise InvalidRequest for schemas that llama.cpp would need too much time for.

    They are the parameters of tools that a model may call, and schemas that its server converts.
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
    for root in schemas if isinstance(schemas, list) else [schemas]:
        counted: dict[int, int] = {}
        try:
            is_complex = any(
                _choices(inner, root, counted) > _MAX_CHOICES for inner in objects_in(root)
            )
        except RecursionError:
            is_complex = True
        if is_complex:
            raise InvalidRequest(
                "The references and alternatives of the schema are too complex for this model.",
                param,
            )


def _choices(schema: Any, root: Any, counted: dict[int, int]) -> int:
    """Return among how many schemas a value is that the schema, a part of ``root``, describes.

    ``counted`` has this number of the objects in ``root``, by their identity. One that references
    lead back to, without a property or an item in between, counts as too many.
    """
    if not isinstance(schema, dict):
        return 1
    if id(schema) not in counted:
        counted[id(schema)] = _MAX_CHOICES + 1  # Until it is counted.
        lists = (schema.get(key) for key in _CHOICES)
        parts = [part for given in lists if isinstance(given, list) for part in given]
        if isinstance(reference := schema.get("$ref"), str):
            parts.append(_target(root, reference))
        counted[id(schema)] = max(1, sum(_choices(part, root, counted) for part in parts))
    return counted[id(schema)]


def _target(root: Any, reference: str) -> Any:
    """Return the part of a schema that a reference names; None if there is none."""
    found = root if reference.startswith("#") else None
    for key in reference.removeprefix("#").split("/")[1:]:
        if isinstance(found, list):
            is_there = key.isdecimal() and len(key) < 9 and int(key) < len(found)
            found = found[int(key)] if is_there else None
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found


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
        schema = {"x-guidance": JSON_FORM, **unnamed_schema(schema)}
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
