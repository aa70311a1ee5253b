"""Deltas → how many tokens an input has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from completions.assembler import failure
from worker.assembly import Assembler, Ending
from worker.generation import Delta, PromptDelta

INPUT_TOKENS = "response.input_tokens"
"""Name of this kind of generation."""


class CountAssembler(Assembler):
    """Assembles the answer of ``POST /v1/responses/input_tokens``."""

    def __init__(self) -> None:
        self._count = 0

    @classmethod
    def from_assembly(cls, assembly: dict[str, Any]) -> CountAssembler:
        """Make it; there is nothing to know."""
        return cls()

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta."""
        if isinstance(delta, PromptDelta):
            self._count = len(delta.tokens)
        return ()

    def complete(self) -> Ending:
        """End with the count."""
        answer = {"object": INPUT_TOKENS, "input_tokens": self._count}
        return Ending([], 200, orjson.dumps(answer), finish_reason="stop")

    def cancel(self) -> Ending:
        """End because it was stopped."""
        return Ending([], 200, b"")

    def fail(self, error: Exception) -> Ending:
        """End with the error."""
        return failure(error)
