"""From a response's request and its context to the domain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inference_site.domain.request import Constraint, GenerationRequest
from inference_site.request_fields.capabilities import require_fields, require_media
from inference_site.request_fields.constraint import (
    json_object_constraint,
    json_schema_constraint,
    to_constraint,
)
from inference_site.request_fields.mapping import (
    text_constraint,
    to_reasoning_budget,
    to_sampled_request,
    to_stop,
    to_template_vars,
)
from inference_site.request_fields.wire import JsonObjectFormat
from inference_site.submission.model_access import ResolvedModel
from responses_api.request.messages import to_messages
from responses_api.request.tools import to_tool_plan
from responses_api.state.context import PlacedItem
from responses_api.wire.request import ContextFields, JsonSchemaFormat, ResponseRequest

ENCRYPTED_REASONING = "reasoning.encrypted_content"


def to_generation_request(
    body: ResponseRequest, items: Sequence[PlacedItem], model: ResolvedModel, project_id: int
) -> GenerationRequest:
    """Return what the engine is asked. Raise InvalidRequestError for fields that contradict."""
    plan = to_tool_plan(body)
    constraint = to_constraint(body, _formatted(body))
    require_fields(model, "chat", body, () if plan.tools else ("tools",))
    messages = to_messages(body.instructions, items, project_id)
    require_media(model, messages)
    return replace(
        to_sampled_request(body, model.spec),
        messages=messages,
        max_output_tokens=body.max_output_tokens,
        stop=to_stop(body.stop),
        # They are computed only for who includes them in the answer.
        top_logprobs=body.top_logprobs or 0 if body.includes_logprobs else None,
        constraint=text_constraint(constraint, plan),
        template_vars=to_template_vars(
            {**_switches(body), "enable_thinking": body.enable_thinking},
            body.chat_template_kwargs,
            body.template_vars,
        ),
        reasoning_budget=to_reasoning_budget(body.reasoning_budget, body.thinking_token_budget),
        tools=plan.tools,
        must_call=plan.must_call,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        truncate=body.truncation == "auto",
    )


def to_counting_request(
    body: ContextFields, items: Sequence[PlacedItem], model: ResolvedModel, project_id: int
) -> GenerationRequest:
    """Return what the engine is asked in order to count the tokens of a context."""
    require_fields(model, "render", body, unused=("tools", "text.format"))
    messages = to_messages(body.instructions, items, project_id)
    require_media(model, messages)
    return GenerationRequest(
        model=model.spec.id,
        operation="render",
        messages=messages,
        template_vars=to_template_vars(_switches(body)),
        tools=to_tool_plan(body).tools,
    )


def _formatted(body: ResponseRequest) -> Constraint | None:
    match body.text.format if body.text else None:
        case JsonObjectFormat() as given:
            return json_object_constraint(given, "text.format")
        case JsonSchemaFormat() as given:
            return json_schema_constraint(given.json_schema, "text.format.schema", given)
        case _:
            return None


def _switches(body: ContextFields) -> dict[str, Any]:
    return {
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "verbosity": body.text.verbosity if body.text else None,
    }
