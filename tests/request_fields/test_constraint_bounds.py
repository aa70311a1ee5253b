"""Grammars and schemas past the bounds are refused, however they are written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference_site.core.domain.request import Constraint, ConstraintKind, Tool
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.request_fields.constraint import check_constraint
from inference_site.gateway.request_fields.mapping import ToolPlan

VALUES = {"enum": list(range(1_001))}
REFERENCES = {"$defs": {f"d{n}": {"$ref": "#/$defs/d0"} for n in range(1_001)}}
NESTED = '{"a":' * 500 + "1" + "}" * 500
FITTING = {"properties": {f"p{n}": {"enum": [n]} for n in range(999)}}


def _lark(inline: str, rules: int = 1) -> str:
    return "\n".join(["start: r0", *(f"r{n}: %json {inline}" for n in range(rules))])


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("gbnf", 'root ::= "a" | "b"'),
        ("lark", _lark(json.dumps(FITTING))),
        ("json_schema", json.dumps(FITTING)),
        ("json_object", ""),
        ("regex", "a|b"),
        ("llguidance", json.dumps({"grammars": [{"lark_grammar": _lark("{}", 50)}]})),
    ],
)
def test_what_fits_passes(kind: ConstraintKind, source: str) -> None:
    constraint = Constraint(kind, source, "grammar")
    assert check_constraint(constraint) is constraint


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("gbnf", "a" * 65_537, "bytes"),
        ("gbnf", 'root ::= "a"' + '|"a"' * 1_001, "alternatives"),
        ("gbnf", "\n".join(f'r{n} ::= "a"' for n in range(1_001)), "rules"),
        ("lark", "\n".join(f'r{n}: "a"' for n in range(1_001)), "rules"),
        ("lark", _lark("{}", 101), "JSON schemas"),
        ("lark", _lark(json.dumps(VALUES)), "values"),
        ("lark", _lark(json.dumps(REFERENCES).replace("$ref", "\\u0024ref")), "references"),
        ("lark", _lark("\n\t" + json.dumps(REFERENCES)), "references"),
        ("lark", _lark(NESTED), "nested"),
        ("regex", "|" * 1_001, "alternatives"),
        ("json_schema", json.dumps(VALUES), "values"),
        ("json_schema", json.dumps({"$defs": {"a": [{"oneOf": [VALUES]}]}}), "values"),
        ("json_schema", json.dumps(REFERENCES).replace("$ref", "\\u0024ref"), "references"),
        ("json_schema", json.dumps({"description": "a" * 300_000}), "bytes"),
        ("llguidance", json.dumps({"grammars": [{"json_schema": REFERENCES}]}), "references"),
        (
            "llguidance",
            json.dumps({"grammars": [{"lark_grammar": _lark(json.dumps(VALUES))}]}),
            "values",
        ),
    ],
)
def test_what_does_not_is_refused(kind: ConstraintKind, source: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as refused:
        check_constraint(Constraint(kind, source, "grammar"))
    assert refused.value.param == "grammar"


@pytest.mark.parametrize(("is_legacy", "param"), [(False, "tools"), (True, "functions")])
def test_parameters_of_tools_are_bounded_too(is_legacy: bool, param: str) -> None:
    fitting: dict[str, Any] = FITTING
    ToolPlan((Tool("f", None, fitting),), is_legacy=is_legacy)
    with pytest.raises(InvalidRequestError) as refused:
        ToolPlan((Tool("f", None, VALUES),), is_legacy=is_legacy)
    assert refused.value.param == param
