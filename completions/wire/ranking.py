"""Reranking and scores on the wire: how well documents answer a query.

Sources: Cohere's "Rerank" and Jina's "Reranker API", whose fields overlap; vLLM's "Score API".
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from inference_site.gateway.api.payload import WireObject, WireRequest
from inference_site.gateway.request_fields.wire import EndUser

Texts = Annotated[list[str], Field(min_length=1, max_length=2048)]


class TextDocument(WireObject):
    """A document as an object, and in an answer."""

    text: str


class RerankRequest(WireRequest):
    """The body of ``POST /v1/rerank`` and ``POST /v2/rerank``."""

    model: str
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | TextDocument], Field(min_length=1, max_length=2048)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    user: EndUser | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The documents."""
        return tuple(d if isinstance(d, str) else d.text for d in self.documents)


class RankedDocument(WireObject):
    """``results[]``: a document by its index in the request, the best one first."""

    index: int
    relevance_score: float
    document: TextDocument | None = None


class RankingUsage(WireObject):
    """``usage``: tokens of all pairs."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: Literal[0] = 0


class Ranking(WireObject):
    """The answer."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RankedDocument]
    usage: RankingUsage


class ScoreRequest(WireRequest):
    """The body of ``POST /v1/score``: one text with each of others, or two lists pair by pair."""

    model: str
    text_1: str | Texts
    text_2: str | Texts
    user: EndUser | None = None

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if isinstance(self.text_1, list) and len(self.text_1) not in (1, len(self.seconds)):
            raise ValueError("'text_1' must be one text, or as many as 'text_2'")
        return self

    @property
    def firsts(self) -> tuple[str, ...]:
        """The first text of all pairs, or of each."""
        return (self.text_1,) if isinstance(self.text_1, str) else tuple(self.text_1)

    @property
    def seconds(self) -> tuple[str, ...]:
        """The second text of each pair."""
        return (self.text_2,) if isinstance(self.text_2, str) else tuple(self.text_2)


class Score(WireObject):
    """``data[]``: the score of a pair."""

    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreList(WireObject):
    """The answer, in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: RankingUsage
