"""From scores to a ranking, a list of scores or a moderation, none of which is streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from completions.wire.scores import (
    ModerationList,
    ModerationResult,
    RankedDocument,
    Ranking,
    RankingUsage,
    Score,
    ScoreList,
    TextDocument,
)
from inference_site.core.domain.deltas import Delta, ModerationDelta, ScoreDelta, Usage
from inference_site.runs.kinds import WholeAnswerAssembler, error_with_names, failure
from inference_site.runs.streams.batches import Ending
from inference_site.runs.streams.request_documents import Assembly

RERANK, SCORE, MODERATION = "rerank", "score", "moderation"
"""Names of these kinds of generations."""


@dataclass(frozen=True)
class RankingAssembly(Assembly):
    """What the answer has beside the scores; ``top_n=None`` returns all documents.

    ``documents`` is empty when the answer must not repeat them. ``subject`` is the field of the
    request that is named if a text with its query is too long.
    """

    id: str
    model: str
    created: int = 0
    top_n: int | None = None
    documents: tuple[str, ...] = ()
    subject: str = "documents"


class _ScoresAssembler(WholeAnswerAssembler):
    """Collects the scores of one request (see ``runs.kinds.Assembler``)."""

    def __init__(self, assembly: RankingAssembly) -> None:
        self._assembly = assembly
        self._scores: dict[int, float] = {}
        self._usage = Usage()

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta."""
        match delta:
            case ScoreDelta(score, index):
                self._scores[index] = score
            case Usage():
                self._usage = delta
        return ()

    def fail(self, error: Exception) -> Ending:
        """End with the error."""
        return failure(error_with_names(error, self._assembly.subject, {}))

    @property
    def _wire_usage(self) -> RankingUsage:
        tokens = self._usage.input_tokens
        return RankingUsage(prompt_tokens=tokens, total_tokens=tokens)


class RerankAssembler(_ScoresAssembler):
    """Assembles a ranking."""

    def answer(self) -> dict[str, Any]:
        """Return the documents, the best ones first; of equal ones the first of the request."""
        assembly = self._assembly
        best = sorted(self._scores, key=lambda index: (-self._scores[index], index))
        texts = assembly.documents
        results = [
            RankedDocument(
                index=index,
                relevance_score=self._scores[index],
                document=TextDocument(text=texts[index]) if texts else None,
            )
            for index in best[: assembly.top_n]
        ]
        answer = Ranking(
            id=assembly.id,
            model=assembly.model,
            results=results,
            usage=self._wire_usage,
        )
        return answer.model_dump(exclude_none=True)


class ScoreAssembler(_ScoresAssembler):
    """Assembles a list of scores."""

    def answer(self) -> dict[str, Any]:
        """Return the scores in the order of the pairs."""
        assembly = self._assembly
        return ScoreList(
            id=assembly.id,
            created=assembly.created,
            model=assembly.model,
            data=[Score(index=i, score=score) for i, score in sorted(self._scores.items())],
            usage=self._wire_usage,
        ).model_dump()


@dataclass(frozen=True)
class ModerationAssembly(Assembly):
    """What the answer has beside the results of a moderation."""

    id: str
    model: str


class ModerationAssembler(WholeAnswerAssembler):
    """Collects the results of one moderation (see ``runs.kinds.Assembler``)."""

    def __init__(self, assembly: ModerationAssembly) -> None:
        self._assembly = assembly
        self._results: dict[int, ModerationResult] = {}

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta."""
        if isinstance(delta, ModerationDelta):
            self._results[delta.index] = ModerationResult.model_validate(
                {
                    "flagged": delta.is_flagged,
                    "categories": delta.categories,
                    "category_scores": delta.scores,
                    "category_applied_input_types": delta.input_types,
                }
            )
        return ()

    def answer(self) -> dict[str, Any]:
        """Return the results in the order of the inputs."""
        results = [result for _, result in sorted(self._results.items())]
        assembly = self._assembly
        return ModerationList(id=assembly.id, model=assembly.model, results=results).model_dump()
