"""From ``response_format`` and ``grammar`` to the one constraint an engine is given."""

from __future__ import annotations

import json
from typing import Any

from inference_site.api.parsers import is_too_deep
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import Constraint
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.request_fields.capabilities import require
from inference_site.request_fields.tools import ToolPlan
from inference_site.request_fields.wire.constraint import (
    Grammar,
)


def from_grammar(grammar: str | Grammar) -> Constraint:
    """Return the constraint of a ``grammar``; bare text is GBNF. Raise InvalidRequestError."""
    if isinstance(grammar, str):
        return Constraint("gbnf", grammar, "grammar")
    takes_object = grammar.type in ("json_schema", "llguidance")
    value: Any = grammar.value
    if takes_object:
        value = json.dumps(_json_object(value))
    elif not isinstance(value, str):
        raise InvalidRequestError(
            f"Invalid type for 'grammar.value': a grammar of type '{grammar.type}' is a string.",
            param="grammar.value",
            code="invalid_type",
        )
    return Constraint(grammar.type, value, "grammar")


def _json_object(value: str | dict[str, Any]) -> dict[str, Any]:
    """Return the value as an object; its JSON text is good too."""
    try:
        decoded = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as exc:
        raise InvalidRequestError(
            f"Invalid 'grammar.value': it is not JSON ({exc}).", param="grammar.value"
        ) from exc
    if is_too_deep(decoded):
        raise InvalidRequestError(
            "Invalid 'grammar.value': it is nested too deeply.", param="grammar.value"
        )
    if not isinstance(decoded, dict):
        raise InvalidRequestError(
            "Invalid type for 'grammar.value': expected an object.",
            param="grammar.value",
            code="invalid_type",
        )
    return decoded


def checked_constraint(
    constraint: Constraint | None, plan: ToolPlan, spec: ModelSpec
) -> Constraint | None:
    """Return the constraint. Raise InvalidRequestError for one that cannot be met."""
    if constraint is None:
        return None
    require("grammar", constraint.param, spec)
    if plan.must_call:
        raise InvalidRequestError(
            f"Invalid '{constraint.param}': it cannot be met by an answer that must be a call.",
            param=constraint.param,
        )
    return constraint
