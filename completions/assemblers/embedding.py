"""Deltas → the list of embeddings."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from completions.wire.embedding import Embedding, EmbeddingList, EmbeddingUsage
from inference_site.domain.deltas import Delta, EmbeddingDelta, Usage
from inference_site.domain.errors import InvalidRequest
from inference_site.generations.kinds import WholeAnswerAssembler
from inference_site.streams.request_documents import Assembly

EMBEDDING = "embedding"
"""Name of this kind of generation."""


@dataclass(frozen=True)
class EmbeddingAssembly(Assembly):
    """How embeddings are encoded; ``dimensions`` shortens them and makes their length 1 again.

    Without ``may_shorten`` they can only be as many as the model has.
    """

    model: str
    encoding: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    may_shorten: bool = True


class EmbeddingAssembler(WholeAnswerAssembler):
    """Assembles the embeddings of one request (see ``generations.kinds.Assembler``)."""

    def __init__(self, assembly: EmbeddingAssembly) -> None:
        self._assembly = assembly
        self._vectors: dict[int, array[float]] = {}
        self._usage = Usage()

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta. Raise InvalidRequest for dimensions that there are not."""
        match delta:
            case EmbeddingDelta(vector, index):
                self._vectors[index] = self._shortened(array("f", vector))
            case Usage():
                self._usage = delta
        return ()

    def _shortened(self, vector: array[float]) -> array[float]:
        wanted = self._assembly.dimensions
        if wanted is None or wanted == len(vector):
            return vector
        if wanted > len(vector) or not self._assembly.may_shorten:
            raise InvalidRequest(
                f"Invalid 'dimensions': the model has {len(vector)}.", "dimensions"
            )
        kept = vector[:wanted]
        length = math.hypot(*kept) or 1.0
        return array("f", (value / length for value in kept))

    def answer(self) -> dict[str, Any]:
        """Return the list."""
        tokens = self._usage.input_tokens
        return EmbeddingList(
            data=[
                Embedding(index=index, embedding=self._encoded(vector))
                for index, vector in sorted(self._vectors.items())
            ],
            model=self._assembly.model,
            usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
        ).model_dump()

    def _encoded(self, vector: array[float]) -> list[float] | str:
        if self._assembly.encoding == "base64":
            return base64.b64encode(vector.tobytes()).decode()
        return vector.tolist()
