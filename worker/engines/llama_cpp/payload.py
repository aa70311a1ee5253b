"""From a generation request to the JSON that llama.cpp's chat endpoint takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import orjson

from inference_site.domain.errors import EngineUnavailable
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from inference_site.domain.sampling import Sampling
from worker.engines.chat.families import FAMILIES
from worker.engines.chat.forced_call import call_schema
from worker.engines.chat.tool_schemas import plain_schema
from worker.engines.chat.wire import wire_message, wire_tool
from worker.engines.llama_cpp.bounds import check_schemas
from worker.engines.llama_cpp.constraints import constraint_fields, schema_fields
from worker.engines.llama_cpp.media import content

_CERTAIN = 1e6
"""A bias greater than the distance between any two scores."""


def encode_chat(
    request: GenerationRequest,
    spec: ModelSpec,
    may_think: bool = True,
    stop_texts: Sequence[str] = (),
) -> bytes:
    """Return the payload of a chat. Raise InvalidRequest for what it cannot express.

    ``may_think``: the model's template knows of reasoning. ``stop_texts`` are the template's own.
    """
    variables = {**spec.options.get("chat_template_kwargs", {}), **request.template_vars}
    thinks = may_think and variables.get("enable_thinking") is not False
    offers = bool(request.tools) and not request.must_call
    payload = {
        **_shared(request, spec),
        **constraint_fields(request.constraint, from_start=not thinks and not offers),
        **_logprobs(_top_logprobs(request)),
        **_given(thinking_budget_tokens=request.reasoning_budget),
        **_beginning(request, spec),
        **_given(stop=[*request.stop, *_stops_of_family(spec), *stop_texts] or None),
        "return_progress": True,
        "chat_template_kwargs": variables,
    }
    return orjson.dumps(_with_tools(payload, request, thinks))


def encode_completion(
    request: GenerationRequest, spec: ModelSpec, shown: tuple[str, ...] = ()
) -> bytes:
    """Return the payload of a completion. Raise InvalidRequest as ``encode_chat`` does.

    ``shown`` are texts of special tokens that are not left out of the output.
    """
    top = _top_logprobs(request)
    payload = {
        **_shared(request, spec),
        **constraint_fields(request.constraint, from_start=True),
        **_given(logprobs=None if top is None else max(1, top)),
        "prompt": [whole_prompt(prompt, request.suffix, spec) for prompt in request.prompts],
        "preserved_tokens": shown,
        "return_progress": request.return_progress,
    }
    return orjson.dumps(payload)


def encode_token(
    request: GenerationRequest, spec: ModelSpec, prompt: Sequence[int], token: int, top: int
) -> bytes:
    """Return the payload that has this token drawn after the prompt."""
    payload = {
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "logit_bias": [[token, _CERTAIN]],
        "logprobs": max(1, top),
        **_lora(request, spec),
    }
    return orjson.dumps(payload)


def whole_prompt(
    prompt: str | tuple[int, ...], suffix: str | None, spec: ModelSpec
) -> str | list[int]:
    """Return a prompt; with a suffix, between the model's marks for filling in the middle."""
    if isinstance(prompt, tuple):
        return list(prompt)
    if suffix is None:
        return prompt
    before, after, middle = spec.options["fim_tokens"]
    return f"{before}{prompt}{after}{suffix}{middle}"


def _beginning(request: GenerationRequest, spec: ModelSpec) -> dict[str, Any]:
    """Return the messages, and how the answer begins.

    A prefix of the answer is a last message of the assistant that is to be continued.
    """
    messages = [
        wire_message(message, content(message, spec), _arguments) for message in request.messages
    ]
    if not request.response_prefix:
        return {"messages": messages, "add_generation_prompt": request.add_generation_prompt}
    prefix = {"role": "assistant", "content": request.response_prefix}
    return {
        "messages": [*messages, prefix],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }


def _shared(request: GenerationRequest, spec: ModelSpec) -> dict[str, Any]:
    return {
        "n": request.choices,
        "stream": True,
        "stream_options": {"include_usage": True},
        "timings_per_token": True,
        "ignore_eos": request.ignore_eos,
        "cache_prompt": request.cache_prompt,
        "verbose": bool(request.stop),  # Says which stop text ended a choice.
        **_lora(request, spec),
        **_given(
            **_sampling(request.sampling, spec.context_length),
            max_tokens=_limit(request.max_output_tokens, spec.context_length),
            stop=list(request.stop) or None,
        ),
    }


