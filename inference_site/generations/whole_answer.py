"""Answers that come in one piece: what the assemblers that never stream have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import orjson

from completions.assembler import failure
from inference_site.generations.kinds import Assembler, Ending


class WholeAnswerAssembler(Assembler):
    """Assembles one answer (see ``inference_site.generations.kinds.Assembler``)."""

    @classmethod
    def from_assembly(cls, assembly: dict[str, Any]) -> Self:
        """Make it from the ``assembly`` of a request document, which has the arguments' names."""
        return cls(**assembly)

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """Return the answer, once all deltas have come."""

    def complete(self) -> Ending:
        """End with the answer."""
        return Ending([], 200, orjson.dumps(self.answer()), finish_reason="stop")

    def cancel(self) -> Ending:
        """End because it was stopped."""
        return Ending([], 200, b"")

    def fail(self, error: Exception) -> Ending:
        """End with the error."""
        return failure(error)
