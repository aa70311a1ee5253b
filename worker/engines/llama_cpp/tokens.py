"""Embedding, ranking, tokenizing and rendering: requests to llama.cpp that sample no tokens."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from inference_site.core.domain.deltas import (
    EmbeddingDelta,
    Finish,
    PromptDelta,
    ScoreDelta,
    TextDelta,
    TokensDelta,
    Usage,
)
from inference_site.core.domain.errors import ContextLengthExceeded, EngineError, InvalidRequest
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest
from worker.engines.base import Sink
from worker.engines.prompt_length import PIECE, TOKENIZE_LIMIT, is_short_enough

Ask = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Posts a payload to a path of the model's server, and returns the answer. Raise EngineError."""

_BATCH, _BATCH_SIZE = 32, 16_384
"""Prompts in one embedding request, and their total size in characters or token ids.

Cancellation is checked between two requests."""
_TOO_LARGE = re.compile(r"input \((\d+) tokens\) is too large")


def embed(ask: Ask, spec: ModelSpec, request: GenerationRequest, sink: Sink) -> None:
    """Embed the prompts (see ``Engine.embed``)."""
    tokens = first = 0
    while first < len(request.prompts) and not sink.cancelled:
        candidates = request.prompts[first : first + _BATCH]
        sizes = accumulate(map(len, candidates))
        count = max(1, sum(size <= _BATCH_SIZE for size in sizes))
        batch = [list(p) if isinstance(p, tuple) else p for p in candidates[:count]]
        if not all(fits(ask, spec, request, text, sink) for text in batch):
            return
        body = {"input": batch, "encoding_format": "base64"}
        answer = _in_one_batch(ask, "/v1/embeddings", body, spec, request)
        for entry in answer["data"]:
            index = first + entry["index"]
            sink.feed(EmbeddingDelta(base64.b64decode(entry["embedding"]), index))
            sink.feed(Finish("stop", index))
        tokens += answer["usage"]["prompt_tokens"]
        first += len(batch)
        sink.feed(Usage(input_tokens=tokens))


def rank(ask: Ask, spec: ModelSpec, request: GenerationRequest, sink: Sink) -> None:
    """Compare the prompts with their queries (see ``Engine.rank``)."""
    tokens = 0
    for query, first, documents in request.comparisons(_BATCH):
        if not all(fits(ask, spec, request, text, sink) for text in (query, *documents)):
            return
        body = {"query": query, "documents": documents}
        answer = _in_one_batch(ask, "/v1/rerank", body, spec, request)
        for entry in answer["results"]:
            index = first + entry["index"]
            sink.feed(ScoreDelta(entry["relevance_score"], index))
            sink.feed(Finish("stop", index))
        tokens += answer["usage"]["prompt_tokens"]
        sink.feed(Usage(input_tokens=tokens))


def _in_one_batch(
    ask: Ask, path: str, body: dict[str, Any], spec: ModelSpec, request: GenerationRequest
) -> dict[str, Any]:
    """Ask what llama.cpp computes in one batch for each text. Raise ContextLengthExceeded."""
    try:
        return ask(path, body)
    except EngineError as exc:
        if too_large := _TOO_LARGE.search(str(exc)):
            tokens = int(too_large[1])
            raise ContextLengthExceeded(spec.context_length, tokens, request.subject) from exc
        raise


def fits(
    ask: Ask, spec: ModelSpec, request: GenerationRequest, prompt: str | Sequence[int], sink: Sink
) -> bool:
    """Whether the prompt is short enough for llama.cpp; False once the sink is cancelled.

    Raise ContextLengthExceeded for a text with more tokens than the context, or, where it is only
    tokenized, with more than ``TOKENIZE_LIMIT``.
    """
    if not isinstance(prompt, str):
        return not sink.cancelled
    limit = spec.context_length
    if request.operation in ("tokenize", "render"):
        limit = max(limit, TOKENIZE_LIMIT)

    def count(text: str) -> int:
        return len(tokens_of(ask, text, add_special=False))

    return is_short_enough(prompt, limit, spec.context_length, count, sink, request.subject)


def is_long(prompts: Sequence[str | tuple[int, ...]]) -> bool:
    """Whether the prompts must be counted before llama.cpp tokenizes them."""
    return sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) > PIECE


