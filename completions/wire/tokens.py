"""Tokens and prompts on the wire: an extension, in the shapes that vLLM gave it."""

from __future__ import annotations

from typing import Literal

from completions.wire.completion import TokenIds
from inference_site.api.payload import WireObject, WireRequest


class TokenizeRequest(WireRequest):
    """The body of ``POST /v1/tokenize`` for a text; for a chat it is a chat completion's."""

    model: str
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Tokens(WireObject):
    """The answer: the ids, with those every prompt begins with. ``max_model_len`` is tokens.

    ``token_strs`` are their texts, if they were asked for.
    """

    object: Literal["tokens"] = "tokens"
    model: str
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(WireRequest):
    """The body of ``POST /v1/detokenize``."""

    model: str
    tokens: TokenIds


class Text(WireObject):
    """The answer: what the tokens stand for."""

    object: Literal["text"] = "text"
    model: str
    prompt: str


class ChatPrompt(WireObject):
    """The answer of ``POST /v1/chat/render``: what the model would read."""

    object: Literal["chat.prompt"] = "chat.prompt"
    model: str
    prompt: str
    count: int
    max_model_len: int
    tokens: list[int]
