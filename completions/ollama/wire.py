"""Requests of Ollama's API. Source: ``docs/api.md`` of Ollama.

Fields of a load, such as ``keep_alive`` and ``options.num_ctx``, are accepted: what a model gets is
in its entry.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from completions.wire.chat import ChatCompletionRequest
from inference_site.api.payload import WireRequest
from inference_site.request_fields.wire import ManyStopTexts

_Seconds = float | int | str | None


class Options(WireRequest):
    """``options``: the samplers under Ollama's names."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    num_predict: int | None = None
    num_ctx: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None


class CalledFunction(WireRequest):
    """``messages[].tool_calls[].function``; the arguments are an object."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Call(WireRequest):
    """``messages[].tool_calls[]``."""

    function: CalledFunction


class Message(WireRequest):
    """``messages[]``; ``images`` are base64, ``tool_name`` says whose result it is."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: list[str] | None = None
    thinking: str | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


def _format_kind(value: object) -> str:
    return "schema" if isinstance(value, dict) else "name"


class _Run(WireRequest):
    """What chats and completions have in common. They stream unless told not to."""

    model: str
    format: Annotated[
        Annotated[Literal["", "json"], Tag("name")] | Annotated[dict[str, Any], Tag("schema")],
        Discriminator(_format_kind),
    ] = ""
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    stream: bool | None = None
    keep_alive: _Seconds = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class ChatRequest(_Run):
    """The body of ``POST /api/chat``."""

    messages: list[Message] = Field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


class OfficialChat(ChatCompletionRequest):
    """A chat of Ollama's in the words of chat completions, with as many stop texts as there are."""

    stop: ManyStopTexts | None = None


class GenerateRequest(_Run):
    """The body of ``POST /api/generate``; ``raw`` prompts get no template."""

    prompt: str = ""
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


class ShowRequest(WireRequest):
    """The body of ``POST /api/show``; ``name`` is how ``model`` was called."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
