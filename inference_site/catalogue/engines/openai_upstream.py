"""Servers with an OpenAI-compatible API: their flavors, and the options of models on them.

A flavor maps this platform's names of samplers, extensions and kinds of constraints to fields of
the server's requests; a dot leads into an object. A field without an entry is not sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    HttpUrl,
    PositiveInt,
    Secret,
    SecretStr,
    ValidationInfo,
    field_validator,
)

from inference_site.catalogue.engines.options import EngineOptions
from inference_site.catalogue.operator_settings import Text, TextOrNumber, path_validator
from inference_site.core.domain.model_spec import ModelSpec

Capability = Literal[
    "audio", "cache_prompt", "chat", "chat_template", "choices", "completions", "dimensions",
    "embeddings", "grammar", "logprobs", "mirostat", "moderation", "prompt_logprobs", "render",
    "rerank", "response_prefix", "speech", "stop_token_ids", "suffix", "token_ids", "tokens",
    "tools", "transcription", "translation", "vision",
]  # fmt: skip
"""The values of the option ``capabilities``."""

FlavorName = Literal["openai", "vllm", "sglang", "llama_cpp", "ollama", "tgi"]

RESPONSE_FORMAT = "response_format"
"""The only target field that wraps its constraint in an object, as OpenAI's API does."""


@dataclass(frozen=True, slots=True)
class Flavor:
    """The dialect of one server software.

    ``running_usage`` is the request field that makes the server count tokens in every chunk, so
    that a run that is stopped early has its usage. ``tokens`` names the software whose token
    endpoints the server has. ``float_embeddings``: ask for embeddings as floats, because the server
    has no base64. ``forces_by_schema``: force a call with a JSON schema, because the server's
    ``tool_choice`` allows text before the call. ``schema_value``: JSON schemas are sent in
    ``response_format.value``. ``seed_limit`` is the first seed that is too large. ``names_tokens``:
    log probabilities carry token ids, which identify a stop token. ``ends_after_stop``: the stop
    text may be in the output. ``joins_held_tokens``: tokens that may begin a stop text have one log
    probability together. ``greedy_once``: the server refuses several choices at temperature 0,
    which would be equal. ``forces_strictly``: a forced call matches its schema only if the tool is
    ``strict``. ``unbounded`` is what the server makes grammars of without limits of time and depth,
    so that a client could freeze or end it. ``ready`` is the path that answers with status 200 once
    the server accepts requests.
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
    joins_held_tokens: bool = False
    forces_strictly: bool = False
    greedy_once: bool = False
    unbounded: tuple[Literal["gbnf", "json_schema", "tools"], ...] = ()
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
        joins_held_tokens=True,
        unbounded=("gbnf", "json_schema", "tools"),
    ),
    "ollama": Flavor(
        _OLLAMA,
        _BASE | {"chat_template", "suffix"},
        unbounded=("json_schema",),  # It has llama.cpp's converter.
        ready="/v1/models",
    ),
    "tgi": Flavor(_TGI, _BASE, schema_value=True),
}

FIELDS = frozenset(name for flavor in FLAVORS.values() for name in flavor.fields)
"""The keys of the option ``fields``."""


_DEFAULT_FLAVOR: FlavorName = "openai"


def _without_query(url: HttpUrl) -> HttpUrl:
    if url.query is not None or url.fragment is not None or url.username or url.password:
        raise ValueError("must have neither a query nor a password")
    return url


def _known_field(name: str) -> str:
    if name not in FIELDS:
        raise ValueError("unknown name of a field; docs/engines.md lists them")
    return name


def fits_header(text: str) -> str:
    """Return the text. Raise ValueError for one that cannot be the name or value of a header."""
    if not text or not text.isascii() or not text.isprintable():
        raise ValueError("must fit into a header: printable ASCII, and not empty")
    return text


_HeaderText = Annotated[TextOrNumber, AfterValidator(fits_header)]
_BaseUrl = Annotated[HttpUrl, AfterValidator(_without_query)]


class ServerOptions(EngineOptions):
    """How the worker calls a model's server, its own or an upstream; see docs/engines.md."""

    model: Text | None = None
    flavor: FlavorName = _DEFAULT_FLAVOR
    capabilities: list[Capability] | None = None
    fields: dict[Annotated[str, AfterValidator(_known_field)], Text | None] = {}
    chat_template_kwargs: dict[str, Any] = {}
    timeout_s: float = Field(120.0, gt=0, lt=1e6)
    check_every_s: float = Field(5.0, ge=0.1, lt=1e6)


class UpstreamOptions(ServerOptions):
    """The addresses of a model's servers, and the API key for them; see docs/engines.md.

    ``base_url`` or ``base_urls`` is required; the servers of a list are interchangeable. At most
    one of ``api_key``, ``api_key_env`` and ``api_key_file`` is set; the worker reads the variable
    or the file when it loads the model. ``connections`` is accepted from old entries and has no
    effect: idle connections are closed after seconds.
    """

    base_url: _BaseUrl | None = None
    base_urls: list[_BaseUrl] = Field([], max_length=64, validate_default=True)
    connections: PositiveInt | None = None
    api_key: Annotated[SecretStr, Field(min_length=1)] | None = None
    api_key_env: Text | None = None
    api_key_file: Annotated[TextOrNumber, path_validator()] | None = None
    headers: dict[_HeaderText, Secret[_HeaderText]] = {}

    @property
    def addresses(self) -> list[HttpUrl]:
        """The addresses of all servers."""
        return self.base_urls if self.base_url is None else [self.base_url]

    @field_validator("base_urls")
    @classmethod
    def _one_of_url_and_urls(cls, value: list[HttpUrl], info: ValidationInfo) -> list[HttpUrl]:
        if "base_url" not in info.data:  # It was refused.
            return value
        if value and info.data["base_url"] is not None:
            raise ValueError("cannot be used together with 'base_url'")
        if not value and info.data["base_url"] is None:
            raise ValueError("it is missing, as is 'base_url': the address of a server, up to /v1")
        return value

    @field_validator("api_key_env", "api_key_file")
    @classmethod
    def _one_key(cls, value: str, info: ValidationInfo) -> str:
        for other in ("api_key", "api_key_env"):
            if info.data.get(other) is not None:
                raise ValueError(f"cannot be used together with '{other}'")
        return value


def supported_fields(spec: ModelSpec) -> frozenset[str]:
    """Return the names of the fields that are sent to the model's server."""
    flavor = FLAVORS[spec.options.get("flavor", _DEFAULT_FLAVOR)]
    targets = {**flavor.fields, **spec.options.get("fields", {})}
    return frozenset(name for name, target in targets.items() if target is not None)


def capabilities(spec: ModelSpec) -> frozenset[str]:
    """Return the capabilities of this model: those of its entry, else the flavor's."""
    declared = spec.options.get("capabilities")
    if declared is not None:
        return frozenset(declared)
    return FLAVORS[spec.options.get("flavor", _DEFAULT_FLAVOR)].capabilities
