"""Grammars as llguidance knows them: for engines that run it, and one that hides its errors."""

from __future__ import annotations

from inference_site.domain.errors import InvalidRequest
from inference_site.domain.request import Constraint

_MOST_REFERENCES = 1_000
"""In a JSON schema: those that lead to each other are followed by recursion, here as in llama.cpp,
and past the stack the whole worker would die."""


def check_references(encoded: bytes) -> None:
    """Raise InvalidRequest for JSON that holds too many references of schemas."""
    if encoded.count(b'"$ref"') > _MOST_REFERENCES:
        raise InvalidRequest(f"JSON schemas may hold at most {_MOST_REFERENCES} references.")


def check_grammar(constraint: Constraint) -> None:
    """Raise InvalidRequest for a Lark grammar, expression or llguidance grammar that is wrong.

    llama.cpp generates without any constraint when it cannot read one of these.
    """
    check_references(constraint.source.encode())
    if constraint.kind not in ("lark", "regex", "llguidance"):
        return
    from llguidance import LLMatcher

    try:
        error = LLMatcher.validate_grammar(llguidance_grammar(constraint))
    except ValueError as exc:
        error = str(exc)
    if error:
        raise InvalidRequest(f"Invalid grammar: {error.strip()}", constraint.param)


def llguidance_grammar(constraint: Constraint) -> str:
    """Return the constraint in llguidance's own form. Raise ValueError for what it cannot be."""
    from llguidance import grammar_from

    match constraint.kind:
        case "json_object":
            return grammar_from("json_schema", '{"type": "object"}')
        case "gbnf":
            return grammar_from("gbnf", constraint.source)
        case kind:
            return grammar_from(kind, constraint.source)
