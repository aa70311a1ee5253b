"""Embeddings for the site itself: generations of the queue, for the key that pays for them."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Sequence

import orjson

from inference_site.core.domain.request import GenerationRequest
from inference_site.runs.inner_runs import NoBudget, NotPossible, run_and_wait
from inference_site.runs.queue import new_id
from inference_site.runs.streams.request_documents import Assembly, Document
from inference_site.vector_stores.kinds import EMBEDDING

__all__ = ["EmbeddingRefused", "NoBudget", "NotPossible", "TextTooLong", "embed"]

_TOO_LONG = "context_length_exceeded"


class TextTooLong(Exception):
    """A text has more tokens than the model takes."""


class EmbeddingRefused(Exception):
    """The model has failed to embed the texts."""


def embed(
    api_key_id: int,
    model: str,
    texts: Sequence[str],
    *,
    timeout_s: float,
    is_cancelled: Callable[[], bool],
    in_background: bool = False,
    request_id: str = "",
) -> list[array[float]]:
    """Return the vectors of texts, in their order, computed by a worker that serves the model.

    Raise TextTooLong, EmbeddingRefused, and what ``run_and_wait`` raises.
    """
    request = GenerationRequest(model, operation="embed", prompts=tuple(texts))
    ending = run_and_wait(
        new_id("embd-"),
        EMBEDDING,
        Document(request, Assembly()),
        api_key_id,
        size_bytes=sum(len(text.encode()) for text in texts),
        timeout_s=timeout_s,
        is_cancelled=is_cancelled,
        in_background=in_background,
        request_id=request_id,
    )
    if ending.error_code == _TOO_LONG:
        raise TextTooLong
    if ending.error_code or not ending.body:
        raise EmbeddingRefused(f"The model `{model}` could not embed: {ending.error_code}.")
    vectors = orjson.loads(ending.body)["vectors"]
    return [array("f", base64.b64decode(vector)) for vector in vectors]
