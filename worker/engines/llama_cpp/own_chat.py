"""Chats for which llama.cpp is only asked to complete a prompt; the rest is the chat adapter's.

llama.cpp's chat endpoint gives no log probabilities in the stream of an answer that may be a call.
"""

from __future__ import annotations

from collections.abc import Callable

from inference_site.catalogue.engines.options import PARSING_OPTIONS, ChatOptions
from inference_site.domain.errors import EngineLoadError, InvalidRequest
from inference_site.domain.messages import TextPart
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from worker.engines.base import Engine, Sink
from worker.engines.chat.adapter import ChatAdapter
from worker.engines.chat.configuration import Vocabulary, configure_chat, options_with

Complete = Callable[[GenerationRequest, Sink, tuple[str, ...]], None]
"""Completes prompts; special tokens with these texts are shown in the output."""
Tokenize = Callable[[GenerationRequest, Sink], None]

_OPTIONS = frozenset(ChatOptions.model_fields)


def needs_own_chat(request: GenerationRequest, spec: ModelSpec) -> bool:
    """Whether llama.cpp's chat endpoint refuses the request, or would read its answer another way.

    It refuses log probabilities beside tools, which stop tokens are recognised by, and does not
    name the tokens of a prompt. Images and sounds are for that endpoint alone.
    """
    offers = bool(request.tools) and not request.must_call
    if offers and (request.top_logprobs is not None or bool(request.stop_token_ids)):
        _refuse_media(request)
        return True
    if request.prompt_template:
        _refuse_media(request, "prompt_template")
        return True
    if request.names_prompt_tokens:
        _refuse_media(request, "return_token_ids" if request.token_ids else "prompt_logprobs")
        return True
    return reads_its_own_way(spec) and not _has_media(request)


def reads_its_own_way(spec: ModelSpec) -> bool:
    """Whether the model's entry says how its answers are read."""
    return not PARSING_OPTIONS.isdisjoint(spec.options)


def own_chat(
    spec: ModelSpec,
    vocabulary: Vocabulary,
    complete: Complete,
    tokenize: Tokenize,
    template: str = "",
) -> ChatAdapter:
    """Return chats that are completions, with the template of this name in place of the model's.

    Raise InvalidRequest if this model can have none.
    """
    options = ChatOptions.read({k: v for k, v in spec.options.items() if k in _OPTIONS})
    try:
        chat = configure_chat(spec, options_with(options, template), vocabulary)
    except EngineLoadError as exc:
        if template:
            raise InvalidRequest(str(exc), "prompt_template") from exc
        raise InvalidRequest(f"Tools cannot be used together with this: {exc}", "tools") from exc
    completions = _Completions(complete, chat.syntax.tags, tokenize)
    return ChatAdapter(completions, chat, frozenset({"grammar"}))


class _Completions(Engine):
    """The completions of the model; it is closed by who owns it."""

    def __init__(self, complete: Complete, tags: tuple[str, ...], tokenize: Tokenize) -> None:
        self._complete, self._tags, self._tokenize = complete, tags, tokenize

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        raise NotImplementedError

    def complete(self, request: GenerationRequest, sink: Sink) -> None:
        self._complete(request, sink, self._tags)

    def tokenize(self, request: GenerationRequest, sink: Sink) -> None:
        self._tokenize(request, sink)

    def close(self) -> None:
        """Nothing of its own is open."""


def _has_media(request: GenerationRequest) -> bool:
    return any(not isinstance(part, TextPart) for m in request.messages for part in m.parts)


def _refuse_media(request: GenerationRequest, field: str = "") -> None:
    if not _has_media(request):
        return
    if field:
        raise InvalidRequest(f"'{field}' cannot be used with images or sounds.", field)
    field = "stop_token_ids" if request.top_logprobs is None else "logprobs"
    raise InvalidRequest(
        f"With images or sounds, '{field}' cannot be used together with 'tools'.", field
    )