def with_short_prompts(
    ask: Ask, spec: ModelSpec, request: GenerationRequest, sink: Sink
) -> GenerationRequest | None:
    """Return the completion, its long prompts as token ids; None once it is cancelled.

    llama.cpp tokenizes all prompts of a request in one call that cannot be cancelled. So prompts
    that are long together are tokenized one by one first. Raise ContextLengthExceeded.
    """
    if not is_long(request.prompts):
        return None if sink.cancelled else request
    tokens = []
    for prompt in request.prompts:
        if not fits(ask, spec, request, prompt, sink):
            return None
        ids = tokens_of(ask, prompt) if isinstance(prompt, str) else prompt
        if len(ids) > spec.context_length:
            raise ContextLengthExceeded(spec.context_length, len(ids), request.subject)
        tokens.append(tuple(ids))
    return replace(request, prompts=tuple(tokens))


def tokenize(ask: Ask, spec: ModelSpec, request: GenerationRequest, sink: Sink) -> None:
    """Turn texts into tokens (see ``Engine.tokenize``)."""
    special = request.add_special_tokens
    for index, text in _prompts(request, sink):
        if not fits(ask, spec, request, text, sink):
            return
        tokens = tokens_of(ask, text, add_special=special, with_pieces=request.token_texts)
        if request.token_texts:
            texts = tuple(piece_of(entry).decode("utf-8", "replace") for entry in tokens)
            sink.feed(TokensDelta(tuple(entry["id"] for entry in tokens), index, texts))
        else:
            sink.feed(TokensDelta(tuple(tokens), index))
        sink.feed(Finish("stop", index))


def detokenize(ask: Ask, request: GenerationRequest, sink: Sink) -> None:
    """Turn tokens into texts (see ``Engine.detokenize``)."""
    for index, tokens in _prompts(request, sink):
        sink.feed(TextDelta(text_of(ask, tokens, request), index))
        sink.feed(Finish("stop", index))


def text_of(ask: Ask, tokens: Sequence[int], request: GenerationRequest) -> str:
    """Return the text of tokens. Raise InvalidRequest for an unknown id."""
    try:
        return str(ask("/detokenize", {"tokens": tokens})["content"])
    except EngineError as exc:
        if "range" not in str(exc):
            raise
        param = "tokens" if request.operation == "detokenize" else request.subject
        raise InvalidRequest("It holds an id that is no token of this model.", param) from exc


def render(
    ask: Ask, spec: ModelSpec, request: GenerationRequest, payload: dict[str, Any], sink: Sink
) -> None:
    """Apply the chat template to the payload of a chat (see ``Engine.render``)."""
    if any(message.parts for message in request.messages):
        raise InvalidRequest("A prompt with images or sounds cannot be rendered.", "messages")
    text = ask("/apply-template", payload)["prompt"]
    if not fits(ask, spec, request, text, sink):
        return
    sink.feed(PromptDelta(text, tuple(tokens_of(ask, text))))
    sink.feed(Finish("stop"))


def _prompts(request: GenerationRequest, sink: Sink) -> Iterator[tuple[int, Any]]:
    """Yield the prompts with their indices until the sink is cancelled."""
    for index, prompt in enumerate(request.prompts):
        if sink.cancelled:
            return
        yield index, prompt


def tokens_of(
    ask: Ask, text: str, *, add_special: bool = True, with_pieces: bool = False
) -> list[Any]:
    """Return llama.cpp's tokens of a text: ids, or objects with id and piece."""
    payload = {"content": text, "add_special": add_special, "parse_special": True}
    tokens: list[Any] = ask("/tokenize", {**payload, "with_pieces": with_pieces})["tokens"]
    return tokens


def tokens_of_words(ask: Ask, words: Sequence[str]) -> tuple[int, ...]:
    """Return the token of each word, without and with a space before it, as vLLM does.

    Raise InvalidRequest for a word of several tokens: llama.cpp can ban tokens, not sequences.
    """
    tokens: list[int] = []
    for word in words:
        plain, spaced = (
            tokens_of(ask, f"{space}{word.lstrip()}", add_special=False) for space in ("", " ")
        )
        if len(plain) != 1:
            raise InvalidRequest(
                f"Invalid 'bad_words': {word!r} has {len(plain)} tokens, and this model's engine "
                "can only forbid words of one token.",
                "bad_words",
            )
        tokens += plain + (spaced if len(spaced) == 1 else [])
    return tuple(dict.fromkeys(tokens))


def piece_of(entry: dict[str, Any]) -> bytes:
    """Return a token's text. llama.cpp sends a part of a character as a list of bytes."""
    piece: str | list[int] = entry["piece"]
    return piece.encode() if isinstance(piece, str) else bytes(piece)
