"""From moderations of inputs to the answer, which is never streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from completions.wire.moderation import ModerationList, ModerationResult
from inference_site.core.domain.deltas import Delta, ModerationDelta
from inference_site.runs.kinds import WholeAnswerAssembler
from inference_site.runs.streams.request_documents import Assembly

MODERATION = "moderation"
"""The name of this kind of generations."""


@dataclass(frozen=True)
class ModerationAssembly(Assembly):
    """What the answer has beside its results."""

    id: str
    model: str


class ModerationAssembler(WholeAnswerAssembler):
    """Collects the results of one request (see ``runs.kinds.Assembler``)."""

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