def _stops_of_family(spec: ModelSpec) -> tuple[str, ...]:
    """Return what ends a turn of the template's family; the tokenizer may not know it as an end."""
    family = FAMILIES.get(spec.options.get("chat_template", ""))
    return (*(family.stop if family else ()), *spec.options.get("stop_texts", ()))


def _limit(tokens: int | None, context_length: int) -> int | None:
    """Return a limit that llama.cpp's integers can hold; no answer is longer than the context."""
    return None if tokens is None else min(tokens, context_length)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _with_tools(
    payload: dict[str, Any], request: GenerationRequest, thinks: bool
) -> dict[str, Any]:
    """Add the tools.

    llama.cpp does not force a call: with ``required`` the model may say something else first. So a
    forced call is a JSON schema, and the tools reach the template as a variable of its own. So they
    do beside a grammar, which says all that may come, and which llama.cpp takes without tools only.
    """
    if not request.tools:
        return payload
    # Templates are shown a description by llama.cpp whether there is one or not.
    tools = [wire_tool(replace(tool, description=tool.description or "")) for tool in request.tools]
    shown = {"chat_template_kwargs": {**payload["chat_template_kwargs"], "tools": tools}}
    if request.forced_grammar is not None:
        shown["chat_template_kwargs"]["enable_thinking"] = False  # It would bind thoughts too.
        return {**payload, **shown, **constraint_fields(request.forced_grammar, from_start=True)}
    if request.must_call:
        call = schema_fields(call_schema(request.tools), "tools", from_start=not thinks)
        return {**payload, **shown, **call}
    if "grammar" in payload:
        return {**payload, **shown}
    for tool in tools:
        tool["function"]["parameters"] = plain_schema(tool["function"]["parameters"])
    check_schemas([tool["function"]["parameters"] for tool in tools], "tools")
    return {**payload, "tools": tools, "parallel_tool_calls": request.parallel_tool_calls}


def _arguments(text: str) -> str:
    """Return arguments that llama.cpp can parse: what is no JSON becomes a JSON string.

    One malformed call in the history must not end a conversation.
    """
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return orjson.dumps(text).decode()
    return text


def _lora(request: GenerationRequest, spec: ModelSpec) -> dict[str, Any]:
    """Return the adapters by their numbers; those that are not named are not applied.

    llama.cpp gets all of them: without any it would go on from a prompt that it has read
    with adapters.
    """
    if missing := [name for name, _ in request.lora if name not in spec.lora_adapters]:
        raise EngineUnavailable(f"The adapter '{missing[0]}' is not loaded now.")
    if not spec.lora_adapters:
        return {}
    scales = {**dict.fromkeys(spec.lora_adapters, 0.0), **dict(request.lora)}
    return {"lora": [{"id": n, "scale": scales[name]} for n, name in enumerate(spec.lora_adapters)]}


def _top_logprobs(request: GenerationRequest) -> int | None:
    """Return how many are needed: a stop token is recognised by the id beside its logprob."""
    if request.top_logprobs is None and request.stop_token_ids:
        return 0
    return request.top_logprobs


def _logprobs(top: int | None) -> dict[str, Any]:
    # With 0 llama.cpp gives no log probabilities at all; the reader cuts the one too many.
    return {} if top is None else {"logprobs": True, "top_logprobs": max(1, top)}


def _sampling(sampling: Sampling, context_length: int) -> dict[str, Any]:
    """Return the settings under llama.cpp's names: ours, but for one."""
    settings = asdict(sampling)
    if (last_n := sampling.dry_penalty_last_n) is not None:
        # -1 is the whole context. llama.cpp reserves memory for this number of tokens.
        settings["dry_penalty_last_n"] = min(last_n % (2**32), context_length)
    settings["repeat_penalty"] = settings.pop("repetition_penalty")
    settings["logit_bias"] = list(sampling.logit_bias) or None
    if sampling.seed is not None:
        settings["seed"] = sampling.seed % (2**32 - 1)  # 32 bits, the last of which means "random".
    return settings
