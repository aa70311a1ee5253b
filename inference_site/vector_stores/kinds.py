"""The kinds of generations of this app: embeddings of chunks, and searches."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inference_site.core.domain.deltas import Delta, EmbeddingDelta
from inference_site.runs.kinds import GenerationKind, WholeAnswerAssembler, failure
from inference_site.runs.streams.request_documents import Assembly
from inference_site.vector_stores.models import VectorStore
from inference_site.vector_stores.search import Found, Ranking, search

EMBEDDING = "vector_store.embedding"
SEARCH = "vector_store.search"


class VectorsAssembler(WholeAnswerAssembler):
    """Collects vectors. The answer is read by ``embedding.embed`` and by no client."""

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


@dataclass(frozen=True)
class SearchAssembly(Assembly):
    """A search for ``queries``, whose embeddings are the generation, in one store."""

    store_id: int
    queries: Sequence[str]
    limit: int
    filters: Mapping[str, Any] | None = None
    ranking: Ranking = field(default_factory=Ranking)


class SearchAssembler(VectorsAssembler):
    """Searches once the questions are embedded; each has its results, the best come first."""

    def __init__(self, assembly: SearchAssembly) -> None:
        super().__init__(assembly)
        self._search = assembly

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
