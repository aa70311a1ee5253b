"""Embeddings, tokens and prompts on the wire.

Source: API reference, "Embeddings"; tokens and prompts are an extension in vLLM's format.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from completions.wire.completion import Prompt, TokenIds
from inference_site.gateway.api.payload import WireObject, WireRequest
from inference_site.gateway.request_fields.wire import EndUser


class EmbeddingRequest(WireRequest):
    """The body of ``POST /v1/embeddings``."""

    input: Prompt
    model: str
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: EndUser | None = None


class Embedding(WireObject):
    """``data[]``: a vector of length 1, as numbers or as base64 of little-endian 32-bit floats."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(WireObject):
    """``usage``: tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(WireObject):
    """The answer."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class TokenizeRequest(WireRequest):
    """The body of ``POST /v1/tokenize`` for a text; for a chat it is a chat completion's.

    Without ``model`` it is for the site's default model.
    """

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Tokens(WireObject):
    """The answer: the ids of the tokens, those that start every prompt included.

    ``token_strs`` are their texts, if they were asked for; ``max_model_len`` counts tokens.
    """

    object: Literal["tokens"] = "tokens"
    model: str
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(WireRequest):
    """The body of ``POST /v1/detokenize``; without ``model`` for the site's default model."""

    model: str | None = None
    tokens: TokenIds


class TokenizerQuery(WireRequest):
    """The query of ``GET /tokenizer_info``; without ``model`` for the site's default model."""

    model: str | SkipJsonSchema[None] = None


class TokenizerInfo(WireObject):
    """The answer: fields of ``tokenizer_config.json``, the file of Hugging Face's tokenizers."""

    tokenizer_class: str
    model_max_length: int
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    chat_template: str | None = None


class Text(WireObject):
    """The answer: the text of the tokens."""

    object: Literal["text"] = "text"
    model: str
    prompt: str


class ChatPrompt(WireObject):
    """The answer of ``POST /v1/chat/render``: the prompt of the model."""

    object: Literal["chat.prompt"] = "chat.prompt"
    model: str
    prompt: str
    count: int
    max_model_len: int
    tokens: list[int]
