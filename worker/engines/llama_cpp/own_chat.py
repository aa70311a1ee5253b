"""Chats for which llama.cpp is only asked to complete a prompt; the rest is the chat adapter's.

llama.cpp's chat endpoint gives no log probabilities in the stream of an answer that may be a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inference_site.catalogue.engines.chat import ChatOptions
from inference_site.domain.errors import EngineLoadError, InvalidRequest
from inference_site.domain.messages import TextPart
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from worker.engines.base import Engine, Sink
from worker.engines.chat.adapter import ChatAdapter
from worker.engines.chat.configuration import Vocabulary, configure_chat
from worker.engines.llama_cpp.loopback import Loopback

Complete = Callable[[GenerationRequest, Sink, tuple[str, ...]], None]
"""Completes prompts; special tokens with these texts are shown in the output."""

_OPTIONS = frozenset(ChatOptions.model_fields)


def needs_own_chat(request: GenerationRequest) -> bool:
    """Whether llama.cpp's chat endpoint refuses the request, as far as it is told of the tools."""
    offers = bool(request.tools) and not request.must_call
    return offers and (request.top_logprobs is not None or bool(request.stop_token_ids))


def own_chat(spec: ModelSpec, loopback: Loopback, complete: Complete) -> ChatAdapter:
    """Return chats that are completions. Raise InvalidRequest if this model can have none."""
    props = loopback.get("/props")
    vocabulary = Vocabulary(
        chat_template=props.get("chat_template_tool_use") or props.get("chat_template"),
        bos=str(props.get("bos_token", "")),
        eos=str(props.get("eos_token", "")),
        adds_bos=_adds_bos(loopback),
    )
    options = ChatOptions.read({k: v for k, v in spec.options.items() if k in _OPTIONS})
    try:
        chat = configure_chat(spec, options, vocabulary)
    except EngineLoadError as exc:
        raise InvalidRequest(f"Tools cannot be used together with this: {exc}", "tools") from exc
    return ChatAdapter(_Completions(complete, chat.syntax.tags), chat, frozenset({"grammar"}))


def _adds_bos(loopback: Loopback) -> bool:
    answer: dict[str, Any] = loopback.post("/tokenize", b'{"content": "", "add_special": true}')
    return bool(answer.get("tokens"))


class _Completions(Engine):
    """The completions of the model; it is closed by who owns it."""

    def __init__(self, complete: Complete, tags: tuple[str, ...]) -> None:
        self._complete, self._tags = complete, tags

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        raise NotImplementedError

    def complete(self, request: GenerationRequest, sink: Sink) -> None:
        self._complete(request, sink, self._tags)

    def close(self) -> None:
        """Nothing of its own is open."""


def refuse_media(request: GenerationRequest) -> None:
    """Raise InvalidRequest for an image or a sound, which a completion cannot have."""
    if any(not isinstance(part, TextPart) for m in request.messages for part in m.parts):
        field = "stop_token_ids" if request.top_logprobs is None else "logprobs"
        raise InvalidRequest(
            f"With images or sounds, '{field}' cannot be used together with 'tools'.", field
        )
