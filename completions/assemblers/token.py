"""Deltas → the answers about tokens and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from completions.assemblers.chat import drop_none
from completions.wire.tokens import ChatPrompt, Text, Tokens
from inference_site.api.payload import WireObject
from inference_site.domain.deltas import Delta, PromptDelta, TextDelta, TokensDelta
from inference_site.generations.kinds import WholeAnswerAssembler
from inference_site.streams.request_documents import Assembly

TOKENS = "tokens"
"""Name of this kind of generation."""


@dataclass(frozen=True)
class TokenAssembly(Assembly):
    """Which answer is given, and what it says of the model."""

    answer: Literal["tokens", "text", "prompt"]
    model: str
    context_length: int = 0


class TokenAssembler(WholeAnswerAssembler):
    """Assembles one answer, which is a single delta (see ``generations.kinds.Assembler``)."""

    def __init__(self, assembly: TokenAssembly) -> None:
        self._assembly = assembly
        self._text = ""
        self._tokens: tuple[int, ...] = ()
        self._texts: tuple[str, ...] = ()

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta."""
        match delta:
            case TokensDelta(ids, texts=texts):
                self._tokens, self._texts = ids, texts
            case TextDelta(text):
                self._text = text
            case PromptDelta(text, tokens):
                self._text, self._tokens = text, tokens
        return ()

    def answer(self) -> dict[str, Any]:
        """Return the answer."""
        answer = self._wire().model_dump()
        if self._assembly.answer == "tokens":
            drop_none(answer, "token_strs")
        return answer

    def _wire(self) -> WireObject:
        if self._assembly.answer == "text":
            return Text(model=self._assembly.model, prompt=self._text)
        counted: dict[str, Any] = {
            "model": self._assembly.model,
            "count": len(self._tokens),
            "max_model_len": self._assembly.context_length,
            "tokens": list(self._tokens),
        }
        if self._assembly.answer == "tokens":
            return Tokens(**counted, token_strs=list(self._texts) or None)
        return ChatPrompt(prompt=self._text, **counted)
