"""Deltas → how many tokens an input has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inference_site.domain.deltas import Delta, PromptDelta
from inference_site.generations.kinds import WholeAnswerAssembler
from inference_site.streams.request_documents import Assembly

INPUT_TOKENS = "response.input_tokens"
"""Name of this kind of generation."""


class CountAssembler(WholeAnswerAssembler):
    """Assembles the answer of ``POST /v1/responses/input_tokens``."""

    def __init__(self, _: Assembly) -> None:
        self._count = 0

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta."""
        if isinstance(delta, PromptDelta):
            self._count = len(delta.tokens)
        return ()

    def answer(self) -> dict[str, Any]:
        """Return the count."""
        return {"object": INPUT_TOKENS, "input_tokens": self._count}
