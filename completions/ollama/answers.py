"""Answers of Ollama's API, as the OpenAPI document describes them. Source: its ``docs/api.md``."""

from __future__ import annotations

from typing import Any, Literal

from completions.wire.chat import ContentLogprob
from inference_site.api.payload import WireObject


class OllamaError(WireObject):
    """The body of every error, and the last line of a stream that fails."""

    error: str


class OllamaCalledFunction(WireObject):
    """``message.tool_calls[].function``; the arguments are an object."""

    name: str
    arguments: dict[str, Any]


class OllamaCall(WireObject):
    """``message.tool_calls[]``."""

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
    done_reason: Literal["stop", "length", "load"] | None = None
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
