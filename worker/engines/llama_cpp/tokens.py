"""Embeddings, tokens and prompts: what is asked of a model without sampling from it."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import orjson

from inference_site.domain.deltas import (
    EmbeddingDelta,
    Finish,
    PromptDelta,
    TextDelta,
    TokensDelta,
    Usage,
)
from inference_site.domain.errors import ContextLengthExceeded, InvalidRequest
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from worker.engines.base import Sink
from worker.engines.llama_cpp.chunks import engine_error
from worker.engines.llama_cpp.loopback import Loopback
from worker.engines.llama_cpp.payload import encode_chat, whole_prompt
from worker.engines.prompt_length import LEAST_TOKENS, PIECE, is_short_enough

_BATCH, _BATCH_SIZE = 32, 16_384
"""Prompts embedded between two looks at cancellation, and their characters or tokens, if several:
the watchdog sees no step meanwhile."""
_TOO_LARGE = re.compile(r"input \((\d+) tokens\) is too large")


def embed(
    server: Any, loopback: Loopback, spec: ModelSpec, request: GenerationRequest, sink: Sink
) -> None:
    """Embed the prompts (see ``Engine.embed``)."""
    tokens = first = 0
    while first < len(request.prompts) and not sink.cancelled:
        batch = _next_batch(request.prompts[first : first + _BATCH])
        if not all(fits(loopback, spec, request, text, sink) for text in batch):
            return
        answer = server.handle_embeddings({"input": batch, "encoding_format": "base64"})
        _check(answer, request, spec)
        for entry in answer["data"]:
            index = first + entry["index"]
            sink.feed(EmbeddingDelta(base64.b64decode(entry["embedding"]), index))
            sink.feed(Finish("stop", index))
        tokens += answer["usage"]["prompt_tokens"]
        first += len(batch)
        sink.feed(Usage(input_tokens=tokens))


def _next_batch(prompts: Sequence[str | tuple[int, ...]]) -> list[str | list[int]]:
    """Return the first of these prompts, and those after it that fit into the same batch."""
    sizes = accumulate(map(len, prompts))
    count = max(1, sum(size <= _BATCH_SIZE for size in sizes))
    return [list(p) if isinstance(p, tuple) else p for p in prompts[:count]]


def fits(
    loopback: Loopback,
    spec: ModelSpec,
    request: GenerationRequest,
    prompt: str | Sequence[int],
    sink: Sink,
) -> bool:
    """Return whether llama.cpp can be given the prompt now; False once the sink is cancelled.

    Raise ContextLengthExceeded for a long text with more tokens than the context, or than may be
    tokenized without being read.
    """
    if not isinstance(prompt, str):
        return not sink.cancelled
    most = spec.context_length
    if request.operation in ("tokenize", "render"):
        most = max(most, LEAST_TOKENS)

    def count(text: str) -> int:
        return len(_tokenized(loopback, request, text, add_special=False))

    return is_short_enough(prompt, most, spec.context_length, count, sink, request.subject)


def with_short_prompts(
    loopback: Loopback, spec: ModelSpec, request: GenerationRequest, sink: Sink
) -> GenerationRequest | None:
    """Return a completion whose prompts llama.cpp can be given now; None once it is cancelled.

    llama.cpp tokenizes all prompts of a request in one call, which nothing can stop. Those that are
    long together are tokenized here, one by one. Raise ContextLengthExceeded.
    """
    prompts = [whole_prompt(prompt, request.suffix, spec) for prompt in request.prompts]
    if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) <= PIECE:
        return None if sink.cancelled else request
    tokens = []
    for prompt in prompts:
        if not fits(loopback, spec, request, prompt, sink):
            return None
        found = _tokenized(loopback, request, prompt) if isinstance(prompt, str) else prompt
        if len(found) > spec.context_length:
            raise ContextLengthExceeded(spec.context_length, len(found), request.subject)
        tokens.append(tuple(found))
    return replace(request, prompts=tuple(tokens), suffix=None)


def tokenize(loopback: Loopback, spec: ModelSpec, request: GenerationRequest, sink: Sink) -> None:
    """Turn texts into tokens (see ``Engine.tokenize``)."""
    for index, text in _prompts(request, sink):
        if not fits(loopback, spec, request, text, sink):
            return
        sink.feed(_tokens_delta(loopback, request, str(text), index))
        sink.feed(Finish("stop", index))


def detokenize(loopback: Loopback, request: GenerationRequest, sink: Sink) -> None:
    """Turn tokens into texts (see ``Engine.detokenize``)."""
    for index, tokens in _prompts(request, sink):
        answer = loopback.post("/detokenize", orjson.dumps({"tokens": tokens}))
        sink.feed(TextDelta(detokenized(answer, request), index))
        sink.feed(Finish("stop", index))


def detokenized(answer: dict[str, Any], request: GenerationRequest) -> str:
    """Return the text of llama.cpp's answer. Raise EngineError."""
    if "range" in str(answer.get("error")):
        param = "tokens" if request.operation == "detokenize" else request.subject
        raise InvalidRequest("It holds an id that is no token of this model.", param)
    _check(answer, request)
    return str(answer["content"])


def render(loopback: Loopback, spec: ModelSpec, request: GenerationRequest, sink: Sink) -> None:
    """Apply the chat template (see ``Engine.render``)."""
    if any(message.parts for message in request.messages):
        raise InvalidRequest("A prompt with images or sounds cannot be rendered.", "messages")
    answer = loopback.post("/apply-template", encode_chat(request, spec))
    _check(answer, request)
    text = answer["prompt"]
    if not fits(loopback, spec, request, text, sink):
        return
    sink.feed(PromptDelta(text, tuple(_tokenized(loopback, request, text))))
    sink.feed(Finish("stop"))


def _prompts(request: GenerationRequest, sink: Sink) -> Iterator[tuple[int, Any]]:
    for index, prompt in enumerate(request.prompts):
        if sink.cancelled:
            return
        yield index, prompt


def _tokenized(
    loopback: Loopback,
    request: GenerationRequest,
    text: str,
    *,
    add_special: bool = True,
    with_pieces: bool = False,
) -> list[Any]:
    """Return llama.cpp's tokens of a text: ids, or with pieces an object for each."""
    payload = {"content": text, "add_special": add_special, "parse_special": True}
    answer = loopback.post("/tokenize", orjson.dumps({**payload, "with_pieces": with_pieces}))
    _check(answer, request)
    tokens: list[Any] = answer["tokens"]
    return tokens


def _tokens_delta(
    loopback: Loopback, request: GenerationRequest, text: str, index: int
) -> TokensDelta:
    wanted, special = request.token_texts, request.add_special_tokens
    found = _tokenized(loopback, request, text, add_special=special, with_pieces=wanted)
    if not wanted:
        return TokensDelta(tuple(found), index)
    texts = tuple(piece_of(entry).decode("utf-8", "replace") for entry in found)
    return TokensDelta(tuple(entry["id"] for entry in found), index, texts)


def piece_of(entry: dict[str, Any]) -> bytes:
    """Return a token's text; one that is a part of a character comes as numbers."""
    piece: str | list[int] = entry["piece"]
    return piece.encode() if isinstance(piece, str) else bytes(piece)


def _check(
    answer: dict[str, Any], request: GenerationRequest, spec: ModelSpec | None = None
) -> None:
    """Raise the error that the answer holds, if any."""
    error = answer.get("error")
    if error is None:
        return
    too_large = _TOO_LARGE.match(str(error.get("message")))
    if too_large and spec is not None:
        raise ContextLengthExceeded(spec.context_length, int(too_large[1]), "input")
    raise engine_error(error, request)
