"""From the fields that every generating endpoint has in common to the domain."""

from __future__ import annotations

from typing import Any

from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.sampling import Sampling
from inference_site.errors.api_errors import InvalidRequestError
from inference_site.request_fields.capabilities import require
from inference_site.request_fields.wire.sampling import SamplingFields


def common_fields(body: SamplingFields, spec: ModelSpec) -> dict[str, Any]:
    """Return these fields of a GenerationRequest. Raise InvalidRequestError."""
    if body.stop_token_ids:
        require("stop_token_ids", "stop_token_ids", spec)
    if body.mirostat:
        require("mirostat", "mirostat", spec)
    if body.cache_prompt is False:
        require("cache_prompt", "cache_prompt", spec)
    return {
        "model": spec.id,
        "sampling": to_sampling(body, spec),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "ignore_eos": bool(body.ignore_eos),
        "cache_prompt": body.cache_prompt is not False,
        "lora": _lora(body, spec),
    }


def to_sampling(body: SamplingFields, spec: ModelSpec) -> Sampling:
    """Return the sampler settings; the wire's names are the domain's."""
    return body.to_sampling(_logit_bias(body.logit_bias or {})).over(spec.sampling)


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
            return ()
        case str(name):
            wanted: tuple[tuple[str, float], ...] = ((name, 1.0),)
        case adapters:
            wanted = tuple((adapter.name, adapter.scale) for adapter in adapters)
    require("lora", "lora", spec)
    if unknown := [name for name, _ in wanted if name not in spec.lora_adapters]:
        raise InvalidRequestError(
            f"Invalid 'lora': the model `{spec.id}` has no adapter {unknown[0][:100]!r}; it has "
            f"{', '.join(spec.lora_adapters)}.",
            param="lora",
        )
    return wanted


def to_choices(n: int | None, spec: ModelSpec, param: str = "n") -> int:
    """Return how many answers each prompt gets. Raise InvalidRequestError for too many.

    All run at once, so there can be no more of them than the model has slots.
    """
    if n is None or n == 1:
        return 1
    require("choices", param, spec)
    if n > spec.slots:
        raise InvalidRequestError(
            f"Invalid '{param}': the model `{spec.id}` can give at most {spec.slots} choices.",
            param=param,
            code="integer_above_max_value",
        )
    return n


def to_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop texts."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
