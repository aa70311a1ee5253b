"""From a response's request and its context to the domain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import Constraint, GenerationRequest
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.request_fields.capabilities import require, require_endpoint
from inference_site.request_fields.constraint import checked_constraint, from_grammar
from inference_site.request_fields.sampling import common_fields, to_stop
from inference_site.request_fields.template import to_template_vars
from inference_site.request_fields.tools import ToolPlan
from inference_site.request_fields.wire.constraint import JsonObjectFormat
from responses_api.messages import PlacedItem, to_messages
from responses_api.tools import to_tool_plan
from responses_api.wire.request import (
    ContextFields,
    JsonSchemaFormat,
    ResponseRequest,
)

LOGPROBS, ENCRYPTED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"


def to_generation_request(
    body: ResponseRequest, items: Sequence[PlacedItem], spec: ModelSpec, project_id: int
) -> GenerationRequest:
    """Return what the engine is asked. Raise InvalidRequestError for fields that contradict."""
    require_endpoint("chat", spec)
    plan = to_tool_plan(body)
    if plan.tools:
        require("tools", "tools", spec)
    if body.reasoning_budget is not None:
        require("chat_template", "reasoning_budget", spec)
    return GenerationRequest(
        **common_fields(body, spec),
        messages=to_messages(body.instructions, items, spec, project_id),
        max_output_tokens=body.max_output_tokens,
        stop=to_stop(body.stop),
        top_logprobs=_top_logprobs(body, spec),
        constraint=_constraint(body, plan, spec),
        template_vars=_template_vars(body, spec),
        reasoning_budget=body.reasoning_budget,
        tools=plan.tools,
        must_call=plan.must_call,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        truncate=body.truncation == "auto",
    )


def to_counting_request(
    body: ContextFields, items: Sequence[PlacedItem], spec: ModelSpec, project_id: int
) -> GenerationRequest:
    """Return what the engine is asked in order to count the tokens of a context."""
    require_endpoint("render", spec)
    return GenerationRequest(
        model=spec.id,
        operation="render",
        messages=to_messages(body.instructions, items, spec, project_id),
        template_vars=_context_vars(body, {}, spec),
        tools=to_tool_plan(body).tools,
    )


def _constraint(body: ResponseRequest, plan: ToolPlan, spec: ModelSpec) -> Constraint | None:
    constraint = _formatted(body)
    if body.grammar is not None:
        if constraint is not None:
            raise InvalidRequestError(
                "Request `grammar` and `text.format` were both provided but are mutually "
                "exclusive.",
                param="grammar",
            )
        constraint = from_grammar(body.grammar)
    return checked_constraint(constraint, plan, spec)


def _formatted(body: ResponseRequest) -> Constraint | None:
    match body.text.format if body.text else None:
        case JsonObjectFormat():
            return Constraint("json_object", "", "text.format")
        case JsonSchemaFormat(json_schema=schema):
            return Constraint("json_schema", json.dumps(schema), "text.format.schema")
        case _:
            return None


def _template_vars(body: ResponseRequest, spec: ModelSpec) -> dict[str, Any]:
    variables = {
        "chat_template_kwargs": body.chat_template_kwargs,
        "template_vars": body.template_vars,
    }
    given = _context_vars(body, variables, spec)
    if body.enable_thinking is None:
        return given
    return given | to_template_vars({"enable_thinking": body.enable_thinking}, {}, spec)


def _context_vars(
    body: ContextFields, variables: dict[str, dict[str, Any] | None], spec: ModelSpec
) -> dict[str, Any]:
    switches = {
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "verbosity": body.text.verbosity if body.text else None,
    }
    return to_template_vars(switches, variables, spec)


def _top_logprobs(body: ResponseRequest, spec: ModelSpec) -> int | None:
    """Log probabilities are computed only for who includes them in the answer."""
    if LOGPROBS not in (body.include or ()):
        return None
    require("logprobs", "include", spec)
    return body.top_logprobs or 0
