"""Embeddings on the wire. Source: API reference, "Embeddings"."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from completions.wire.completion import Prompt
from inference_site.api.payload import WireObject, WireRequest
from inference_site.request_fields.wire import EndUser


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
