"""Chat templates of llama.cpp's models: the check of their cost, and chats that are rendered here.

llama.cpp renders chat templates without limits of time and memory, so ``TemplateTrial`` renders
each conversation in a limited process first. For what llama.cpp's chat endpoint cannot do, such as
log probabilities beside tools, or a grammar for the text after thoughts, the chat adapter renders
the prompt and llama.cpp completes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inference_site.catalogue.engines.llama_cpp import LlamaCppOptions
from inference_site.catalogue.engines.options import PARSING_OPTIONS, ChatOptions
from inference_site.catalogue.gguf_files import CHAT_TEMPLATE, metadata
from inference_site.core.domain.errors import EngineLoadError, InvalidRequest
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest, TextPart
from inference_site.core.limited_process import LOAD_PATIENCE_S, PATIENCE_S
from worker.engines.base import Engine, Sink
from worker.engines.chat.adapter import ChatAdapter
from worker.engines.chat.configuration import (
    Vocabulary,
    configure_chat,
    named_template,
    options_with,
)
from worker.engines.chat.template import TOO_COMPLEX, rendered, wire_message, wire_tool

Complete = Callable[[GenerationRequest, Sink, tuple[str, ...]], None]
"""Completes prompts. The special tokens with these texts are part of the output."""
Tokenize = Callable[[GenerationRequest, Sink], None]

_OPTIONS = frozenset(ChatOptions.model_fields)
_TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "word " * 40}]
_TOOL = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
_CONVERSATIONS: tuple[dict[str, Any], ...] = (
    {"messages": _TURNS[:1]},
    {"messages": _TURNS[:1], "tools": [{"type": "function", "function": _TOOL}]},
    {"messages": _TURNS * 250},
)
"""Conversations that the template of every model must be able to render."""


def needs_own_chat(request: GenerationRequest, spec: ModelSpec) -> bool:
    """Whether llama.cpp's chat endpoint refuses the request, or would parse its answer differently.

    It refuses log probabilities beside tools (stop tokens need them), and does not return the
    tokens of a prompt. Only that endpoint takes images and sounds. Raise InvalidRequest for a
    request that needs both.
    """
    offers = bool(request.tools) and not request.must_call
    has_media = any(
        not isinstance(part, TextPart) for message in request.messages for part in message.parts
    )
    if offers and (request.top_logprobs is not None or request.stop_token_ids):
        if has_media:
            field = "stop_token_ids" if request.top_logprobs is None else "logprobs"
            raise InvalidRequest(
                f"With images or sounds, '{field}' cannot be used together with 'tools'.", field
            )
        return True
    if request.prompt_template or request.names_prompt_tokens:
        if has_media:
            token_field = "return_token_ids" if request.token_ids else "prompt_logprobs"
            field = "prompt_template" if request.prompt_template else token_field
            raise InvalidRequest(f"'{field}' cannot be used with images or sounds.", field)
        return True
    return not PARSING_OPTIONS.isdisjoint(spec.options) and not has_media


def own_chat(
    spec: ModelSpec,
    vocabulary: Vocabulary,
    complete: Complete,
    tokenize: Tokenize,
    template: str = "",
) -> ChatAdapter:
    """Return an adapter that renders chats and completes them.

    ``template`` names a template to use in place of the model's own.
    Raise InvalidRequest for an unknown name, and for a model without a template.
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
    """The engine below the chat adapter; ``LlamaCppEngine`` closes the connections."""

    def __init__(self, complete: Complete, tags: tuple[str, ...], tokenize: Tokenize) -> None:
        self._complete, self._tags, self._tokenize = complete, tags, tokenize

    def complete(self, request: GenerationRequest, sink: Sink) -> None:
        self._complete(request, sink, self._tags)

    def tokenize(self, request: GenerationRequest, sink: Sink) -> None:
        self._tokenize(request, sink)

    def close(self) -> None:
        """Do nothing."""


class TemplateTrial:
    """Renders the templates of one model within limits of time and memory.

    Only exceeding the limits counts: llama.cpp may handle what a template refuses.
    Raise EngineLoadError for a template that exceeds them for an ordinary conversation.
    """

    def __init__(self, spec: ModelSpec, options: LlamaCppOptions) -> None:
        self._variables = dict(spec.options.get("chat_template_kwargs", {}))
        named = named_template(spec, options)
        self._sources = [named] if named else _file_templates(spec)
        for source in self._sources:
            for conversation in _CONVERSATIONS:
                error, _ = self._rendered(source, conversation, LOAD_PATIENCE_S)
                if error == TOO_COMPLEX:
                    raise EngineLoadError(f"Model '{spec.id}': its chat template: {TOO_COMPLEX}.")

    def check(self, request: GenerationRequest) -> str:
        """Return the shortest prompt that the model's templates make of the request's messages.

        llama.cpp chooses among the templates, and handles messages that they refuse; for these the
        prompt is the text of the messages. Raise InvalidRequest if a template exceeds the limits.
        """
        messages = [
            wire_message(
                message,
                "".join(part.text for part in message.parts if isinstance(part, TextPart))
                or message.text,
                str,
            )
            for message in request.messages
        ]
        tools = [wire_tool(tool) for tool in request.tools] or None
        variables = {**request.template_vars, "messages": messages, "tools": tools}
        prompts = []
        for source in self._sources:
            error, prompt = self._rendered(source, variables)
            if error == TOO_COMPLEX:
                raise InvalidRequest(f"TemplateError: {TOO_COMPLEX}", "messages")
            prompts += [] if error else [prompt]
        plain = (str(message.get("content") or "") for message in messages)
        return min(prompts, key=len) if prompts else "".join(plain)

    def _rendered(
        self, source: str, variables: dict[str, Any], patience_s: float = PATIENCE_S
    ) -> tuple[str, str]:
        variables = {"add_generation_prompt": True, **self._variables, **variables}
        return rendered(source, variables, patience_s)


def _file_templates(spec: ModelSpec) -> list[str]:
    """Return the templates in the model's file; an empty list for a damaged file."""
    assert spec.file is not None
    try:
        # A second template, for tools, has a key with the same beginning.
        values = [value for key, value in metadata(spec.file) if key.startswith(CHAT_TEMPLATE)]
    except (OSError, ValueError):
        return []
    return [value for value in values if isinstance(value, str)]
