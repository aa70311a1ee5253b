"""Capabilities: requests that a model or its engine cannot answer are refused before the queue."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from inference_site.catalogue.engines.registry import supported_fields
from inference_site.catalogue.operator_settings import MAX_BIAS, SamplerFields
from inference_site.core.domain.request import (
    AudioPart,
    GenerationRequest,
    ImagePart,
    Message,
    Tool,
)
from inference_site.core.errors.api_errors import InvalidRequestError
from inference_site.gateway.api.payload import WireRequest
from inference_site.gateway.request_fields.constraint import STRUCTURAL_TAG
from inference_site.gateway.request_fields.wire import ConstraintFields, ServerFields
from inference_site.gateway.submission.model_access import ResolvedModel

LOGPROBS = "message.output_text.logprobs"
"""The entry of ``include`` that asks for log probabilities."""

_ENDPOINTS = {
    "chat": "chat completions",
    "completions": "completions",
    "embeddings": "embeddings",
    "moderation": "moderations",
    "render": "the rendering of chats, by which their tokens are counted",
    "rerank": "reranking",
    "speech": "speech",
    "suffix": "infill",
    "tokens": "tokens",
    "transcription": "transcriptions",
    "translation": "translations",
}


def _is_given(value: object) -> bool:
    return value is not None


def _is_false(value: object) -> bool:
    return value is False


def _is_several(value: int | None) -> bool:
    return value is not None and value > 1


def _is_several_prompts(value: object) -> bool:
    return isinstance(value, list) and len(value) > 1 and not isinstance(value[0], int)


def _has_type(*types: str) -> Callable[[Any], bool]:
    return lambda value: getattr(value, "type", None) in types


@dataclass(frozen=True, slots=True)
class _Need:
    """A field of requests, and the capability that it needs when ``when`` is true of its value.

    ``field`` is a path. Errors name the field ``param``, or the path without one.
    """

    field: str
    capability: str
    when: Callable[[Any], bool] = _is_given
    param: str = ""


_NEEDS = (
    _Need("tools", "tools", bool),
    _Need("functions", "tools", bool),
    _Need("stop_token_ids", "stop_token_ids", bool),
    _Need("mirostat", "mirostat", bool),
    _Need("cache_prompt", "cache_prompt", _is_false),
    _Need("lora", "lora"),
    _Need("logprobs", "logprobs", lambda value: value is not None and value is not False),
    _Need("picks", "logprobs", bool, param="best_of"),
    _Need("reads_prompt", "prompt_logprobs", bool, param="echo"),
    _Need("include", "logprobs", lambda value: LOGPROBS in (value or ())),
    _Need("best_of", "choices", _is_several),
    _Need("n", "choices", _is_several),
    _Need("prompt", "choices", _is_several_prompts),
    _Need("response_format", "grammar", _has_type("json_object", "json_schema")),
    _Need("text.format", "grammar", _has_type("json_object")),
    _Need("text.format", "grammar", _has_type("json_schema"), param="text.format.schema"),
    *(_Need(field, "grammar") for field in ConstraintFields.model_fields),
    _Need("reasoning.effort", "chat_template"),
    _Need("text.verbosity", "chat_template"),
    _Need("enable_thinking", "chat_template"),
    _Need("reasoning_effort", "chat_template"),
    _Need("verbosity", "chat_template"),
    _Need("chat_template_kwargs", "chat_template"),
    _Need("template_vars", "chat_template"),
    _Need("reasoning_budget", "chat_template"),
    _Need("thinking_token_budget", "chat_template"),
    _Need("prompt_template", "prompt_template", bool),
    _Need("response_prefix", "response_prefix", bool),
    _Need("add_generation_prompt", "response_prefix", _is_false),
    _Need("continue_final_message", "response_prefix", bool),
    _Need("suffix", "suffix"),
    _Need("return_token_ids", "token_ids", bool),
    _Need("return_tokens_as_token_ids", "token_ids", bool),
    _Need("prompt_logprobs", "token_ids"),
)
"""Fields that need a capability, in the order in which they are checked."""

_MAPPED = {
    "reasoning.effort": "reasoning_effort",
    "text.verbosity": "verbosity",
    "reasoning_effort": "reasoning_effort",
    "verbosity": "verbosity",
}
"""Fields that a model server may honour itself, without a chat template that is known here, and
the names that engines have for them."""
_FOR_THE_ENGINE = (
    *SamplerFields.model_fields,
    *("logit_bias", "ignore_eos", "reasoning_budget", "thinking_token_budget", "return_progress"),
)
"""Fields that change the answer and that a model server may not know."""
_OTHER_NAMES = {"thinking_token_budget": "reasoning_budget"}


@dataclass(frozen=True, slots=True)
class _Restriction:
    """A field that restricts the allowed answers when ``when`` is true of its value.

    It is refused if the engine does not honour it. Fields that only tune are ignored and named.
    """

    field: str
    when: Callable[[Any], bool] = _is_given

    @property
    def name(self) -> str:
        return self.field.rpartition(".")[2]


RESTRICTIONS = (
    _Restriction("min_tokens", bool),
    _Restriction("allowed_token_ids"),
    _Restriction("bad_words", bool),
    _Restriction("include_stop_str_in_output", bool),
    _Restriction("truncate_prompt_tokens"),
    _Restriction("logprob_token_ids"),
    _Restriction(STRUCTURAL_TAG),
    _Restriction(
        "logit_bias",
        lambda biases: any(abs(bias) == MAX_BIAS for bias in (biases or {}).values()),
    ),
    _Restriction("add_generation_prompt", _is_false),
)
HINTS = ("cache_salt", "priority", "vllm_xargs")
"""Fields of model servers that only tune."""
_OF_SERVERS = {*ServerFields.model_fields, "structural_tag"}
"""Fields that an engine of this product has only as a capability."""


def _honours(model: ResolvedModel, name: str) -> bool:
    if name in model.capabilities:
        return True
    honoured = supported_fields(model.spec)
    return name not in _OF_SERVERS if honoured is None else name in honoured


def require_fields(
    model: ResolvedModel, endpoint: str, body: WireRequest, unused: Collection[str] = ()
) -> None:
    """Raise InvalidRequestError for the first field that the model cannot honour.

    ``endpoint`` is a capability, too. ``unused`` are fields without an effect on this request.
    """
    require_endpoint(model, endpoint)
    honoured = supported_fields(model.spec) or ()
    for need in _NEEDS:
        if need.capability in model.capabilities or need.field in unused:
            continue
        if _MAPPED.get(need.field) in honoured:
            continue
        if need.when(_value(body, need.field)):
            raise _unsupported(need.param or need.field, model)
    for restriction in RESTRICTIONS:
        is_asked = restriction.when(_value(body, restriction.field))
        if is_asked and not _honours(model, restriction.name):
            raise _unsupported(restriction.field, model)


def ignored_fields(model: ResolvedModel, body: WireRequest, asked: GenerationRequest) -> list[str]:
    """Return the names of fields that were sent and are ignored, here or by the engine.

    The grammar of a custom tool constrains a call that must come, and no other. A constrained
    answer ends where it is whole, so ``ignore_eos`` has no effect on it.
    """
    names = body.ignored_params
    honoured = supported_fields(model.spec)
    hints = (name for name in HINTS if getattr(body, name, None) is not None)
    names += [name for name in hints if not _honours(model, name)]
    if honoured is not None:
        given = (name for name in _FOR_THE_ENGINE if getattr(body, name, None) not in (None, False))
        names += [name for name in given if _OTHER_NAMES.get(name, name) not in honoured]
        if any(tool.is_strict for tool in asked.tools) and not {"strict"} & honoured:
            names.append("tools[].strict")
    if asked.ignore_eos and not asked.goes_on_after_eos and "ignore_eos" not in names:
        names.append("ignore_eos")
    if any(tool.grammar for tool in asked.tools) and not asked.forced_grammar:
        names.append("tools[].format")
    return names


def require_endpoint(model: ResolvedModel, endpoint: str) -> None:
    """Raise InvalidRequestError for a model without this endpoint."""
    if endpoint not in model.capabilities:
        raise InvalidRequestError(
            f"The model `{model.spec.id}` does not support {_ENDPOINTS[endpoint]}.",
            param="model",
            code="unsupported_model",
        )


def require_grammars(model: ResolvedModel, tools: Iterable[Tool]) -> None:
    """Raise InvalidRequestError for a tool with a grammar if the model cannot follow grammars."""
    grammars = (tool.grammar for tool in tools if tool.grammar is not None)
    if "grammar" not in model.capabilities and (first := next(grammars, None)) is not None:
        raise _unsupported(first.param, model)


def require_media(model: ResolvedModel, messages: Iterable[Message]) -> None:
    """Raise InvalidRequestError for an image or audio that the model cannot take."""
    for part in (part for message in messages for part in message.parts):
        if isinstance(part, ImagePart) and "vision" not in model.capabilities:
            what, param = "reads no images", part.param
        elif isinstance(part, AudioPart) and "audio" not in model.capabilities:
            what, param = "takes no audio", part.param.removesuffix(".data")
        else:
            continue
        raise InvalidRequestError(
            f"The model {model.spec.id} {what}.", param=param, code="unsupported_parameter"
        )


def _value(body: object, path: str) -> Any:
    """Return the value of a field that the body's class declares, else None."""
    for name in path.split("."):
        if not isinstance(body, WireRequest):
            return None
        if name not in type(body).model_fields and not hasattr(type(body), name):
            return None
        body = getattr(body, name)
    return body


def _unsupported(param: str, model: ResolvedModel) -> InvalidRequestError:
    return InvalidRequestError(
        f"Unsupported parameter: '{param}' is not supported with the model `{model.spec.id}`.",
        param=param,
        code="unsupported_parameter",
    )
