"""Requests and answers of Ollama's API. Source: ``docs/api.md`` of Ollama.

Fields of a load, such as ``keep_alive`` and ``options.num_ctx``, are accepted: what a model gets is
in its entry.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from completions.wire.chat import ContentLogprob
from inference_site.gateway.api.payload import WireObject, WireRequest

_Seconds = float | int | str | None


def _whole_number(value: object) -> object:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    return value


_Whole = Annotated[int, BeforeValidator(_whole_number)]
"""An integer, which some clients write as a decimal (``4096.0``); Ollama takes it in options."""


class Options(WireRequest):
    """``options``: the samplers under Ollama's names."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: _Whole | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: _Whole | None = None
    stop: str | list[str] | None = None
    num_predict: _Whole | None = None
    num_ctx: _Whole | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: _Whole | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None


class CalledFunction(WireRequest):
    """``messages[].tool_calls[].function``; the arguments are an object."""

    index: int | None = None
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Call(WireRequest):
    """``messages[].tool_calls[]``."""

    id: str | None = None
    function: CalledFunction


class Message(WireRequest):
    """``messages[]``; ``images`` are base64, ``tool_name`` is the tool of a result."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: list[str] | None = None
    thinking: str | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class _Run(WireRequest):
    """The fields that chats and completions share. They stream unless ``stream`` is false."""

    model: str
    format: Annotated[
        Annotated[Literal["", "json"] | None, Tag("name")]
        | Annotated[dict[str, Any], Tag("schema")],
        Discriminator(lambda value: "schema" if isinstance(value, dict) else "name"),
    ] = ""
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    stream: bool | None = None
    keep_alive: _Seconds = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def done_reason(self) -> Literal["load", "unload"]:
        """The end of the answer to a request without a prompt."""
        is_zero = re.fullmatch(r"0+(\.0+)?(ms|s|m|h)?", str(self.keep_alive)) is not None
        return "unload" if is_zero else "load"


class ChatRequest(_Run):
    """The body of ``POST /api/chat``."""

    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None


class GenerateRequest(_Run):
    """The body of ``POST /api/generate``; ``raw`` prompts get no template."""

    prompt: str | None = None
    suffix: str | None = None
    images: list[str] | None = None
    system: str | None = None
    raw: bool | None = None


class EmbedRequest(WireRequest):
    """The body of ``POST /api/embed``, and, with ``prompt``, of ``POST /api/embeddings``."""

    model: str
    input: str | list[str] | None = None
    prompt: str | None = None
    dimensions: int | None = None
    truncate: bool | None = None
    options: Options | None = None
    keep_alive: _Seconds = None


class PullRequest(WireRequest):
    """The body of ``POST /api/pull``; ``name`` is the older name of ``model``."""

    model: str | None = None
    name: str | None = None
    insecure: bool | None = None
    stream: bool | None = None


class ShowRequest(WireRequest):
    """The body of ``POST /api/show``; ``name`` is the older name of ``model``."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class OllamaError(WireObject):
    """The body of every error, and the last line of a stream that fails."""

    error: str


class OllamaCalledFunction(WireObject):
    """``message.tool_calls[].function``; the arguments are an object."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(WireObject):
    """``message.tool_calls[]``."""

    id: str
    function: OllamaCalledFunction


class OllamaMessage(WireObject):
    """``message`` of an answer or of a line."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class _Answer(WireObject):
    """What answers and lines have in common; ``done`` comes with the counts, in nanoseconds."""

    model: str
    created_at: str
    done: bool
    logprobs: list[ContentLogprob] | None = None
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChat(_Answer):
    """The answer of ``POST /api/chat``, or a line of it."""

    message: OllamaMessage


class OllamaText(_Answer):
    """The answer of ``POST /api/generate``, or a line of it."""

    response: str
    thinking: str | None = None


class OllamaEmbeddings(WireObject):
    """The answer of ``POST /api/embed``; durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(WireObject):
    """The answer of ``POST /api/embeddings``."""

    embedding: list[float]


class OllamaDetails(WireObject):
    """``details`` of a model."""

    parent_model: str
    format: str
    family: str
    families: list[str] | None
    parameter_size: str
    quantization_level: str


class _Model(WireObject):
    """What lists say of a model."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModel(_Model):
    """An entry of ``GET /api/tags``."""

    modified_at: str


class OllamaModels(WireObject):
    """The answer of ``GET /api/tags``."""

    models: list[OllamaModel]


class OllamaLoadedModel(_Model):
    """An entry of ``GET /api/ps``."""

    expires_at: str
    size_vram: int
    context_length: int


class OllamaLoadedModels(WireObject):
    """The answer of ``GET /api/ps``."""

    models: list[OllamaLoadedModel]


class OllamaModelInfo(WireObject):
    """The answer of ``POST /api/show``."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaProgress(WireObject):
    """A line of ``POST /api/pull``; sizes are in bytes.

    ``digest`` tells apart what is fetched one after the other: it is the reference, and of a later
    part of a split model it also has the number of the part.
    """

    status: str
    digest: str | None = None
    total: int | None = None
    completed: int | None = None


class OllamaPulled(WireObject):
    """The answer of ``POST /api/pull``, or its last line; ``model`` is the id that is served."""

    status: Literal["success"]
    model: str


class OllamaVersion(WireObject):
    """The answer of ``GET /api/version``."""

    version: str
