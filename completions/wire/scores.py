"""Scores of texts on the wire: reranking, scores of pairs, and moderations.

Sources: Cohere's "Rerank" and Jina's "Reranker API", whose fields overlap; vLLM's "Score API";
OpenAI's API reference, "Moderations".
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator

from inference_site.gateway.api.payload import WireObject, WireRequest
from inference_site.gateway.request_fields.wire import EndUser, ImagePart, TextPart

Texts = Annotated[list[str], Field(min_length=1, max_length=2048)]


class GivenDocument(WireRequest):
    """A document as an object. Cohere's and Jina's clients send further fields of their own."""

    text: str


class TextDocument(WireObject):
    """A document in an answer."""

    text: str


class RerankRequest(WireRequest):
    """The body of ``POST /v1/rerank`` and ``POST /v2/rerank``."""

    model: str
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | GivenDocument], Field(min_length=1, max_length=2048)]
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

    @field_validator("text_2")
    @classmethod
    def _pairs(cls, given: str | list[str], info: ValidationInfo) -> str | list[str]:
        first, count = info.data.get("text_1"), len(given) if isinstance(given, list) else 1
        if isinstance(first, list) and len(first) not in (1, count):
            raise ValueError("'text_1' must be one text, or as many as 'text_2'")
        return given

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


_Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
_Parts = Annotated[list[_Part], Field(min_length=1, max_length=64)]


def _input_kind(value: object) -> str:
    if not isinstance(value, list):
        return "text"
    return "parts" if value and isinstance(value[0], dict) else "texts"


_Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[Texts, Tag("texts")] | Annotated[_Parts, Tag("parts")],
    Discriminator(_input_kind),
]


class ModerationRequest(WireRequest):
    """The body of ``POST /v1/moderations``. The parts of a list are judged together.

    ``model`` has the default of OpenAI's API: a site has it if the operator gives that name, or
    that alias, to a model.
    """

    input: _Input
    model: str = "omni-moderation-latest"
    user: EndUser | None = None


class ModerationResult(WireObject):
    """``results[]``: one text, or all parts. Categories are those of the model."""

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[Literal["text", "image"]]]


class ModerationList(WireObject):
    """The answer, in the order of the inputs."""

    id: str
    model: str
    results: list[ModerationResult]
