"""Judges: what they say of an answer, and which rules they refuse."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from inference_site.cases.judging import (
    NoRule,
    check_rule,
    judged,
    judging_request,
    read_reply,
    text_of,
)
from inference_site.cases.models import Case, CaseRun, Judge, Verdict


def verdict(judge: Judge, text: str, rule: str = "", expected: str = "Oslo") -> Verdict:
    """The verdict on a text."""
    return judged(CaseRun(judge=judge, rule=rule), Case(expected=expected), text)[0]


@pytest.mark.parametrize(
    ("judge", "rule", "right", "wrong"),
    [
        (Judge.EXACT, "", " Oslo\n", "oslo"),
        (Judge.PATTERN, r"^Os.o$", "Oslo", "It is Oslo"),
        (Judge.PATTERN, "(?i)OSLO", "It is Oslo", "Bergen"),
        (Judge.SCHEMA, '{"required": ["a"]}', '{"a": 1}', '{"b": 1}'),
        (Judge.SCHEMA, '{"type": "object"}', "{}", "Oslo"),
    ],
)
def test_a_judge_tells_right_from_wrong(judge: Judge, rule: str, right: str, wrong: str) -> None:
    check_rule(judge, rule)
    assert verdict(judge, right, rule) == Verdict.PASSED
    assert verdict(judge, wrong, rule) == Verdict.FAILED


def test_without_a_judge_there_is_no_verdict() -> None:
    assert verdict(Judge.NONE, "Oslo") == verdict(Judge.MODEL, "Oslo", "x") == Verdict.NONE


@pytest.mark.parametrize(
    ("judge", "rule"),
    [
        (Judge.PATTERN, "("),
        (Judge.PATTERN, r"(a)\1"),
        (Judge.SCHEMA, "{"),
        (Judge.SCHEMA, '{"type": "cat"}'),
        (Judge.SCHEMA, '{"$ref": "http://127.0.0.1/schema"}'),
        (Judge.SCHEMA, '{"not": ' * 1_000 + "{}" + "}" * 1_000),
        (Judge.MODEL, "  "),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused(judge: Judge, rule: str) -> None:
    with pytest.raises(NoRule):
        check_rule(judge, rule)


def test_a_hostile_pattern_takes_linear_time() -> None:
    began = time.monotonic()
    assert verdict(Judge.PATTERN, "a" * 100_000 + "b", "^(a+)+$") == Verdict.FAILED
    assert time.monotonic() - began < 60  # A backtracking engine would need longer than there is.


def test_a_schema_that_takes_years_gives_no_verdict() -> None:
    named: dict[str, Any] = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)
    }
    rule = {"$ref": "#/$defs/d0", "$defs": {**named, "d40": {"type": "string"}}}
    began = time.monotonic()
    run = CaseRun(judge=Judge.SCHEMA, rule=json.dumps(rule))
    assert judged(run, Case(), '"x"') == (
        Verdict.NONE,
        "Not judged: It needs too much time or memory.",
    )
    with pytest.raises(NoRule, match="too much time"):
        check_rule(Judge.SCHEMA, json.dumps({**rule, "unevaluatedProperties": False}))
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"choices": [{"message": {"content": "Hi"}}]}, "Hi"),
        ({"choices": [{"message": {"content": None, "refusal": "No"}}]}, "No"),
        (
            {
                "choices": [
                    {
                        "message": {
                            "content": None,
                            "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
                        }
                    }
                ]
            },
            '{"name":"f","arguments":"{}"}',
        ),
        (
            {
                "output": [
                    {"type": "reasoning", "summary": []},
                    {"type": "message", "content": [{"text": "Hi"}, {"refusal": "No"}]},
                    {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
                ]
            },
            'Hi\nNo\n{"name":"f","arguments":"{}"}',
        ),
        ({"output": []}, ""),
    ],
)
def test_the_text_of_an_answer(body: dict[str, Any], text: str) -> None:
    assert text_of(body) == text


def test_what_a_judging_model_says() -> None:
    assert read_reply('{"passed": true, "reason": "ok"}') == (Verdict.PASSED, "ok")
    assert read_reply('{"passed": false, "reason": "no"}') == (Verdict.FAILED, "no")
    for bad in ("yes", "[]", '{"passed": true}', "null"):
        assert read_reply(bad)[0] == Verdict.NONE


def test_a_judging_model_is_shown_the_end_of_a_long_request() -> None:
    case = Case(body={"messages": [{"role": "user", "content": "x" * 90_000 + "END"}]})
    body = judging_request(CaseRun(rule="Be kind.", judge_model="demo"), case, "Hello")
    shown = body["messages"][1]["content"]
    assert len(shown) < 25_000
    assert "END" in shown
    assert shown.startswith("Rule:\nBe kind.")
