"""Embeddings, tokens and prompts: what is asked of a server without an answer of the model."""

from __future__ import annotations

import asyncio
import base64
import math
from array import array
from dataclasses import replace
from typing import Any, TypeVar

from inference_site.domain.deltas import (
    EmbeddingDelta,
    Finish,
    PromptDelta,
    TextDelta,
    TokensDelta,
    Usage,
)
from inference_site.domain.errors import GenerationFailed, InvalidRequest
from inference_site.domain.request import GenerationRequest
from worker.engines.base import Sink
from worker.engines.openai_upstream.addresses import Address
from worker.engines.openai_upstream.client import Upstream
from worker.engines.openai_upstream.payload import Payloads
from worker.engines.openai_upstream.server import Server

T = TypeVar("T")

_VLLM_TEMPLATE_FIELDS = {
    *("messages", "tools", "chat_template_kwargs", "add_generation_prompt"),
    "continue_final_message",
}
_BATCH = 32
"""Prompts embedded by one request: as many as every server takes."""
_NEARLY_ONE = 1e-3
_UNREADABLE = (AttributeError, LookupError, TypeError, ValueError)


class TokenService:
    """What one model's server offers beside answers."""

    def __init__(self, upstream: Upstream, server: Server, payloads: Payloads) -> None:
        self._upstream, self._server, self._payloads = upstream, server, payloads
        self._is_llama_cpp = server.flavor.tokens == "llama_cpp"

    async def embed(self, request: GenerationRequest, sink: Sink) -> None:
        """Embed the prompts (see ``Engine.embed``)."""
        tokens = 0
        form = "float" if self._server.flavor.float_embeddings else "base64"
        for first in range(0, len(request.prompts), _BATCH):
            inputs = [
                list(p) if isinstance(p, tuple) else p for p in request.prompts[first:][:_BATCH]
            ]
            asked = {"input": inputs, "encoding_format": form}
            answer = await self._upstream.post(_embeddings, asked, request, sink)
            try:
                # Long vectors take milliseconds, in which the loop can read other answers.
                found = await asyncio.to_thread(_vectors, answer)
                vectors = [found[position] for position in range(len(inputs))]
                tokens += int((answer.get("usage") or {}).get("prompt_tokens") or 0)
            except _UNREADABLE as exc:
                raise GenerationFailed("The model's server sent no embeddings.") from exc
            for index, vector in enumerate(vectors, first):
                sink.feed(EmbeddingDelta(vector, index))
                sink.feed(Finish("stop", index))
            sink.feed(Usage(input_tokens=tokens))

    async def tokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn texts into tokens (see ``Engine.tokenize``)."""
        for index, text in enumerate(request.prompts):
            told = await self._told(str(text), request, sink)
            sink.feed(replace(told, index=index))
            sink.feed(Finish("stop", index))

    async def detokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn tokens into texts (see ``Engine.detokenize``)."""
        for index, tokens in enumerate(request.prompts):
            sink.feed(TextDelta(await self._text(tokens, request, sink), index))
            sink.feed(Finish("stop", index))

    async def render(self, request: GenerationRequest, sink: Sink) -> None:
        """Apply the chat template (see ``Engine.render``)."""
        if any(message.parts for message in request.messages):
            raise InvalidRequest("A prompt with images or sounds cannot be rendered.", "messages")
        chat = self._payloads.chat(request)
        if self._is_llama_cpp:
            text = await self._ask("/apply-template", chat, "prompt", str, request, sink)
            tokens = (await self._told(text, request, sink)).ids
        else:
            asked = {key: value for key, value in chat.items() if key in _VLLM_TEMPLATE_FIELDS}
            tokens = tuple(await self._ask("/tokenize", asked, "tokens", list, request, sink))
            text = await self._text(tokens, request, sink)
        sink.feed(PromptDelta(text, tokens))
        sink.feed(Finish("stop"))

    async def _told(self, text: str, request: GenerationRequest, sink: Sink) -> TokensDelta:
        special, wanted = request.add_special_tokens, request.token_texts
        if self._is_llama_cpp:
            asked: dict[str, Any] = {"content": text, "add_special": special, "parse_special": True}
            asked |= {"with_pieces": wanted}
            found = await self._ask("/tokenize", asked, "tokens", list, request, sink)
            ids = (entry["id"] for entry in found) if wanted else found
            return TokensDelta(tuple(ids), texts=tuple(map(_piece, found)) if wanted else ())
        asked = {"prompt": text}
        asked |= {} if special else {"add_special_tokens": False}
        asked |= {"return_token_strs": True} if wanted else {}
        answer = await self._post("/tokenize", asked, request, sink)
        return TokensDelta(
            tuple(_checked(answer, "tokens", list)), texts=tuple(answer.get("token_strs") or ())
        )

    async def _text(self, tokens: Any, request: GenerationRequest, sink: Sink) -> str:
        key = "content" if self._is_llama_cpp else "prompt"
        return await self._ask("/detokenize", {"tokens": tokens}, key, str, request, sink)

    async def _ask(
        self,
        path: str,
        payload: dict[str, Any],
        key: str,
        kind: type[T],
        request: GenerationRequest,
        sink: Sink,
    ) -> T:
        return _checked(await self._post(path, payload, request, sink), key, kind)

    async def _post(
        self, path: str, payload: dict[str, Any], request: GenerationRequest, sink: Sink
    ) -> dict[str, Any]:
        answer: dict[str, Any] = await self._upstream.post(
            lambda address: f"{address.root_url}{path}", payload, request, sink
        )
        return answer


def _checked(answer: dict[str, Any], key: str, kind: type[T]) -> T:
    found = answer.get(key)
    if not isinstance(found, kind):
        raise GenerationFailed(f"The model's server sent no '{key}'.")
    return found


def _piece(entry: dict[str, Any]) -> str:
    """Return a token's text; one that is a part of a character comes as numbers."""
    piece = entry["piece"]
    return piece if isinstance(piece, str) else bytes(piece).decode("utf-8", "replace")


def _embeddings(address: Address) -> str:
    return f"{address.base_url}/embeddings"


def _vectors(answer: dict[str, Any]) -> dict[int, bytes]:
    return {int(entry["index"]): _vector(entry) for entry in answer["data"]}


def _vector(entry: dict[str, Any]) -> bytes:
    """Return an embedding as little-endian floats of length 1. Raise ValueError for none."""
    embedding = entry["embedding"]
    packed = base64.b64decode(embedding, validate=True) if isinstance(embedding, str) else None
    vector = array("f", embedding if packed is None else packed)
    if not vector:
        raise ValueError("an empty vector")
    length = math.hypot(*vector)
    if length and abs(length - 1) > _NEARLY_ONE:
        vector = array("f", (value / length for value in vector))
    return vector.tobytes()
