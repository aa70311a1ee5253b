"""From a chat completion on the wire to the domain."""

from __future__ import annotations

from typing import Any

from completions.messages import to_messages
from completions.response_format import to_constraint
from completions.tools import to_tool_plan
from completions.wire.chat import ChatCompletionRequest
from completions.wire.completion import CompletionRequest
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import Constraint, GenerationRequest
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.request_fields.capabilities import require, require_endpoint
from inference_site.request_fields.constraint import checked_constraint
from inference_site.request_fields.sampling import common_fields, to_choices, to_stop
from inference_site.request_fields.template import to_template_vars
from inference_site.request_fields.tools import ToolPlan


def to_generation_request(body: ChatCompletionRequest, spec: ModelSpec) -> GenerationRequest:
    """Return what the engine is asked. Raise InvalidRequestError for fields that contradict."""
    require_stream_for_options(body)
    require_endpoint("chat", spec)
    plan = to_tool_plan(body)
    if plan.tools:
        require("tools", "functions" if plan.is_legacy else "tools", spec)
    return GenerationRequest(
        **common_fields(body, spec),
        messages=to_messages(body.messages, spec),
        max_output_tokens=_max_output_tokens(body),
        stop=to_stop(body.stop),
        choices=to_choices(body.n, spec),
        top_logprobs=_top_logprobs(body, spec),
        constraint=_constraint(body, plan, spec),
        template_vars=_template_vars(body, spec),
        reasoning_budget=_reasoning_budget(body, spec),
        tools=plan.tools,
        must_call=plan.must_call,
        parallel_tool_calls=body.parallel_tool_calls is not False and not plan.is_legacy,
        response_prefix=_response_prefix(body, plan, spec),
        add_generation_prompt=_add_generation_prompt(body, spec),
        truncate=bool(body.truncate_sequence),
    )


def require_stream_for_options(body: ChatCompletionRequest | CompletionRequest) -> None:
    """Raise InvalidRequestError for ``stream_options`` without a stream."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
        )


def _constraint(body: ChatCompletionRequest, plan: ToolPlan, spec: ModelSpec) -> Constraint | None:
    return checked_constraint(to_constraint(body), plan, spec)


def _template_vars(body: ChatCompletionRequest, spec: ModelSpec) -> dict[str, Any]:
    switches = {
        "enable_thinking": body.enable_thinking,
        "reasoning_effort": body.reasoning_effort,
        "verbosity": body.verbosity,
    }
    variables = {
        "chat_template_kwargs": body.chat_template_kwargs,
        "template_vars": body.template_vars,
    }
    return to_template_vars(switches, variables, spec)


def _reasoning_budget(body: ChatCompletionRequest, spec: ModelSpec) -> int | None:
    if body.reasoning_budget is not None:
        require("chat_template", "reasoning_budget", spec)
    return body.reasoning_budget


def _response_prefix(body: ChatCompletionRequest, plan: ToolPlan, spec: ModelSpec) -> str:
    if not body.response_prefix:
        return ""
    require("response_prefix", "response_prefix", spec)
    if plan.must_call:
        raise InvalidRequestError(
            "Invalid 'response_prefix': an answer that must be a call has none.",
            param="response_prefix",
        )
    if body.add_generation_prompt is False:
        raise InvalidRequestError(
            "Invalid 'response_prefix': it needs 'add_generation_prompt'.", param="response_prefix"
        )
    return body.response_prefix


def _add_generation_prompt(body: ChatCompletionRequest, spec: ModelSpec) -> bool:
    if body.add_generation_prompt is False:
        require("response_prefix", "add_generation_prompt", spec)
    return body.add_generation_prompt is not False


def _top_logprobs(body: ChatCompletionRequest, spec: ModelSpec) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError(
            "Invalid 'top_logprobs': it is only allowed when 'logprobs' is true.",
            param="top_logprobs",
        )
    if not body.logprobs:
        return None
    require("logprobs", "logprobs", spec)
    return body.top_logprobs or 0


def _max_output_tokens(body: ChatCompletionRequest) -> int | None:
    """The newer field wins when both are given."""
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return body.max_tokens
