"""Deltas → the list of embeddings."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from typing import Any, Literal

from completions.wire.embedding import Embedding, EmbeddingList, EmbeddingUsage
from inference_site.domain.deltas import Delta, EmbeddingDelta, Usage
from inference_site.domain.errors import InvalidRequest
from inference_site.generations.whole_answer import WholeAnswerAssembler

EMBEDDING = "embedding"
"""Name of this kind of generation."""


class EmbeddingAssembler(WholeAnswerAssembler):
    """Assembles the embeddings of one request (see ``generations.kinds.Assembler``).

    ``dimensions`` shortens the vectors and makes them of length 1 again.
    """

    def __init__(
        self, model: str, encoding: Literal["float", "base64"], dimensions: int | None = None
    ) -> None:
        self._model, self._encoding, self._dimensions = model, encoding, dimensions
        self._vectors: dict[int, array[float]] = {}
        self._usage = Usage()

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta. Raise InvalidRequest for more dimensions than there are."""
        match delta:
            case EmbeddingDelta(vector, index):
                self._vectors[index] = self._shortened(array("f", vector))
            case Usage():
                self._usage = delta
        return ()

    def _shortened(self, vector: array[float]) -> array[float]:
        wanted = self._dimensions
        if wanted is None or wanted == len(vector):
            return vector
        if wanted > len(vector):
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
            model=self._model,
            usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
        ).model_dump()

    def _encoded(self, vector: array[float]) -> list[float] | str:
        if self._encoding == "base64":
            return base64.b64encode(vector.tobytes()).decode()
        return vector.tolist()
