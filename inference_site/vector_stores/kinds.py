"""The kinds of generations of this app: embeddings for the site itself, and searches.

``embed`` has texts embedded: by generations of the queue, for the key that pays for them.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from inference_site.core.domain.deltas import Delta, EmbeddingDelta
from inference_site.core.domain.errors import RateLimited
from inference_site.core.domain.request import GenerationRequest
from inference_site.runs.inner_runs import run_and_wait
from inference_site.runs.kinds import (
    GenerationKind,
    WholeAnswerAssembler,
    error_with_names,
    failure,
)
from inference_site.runs.queue import new_id
from inference_site.runs.streams.batches import Ending
from inference_site.runs.streams.request_documents import Assembly, Document
from inference_site.vector_stores.models import VectorStore
from inference_site.vector_stores.search import Found, Ranking, search

EMBEDDING = "vector_store.embedding"
SEARCH = "vector_store.search"
_TOO_LONG = "context_length_exceeded"
_BUSY_STATUS, _FAULT_STATUS = 429, 503
"""The model's server has a limit; from the other on, the site was at fault, not texts or model."""


class VectorsAssembler(WholeAnswerAssembler):
    """Collects vectors. The answer is read by ``embed`` and by no client."""

    def __init__(self, _: Assembly) -> None:
        self.vectors: dict[int, array[float]] = {}

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Keep the vector of a text."""
        if isinstance(delta, EmbeddingDelta):
            self.vectors[delta.index] = array("f", delta.vector)
        return ()

    def answer(self) -> dict[str, Any]:
        """Return the vectors in the order of the texts: floats of four bytes in base64."""
        packed = (self.vectors[index].tobytes() for index in sorted(self.vectors))
        return {"vectors": [base64.b64encode(vector).decode() for vector in packed]}


class TextTooLong(Exception):
    """A text has more tokens than the model takes."""


class EmbeddingRefused(Exception):
    """The model has failed to embed the texts."""


class EmbeddingLost(EmbeddingRefused):
    """The site could not embed them, because a part of it died or was away. It may later."""


def embed(
    api_key_id: int,
    model: str,
    texts: Sequence[str],
    *,
    timeout_s: float,
    is_cancelled: Callable[[], bool],
    in_background: bool = False,
    request_id: str = "",
    end_user: str = "",
    tags: Sequence[str] = (),
) -> list[array[float]]:
    """Return the vectors of texts, in their order, computed by a worker that serves the model.

    Raise TextTooLong, EmbeddingRefused, EmbeddingLost, RateLimited, and what ``run_and_wait``
    raises.
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
        end_user=end_user,
        tags=tags,
    )
    if ending.error_code == _TOO_LONG:
        raise TextTooLong
    if ending.status == _BUSY_STATUS:
        raise RateLimited
    if ending.status >= _FAULT_STATUS:
        raise EmbeddingLost(f"The texts were not embedded: {ending.error_code}.")
    if ending.error_code or not ending.body:
        raise EmbeddingRefused(f"The model `{model}` could not embed: {ending.error_code}.")
    vectors = orjson.loads(ending.body)["vectors"]
    return [array("f", base64.b64decode(vector)) for vector in vectors]


@dataclass(frozen=True)
class SearchAssembly(Assembly):
    """A search for ``queries``, whose embeddings are the generation, in one store."""

    store_id: int
    queries: Sequence[str]
    limit: int
    filters: Mapping[str, Any] | None = None
    ranking: Ranking = field(default_factory=Ranking)


class SearchAssembler(VectorsAssembler):
    """Searches once the questions are embedded; each has its results, the best come first.

    Errors of the embedding name the request's field, which is ``query`` here.
    """

    def __init__(self, assembly: SearchAssembly) -> None:
        super().__init__(assembly)
        self._search = assembly

    def fail(self, error: Exception) -> Ending:
        """End with the error."""
        return failure(error_with_names(error, "query", {"input": "query"}))

    def answer(self) -> dict[str, Any]:
        """Return the page of results (API reference, "Vector stores", "Search")."""
        wanted = self._search
        stores = list(VectorStore.objects.filter(pk=wanted.store_id, is_deleted=False))
        best: dict[tuple[str, str], Found] = {}
        for index, query in enumerate(wanted.queries):
            for found in search(
                stores,
                query,
                self.vectors[index],
                limit=wanted.limit,
                filters=wanted.filters,
                ranking=wanted.ranking,
            ):
                known = best.setdefault((found.file_id, found.text), found)
                if known.score < found.score:
                    best[found.file_id, found.text] = found
        ranked = sorted(best.values(), key=lambda found: -found.score)[: wanted.limit]
        return {
            "object": "vector_store.search_results.page",
            "search_query": list(wanted.queries),
            "data": [
                {
                    "file_id": found.file_id,
                    "filename": found.filename,
                    "score": found.score,
                    "attributes": found.attributes,
                    "content": [{"type": "text", "text": found.text}],
                }
                for found in ranked
            ],
            "has_more": False,
            "next_page": None,
        }


KINDS = {
    EMBEDDING: GenerationKind(Assembly, VectorsAssembler, failure),
    SEARCH: GenerationKind(SearchAssembly, SearchAssembler, failure),
}
