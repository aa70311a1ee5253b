"""From the fields that several endpoints have in common to the domain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import Constraint, GenerationRequest, Tool
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.request_fields.constraint_bounds import check_tools
from inference_site.request_fields.wire.sampling import (
    LoraAdapter,
    SamplingFields,
    ServerFields,
    TokenReportFields,
)
from inference_site.request_fields.wire.tools import GrammarDefinition


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """Which tools the model sees, and whether it must call one of them.

    ``is_legacy``: they came as ``functions``, and the answer has a ``function_call``.
    Raise InvalidRequestError for tools past the bounds of schemas.
    """

    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    is_legacy: bool = False

    def __post_init__(self) -> None:
        check_tools(self.tools, "functions" if self.is_legacy else "tools")


def only(
    tools: tuple[Tool, ...], names: list[str], param: str = "tool_choice", among: str = "tools"
) -> tuple[Tool, ...]:
    """Return the named tools; a model that does not see the others cannot call them.

    Raise InvalidRequestError for a name that is not there.
    """
    known = {tool.name for tool in tools}
    if missing := [name for name in names if name not in known]:
        raise InvalidRequestError(
            f"Invalid value for '{param}': there is no tool named '{missing[0]}' in '{among}'.",
            param=param,
        )
    return tuple(tool for tool in tools if tool.name in names)


def to_grammar(given: GrammarDefinition | None) -> Constraint | None:
    """Return what the input of a custom tool must match."""
    return None if given is None else Constraint(given.syntax, given.definition, "tools")


def require_stream_for_options(stream_options: object, stream: bool | None) -> None:
    """Raise InvalidRequestError for ``stream_options`` without a stream."""
    if stream_options is not None and not stream:
        raise InvalidRequestError(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
        )


def to_sampled_request(body: SamplingFields, spec: ModelSpec) -> GenerationRequest:
    """Return a request with these fields and nothing to answer yet. Raise InvalidRequestError."""
    asked = body.to_sampling(_logit_bias(body.logit_bias or {})).over(spec.sampling)
    return GenerationRequest(
        model=spec.id,
        sampling=spec.forced_sampling.over(asked),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        cache_prompt=body.cache_prompt is not False,
        lora=_lora(body, spec),
        extensions=_extensions(body),
    )


def with_token_report(
    asked: GenerationRequest, fields: TokenReportFields, *, stream: bool
) -> GenerationRequest:
    """Return a request that tells of tokens what these fields ask for. Raise InvalidRequestError.

    The rules are vLLM's.
    """
    if fields.prompt_logprobs is not None and stream:
        raise InvalidRequestError(
            "Invalid 'prompt_logprobs': it cannot be used together with 'stream'.",
            param="prompt_logprobs",
        )
    if "logprob_token_ids" in asked.extensions and asked.top_logprobs is None:
        raise InvalidRequestError(
            "Invalid 'logprob_token_ids': it is only allowed together with 'logprobs'.",
            param="logprob_token_ids",
        )
    return replace(
        asked,
        token_ids=bool(fields.return_token_ids),
        tokens_as_ids=bool(fields.return_tokens_as_token_ids),
        prompt_logprobs=fields.prompt_logprobs,
    )


def _extensions(body: SamplingFields) -> dict[str, Any]:
    given = {name: getattr(body, name) for name in ServerFields.model_fields}
    tag = getattr(getattr(body, "structured_outputs", None), "structural_tag", None)
    given["structural_tag"] = tag if tag is None or isinstance(tag, str) else json.dumps(tag)
    return {name: value for name, value in given.items() if value is not None}


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    if (bad := next((token for token in biases if not _is_token_id(token)), None)) is not None:
        raise InvalidRequestError(
            f"Invalid 'logit_bias': {bad[:100]!r} is not a token id.", param="logit_bias"
        )
    return {int(token): bias for token, bias in biases.items()}


def _is_token_id(text: str) -> bool:
    return text.isdecimal() and len(text) <= 10 and int(text) < 2**31


def _lora(body: SamplingFields, spec: ModelSpec) -> tuple[tuple[str, float], ...]:
    """Return the adapters and their scales; a bare name is one in full."""
    match body.lora:
        case None:
            return spec.lora
        case str(name):
            wanted: tuple[tuple[str, float], ...] = ((name, 1.0),)
        case adapters:
            known = tuple(spec.lora_adapters)
            wanted = tuple(
                (_adapter_name(adapter, known, f"lora[{number}]"), adapter.scale)
                for number, adapter in enumerate(adapters)
            )
    if unknown := [name for name, _ in wanted if name not in spec.lora_adapters]:
        raise InvalidRequestError(
            f"Invalid 'lora': the model `{spec.id}` has no adapter {unknown[0][:100]!r}; it has "
            f"{', '.join(spec.lora_adapters)}.",
            param="lora",
        )
    return wanted


def _adapter_name(adapter: LoraAdapter, known: tuple[str, ...], param: str) -> str:
    if adapter.name is not None:
        return adapter.name
    if adapter.id is None:
        raise InvalidRequestError(
            f"Missing required parameter: '{param}.name'.",
            param=f"{param}.name",
            code="missing_required_parameter",
        )
    if adapter.id >= len(known):
        raise InvalidRequestError(
            f"Invalid '{param}.id': there is no adapter {adapter.id}.", param=f"{param}.id"
        )
    return known[adapter.id]


def to_choices(n: int | None, spec: ModelSpec, param: str = "n") -> int:
    """Return how many answers each prompt gets. Raise InvalidRequestError for too many.

    All run at once, so there can be no more of them than the model has slots.
    """
    if n is None or n == 1:
        return 1
    if n > spec.slots:
        raise InvalidRequestError(
            f"Invalid '{param}': the model `{spec.id}` can give at most {spec.slots} choices.",
            param=param,
            code="integer_above_max_value",
        )
    return n


def to_reasoning_budget(ours: int | None, theirs: int | None) -> int | None:
    """Return how many tokens of reasoning there may be, by our name or by vLLM's."""
    return theirs if ours is None else ours


def to_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop texts."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def to_template_vars(
    switches: Mapping[str, Any], *variables: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the variables of the chat template.

    ``switches`` are the fields ``enable_thinking``, ``reasoning_effort`` and ``verbosity``;
    ``variables`` those that hold variables. Who sends a switch means it, so these win.
    """
    merged: dict[str, Any] = {}
    for values in variables:
        merged |= values or {}
    effort = switches.get("reasoning_effort")
    if effort is not None:
        merged["enable_thinking"] = effort != "none"
    return merged | {name: value for name, value in switches.items() if value is not None}
