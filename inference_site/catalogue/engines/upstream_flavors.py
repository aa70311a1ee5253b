"""What servers call things, and what they can do beyond what OpenAI's own API has.

A flavor maps names of this platform (samplers, extensions and kinds of constraints) to fields of
the server's requests; a dot leads into an object. What has no entry is left out of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Capability = Literal[
    "audio", "cache_prompt", "chat", "chat_template", "choices", "completions", "dimensions",
    "embeddings", "grammar", "logprobs", "mirostat", "prompt_logprobs", "render",
    "response_prefix", "stop_token_ids", "suffix", "token_ids", "tokens", "tools", "vision",
]  # fmt: skip
"""What an operator may declare."""

FlavorName = Literal["openai", "vllm", "sglang", "llama_cpp", "ollama", "tgi"]

RESPONSE_FORMAT = "response_format"
"""The field that wraps its constraint; others hold the bare schema, grammar or expression."""


@dataclass(frozen=True, slots=True)
class Flavor:
    """One sort of server.

    ``running_usage`` is what makes it count tokens in every chunk, so that a run stopped at any
    point is accounted. ``tokens`` names whose endpoints for tokens it has. ``float_embeddings``:
    it knows no base64. ``forces_by_schema``: a call is forced with a JSON schema, because its
    ``tool_choice`` lets the model say something else first. ``seed_limit`` is the first seed that
    is too large. ``names_tokens``: log probabilities have the ids of their tokens, by which a stop
    token is found. ``greedy_once``: it refuses several choices of temperature 0, which
    would be alike. ``forces_strictly``: a forced call matches its schema only if the tool is
    ``strict``. ``ready`` is the path that answers once it can be used.
    """

    fields: Mapping[str, str]
    capabilities: frozenset[str]
    running_usage: Literal["continuous_usage_stats", "timings_per_token"] | None = None
    tokens: Literal["vllm", "llama_cpp"] | None = None
    float_embeddings: bool = True
    forces_by_schema: bool = False
    least_top_logprobs: int = 0
    schema_value: bool = False
    seed_limit: int | None = None
    lark_prefix: str = ""
    names_tokens: bool = False
    ends_after_stop: bool = False
    forces_strictly: bool = False
    greedy_once: bool = False
    ready: str = "/health"


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_EVERYWHERE = {
    **_same("frequency_penalty", "max_tokens", "presence_penalty", "seed", "stop"),
    **_same("parallel_tool_calls", "temperature", "tool_choice", "top_p"),
    "json_object": RESPONSE_FORMAT,
    "json_schema": RESPONSE_FORMAT,
}
_OPENAI = {
    **_EVERYWHERE,
    **_same("logit_bias", "n", "reasoning_effort", "strict", "suffix", "verbosity"),
}
_OPEN_WEIGHTS = {
    **_EVERYWHERE,
    **_same("chat_template_kwargs", "continue_final_message", "ignore_eos", "logit_bias", "min_p"),
    **_same("n", "reasoning_content", "stop_token_ids", "strict", "suffix", "top_k"),
}
_VLLM = {
    **_OPEN_WEIGHTS,
    **_same("add_generation_prompt", "reasoning_effort", "repetition_penalty"),
    **_same("allowed_token_ids", "bad_words", "include_stop_str_in_output", "min_tokens"),
    **_same("cache_salt", "priority", "truncate_prompt_tokens", "vllm_xargs"),
    **_same("logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids"),
    "reasoning_budget": "thinking_token_budget",
    "structural_tag": "structured_outputs.structural_tag",
    "regex": "structured_outputs.regex",
    "gbnf": "structured_outputs.grammar",
    "lark": "structured_outputs.grammar",
}
_SGLANG = {
    **_OPEN_WEIGHTS,
    **_same("reasoning_effort", "regex", "repetition_penalty"),
    "gbnf": "ebnf",
    "include_stop_str_in_output": "no_stop_trim",
    "min_tokens": "min_tokens",
}
_LLAMA_CPP = {
    **{name: name for name in _OPEN_WEIGHTS if name not in ("stop_token_ids", "suffix")},
    **_same("add_generation_prompt", "cache_prompt", "typical_p", "mirostat", "mirostat_eta"),
    **_same("dry_allowed_length", "dry_base", "dry_multiplier", "dry_penalty_last_n"),
    **_same("dry_sequence_breakers", "mirostat_tau", "xtc_probability", "xtc_threshold"),
    "json_object": RESPONSE_FORMAT,
    "json_schema": RESPONSE_FORMAT,
    "repetition_penalty": "repeat_penalty",
    "reasoning_budget": "thinking_budget_tokens",
    "gbnf": "grammar",
    "lark": "grammar",
    "regex": "grammar",
}
_OLLAMA = {
    **_EVERYWHERE,
    **_same("reasoning_effort", "suffix"),
    "reasoning_content": "reasoning",
}
_TGI = {**_EVERYWHERE, **_same("logit_bias")}

_BASE = frozenset({"chat", "completions", "grammar", "logprobs", "tools"})

FLAVORS: dict[FlavorName, Flavor] = {
    "openai": Flavor(_OPENAI, _BASE | {"choices"}, ends_after_stop=True, ready="/v1/models"),
    "vllm": Flavor(
        _VLLM,
        _BASE
        | {"chat_template", "choices", "prompt_logprobs", "render", "response_prefix"}
        | {"stop_token_ids", "token_ids", "tokens"},
        running_usage="continuous_usage_stats",
        tokens="vllm",
        float_embeddings=False,
        forces_strictly=True,
        greedy_once=True,
    ),
    "sglang": Flavor(
        _SGLANG,
        _BASE | {"chat_template", "choices", "response_prefix", "stop_token_ids"},
        running_usage="continuous_usage_stats",
    ),
    "llama_cpp": Flavor(
        _LLAMA_CPP,
        _BASE
        | {"cache_prompt", "chat_template", "choices", "mirostat", "render", "response_prefix"}
        | {"tokens"},
        running_usage="timings_per_token",
        tokens="llama_cpp",
        float_embeddings=False,
        forces_by_schema=True,
        least_top_logprobs=1,
        seed_limit=2**32 - 1,
        lark_prefix="%llguidance {}\n",
        names_tokens=True,
    ),
    "ollama": Flavor(_OLLAMA, _BASE | {"chat_template", "suffix"}, ready="/v1/models"),
    "tgi": Flavor(_TGI, _BASE, schema_value=True),
}

FIELDS = frozenset(name for flavor in FLAVORS.values() for name in flavor.fields)
"""The names that the option ``fields`` may map."""
