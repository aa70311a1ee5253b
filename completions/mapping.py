"""From the wire to the domain."""

from __future__ import annotations

from typing import Any

from completions.constraint import to_constraint
from completions.messages import to_messages
from completions.tools import to_tool_plan
from completions.wire.chat import ChatCompletionRequest
from completions.wire.completion import CompletionRequest
from completions.wire.sampling import SamplingFields
from inference_site.http.errors import InvalidRequestError
from worker.engines.base import ModelSpec
from worker.engines.registry import engine_capabilities
from worker.generation import Constraint, GenerationRequest, Sampling

_SAME_NAMES = SamplingFields.model_fields.keys() - {"logit_bias", "dry_sequence_breakers"}


def to_generation_request(body: ChatCompletionRequest, spec: ModelSpec) -> GenerationRequest:
    """Return what the engine is asked. Raise InvalidRequestError for fields that contradict."""
    require_stream_for_options(body)
    plan = to_tool_plan(body)
    if plan.tools:
        require("tools", "tools", spec)
    constraint = _constraint(body, spec)
    if plan.must_call and constraint is not None:
        raise InvalidRequestError(
            f"Invalid '{constraint.param}': it cannot be met by an answer that must be a call.",
            param=constraint.param,
        )
    return GenerationRequest(
        model=spec.id,
        messages=to_messages(body.messages),
        sampling=to_sampling(body),
        max_output_tokens=_max_output_tokens(body),
        stop=to_stop(body.stop),
        ignore_eos=bool(body.ignore_eos),
        choices=to_choices(body.n, spec),
        top_logprobs=_top_logprobs(body, spec),
        constraint=constraint,
        template_vars=_template_vars(body, spec),
        reasoning_budget=_reasoning_budget(body, spec),
        tools=plan.tools,
        must_call=plan.must_call,
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )


def require_stream_for_options(body: ChatCompletionRequest | CompletionRequest) -> None:
    """Raise InvalidRequestError for ``stream_options`` without a stream."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
        )


def to_sampling(body: SamplingFields) -> Sampling:
    """Return the sampler settings; the wire's names are the domain's."""
    breakers = body.dry_sequence_breakers
    return Sampling(
        **{name: getattr(body, name) for name in _SAME_NAMES},
        dry_sequence_breakers=None if breakers is None else tuple(breakers),
        logit_bias=_logit_bias(body.logit_bias or {}),
    )


def _logit_bias(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    if bad := next((token for token in biases if not token.isdecimal()), None):
        raise InvalidRequestError(
            f"Invalid 'logit_bias': {bad!r} is not a token id.", param="logit_bias"
        )
    return tuple((int(token), bias) for token, bias in biases.items())


def to_choices(n: int | None, spec: ModelSpec) -> int:
    """Return how many answers each prompt gets. Raise InvalidRequestError for too many.

    All run at once, so there can be no more of them than the model has slots.
    """
    if n is None or n == 1:
        return 1
    require("choices", "n", spec)
    if n > spec.slots:
        raise InvalidRequestError(
            f"Invalid 'n': the model `{spec.id}` can give at most {spec.slots} choices.",
            param="n",
            code="integer_above_max_value",
        )
    return n


def _constraint(body: ChatCompletionRequest, spec: ModelSpec) -> Constraint | None:
    constraint = to_constraint(body)
    if constraint is not None:
        require("grammar", constraint.param, spec)
    return constraint


_TEMPLATE_FIELDS = ("enable_thinking", "reasoning_effort", "chat_template_kwargs", "template_vars")


def _first_given(body: ChatCompletionRequest, fields: tuple[str, ...]) -> str:
    return next(field for field in fields if getattr(body, field) is not None)


def _template_vars(body: ChatCompletionRequest, spec: ModelSpec) -> dict[str, Any]:
    """The plain switches come last: who sends them means them."""
    variables = {**(body.template_vars or {}), **(body.chat_template_kwargs or {})}
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
        variables["enable_thinking"] = body.reasoning_effort != "none"
    if body.enable_thinking is not None:
        variables["enable_thinking"] = body.enable_thinking
    if variables:
        require("chat_template", _first_given(body, _TEMPLATE_FIELDS), spec)
    return variables


def _reasoning_budget(body: ChatCompletionRequest, spec: ModelSpec) -> int | None:
    if body.reasoning_budget is not None:
        require("chat_template", "reasoning_budget", spec)
    return body.reasoning_budget


def require(capability: str, param: str, spec: ModelSpec) -> None:
    """Refuse what the model's engine cannot do, before it is queued."""
    if capability not in engine_capabilities(spec.engine):
        raise InvalidRequestError(
            f"Unsupported parameter: '{param}' is not supported with the model `{spec.id}`.",
            param=param,
            code="unsupported_parameter",
        )


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


def to_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop texts."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
