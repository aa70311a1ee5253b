"""From deltas to the answers about embeddings, tokens and prompts, which are never streamed."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from completions.assemblers.chat import drop_none
from completions.wire.tokens import (
    ChatPrompt,
    Embedding,
    EmbeddingList,
    EmbeddingUsage,
    Text,
    Tokens,
)
from inference_site.core.domain.deltas import (
    Delta,
    EmbeddingDelta,
    PromptDelta,
    TextDelta,
    TokensDelta,
    Usage,
)
from inference_site.core.domain.errors import InvalidRequest
from inference_site.runs.kinds import WholeAnswerAssembler
from inference_site.runs.streams.request_documents import Assembly

EMBEDDING = "embedding"
"""Name of this kind of generation."""


@dataclass(frozen=True)
class EmbeddingAssembly(Assembly):
    """How embeddings are encoded; ``dimensions`` shortens and normalizes them.

    Without ``may_shorten``, ``dimensions`` must be those of the model.
    """

    model: str
    encoding: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    may_shorten: bool = True


class EmbeddingAssembler(WholeAnswerAssembler):
    """Assembles the embeddings of one request (see ``runs.kinds.Assembler``)."""

    def __init__(self, assembly: EmbeddingAssembly) -> None:
        self._assembly = assembly
        self._vectors: dict[int, array[float]] = {}
        self._usage = Usage()

    def feed(self, delta: Delta) -> Sequence[bytes]:
        """Take the next delta. Raise InvalidRequest for impossible dimensions."""
        match delta:
            case EmbeddingDelta(vector, index):
                floats, wanted = array("f", vector), self._assembly.dimensions
                if wanted is not None and wanted != len(floats):
                    if wanted > len(floats) or not self._assembly.may_shorten:
                        raise InvalidRequest(
                            f"Invalid 'dimensions': the model has {len(floats)}.", "dimensions"
                        )
                    length = math.hypot(*floats[:wanted]) or 1.0
                    floats = array("f", (value / length for value in floats[:wanted]))
                self._vectors[index] = floats
            case Usage():
                self._usage = delta
        return ()

    def answer(self) -> dict[str, Any]:
        """Return the list."""
        tokens, is_base64 = self._usage.input_tokens, self._assembly.encoding == "base64"
        return EmbeddingList(
            data=[
                Embedding(
                    index=index,
                    embedding=base64.b64encode(vector.tobytes()).decode()
                    if is_base64
                    else vector.tolist(),
                )
                for index, vector in sorted(self._vectors.items())
            ],
            model=self._assembly.model,
            usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
        ).model_dump()


TOKENS = "tokens"
"""Name of this kind of generation."""


@dataclass(frozen=True)
class TokenAssembly(Assembly):
    """The kind of the answer, and the model's name and context length in it."""

    answer: Literal["tokens", "text", "prompt"]
    model: str
    context_length: int = 0


class TokenAssembler(WholeAnswerAssembler):
    """Assembles one answer, which is a single delta (see ``runs.kinds.Assembler``)."""

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
        if self._assembly.answer == "text":
            return Text(model=self._assembly.model, prompt=self._text).model_dump()
        counted: dict[str, Any] = {
            "model": self._assembly.model,
            "count": len(self._tokens),
            "max_model_len": self._assembly.context_length,
            "tokens": list(self._tokens),
        }
        if self._assembly.answer != "tokens":
            return ChatPrompt(prompt=self._text, **counted).model_dump()
        answer = Tokens(**counted, token_strs=list(self._texts) or None).model_dump()
        drop_none(answer, "token_strs")
        return answer
