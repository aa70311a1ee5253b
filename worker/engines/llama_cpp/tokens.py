"""Embeddings, tokens and prompts: what is asked of a model without sampling from it."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from inference_site.domain.deltas import (
    EmbeddingDelta,
    Finish,
    PromptDelta,
    TextDelta,
    TokensDelta,
    Usage,
)
from inference_site.domain.errors import ContextLengthExceeded, EngineError, InvalidRequest
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from worker.engines.base import Sink
from worker.engines.prompt_length import LEAST_TOKENS, PIECE, is_short_enough

Ask = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Sends a payload to a path of the model's server, and returns the answer. Raise EngineError."""

_BATCH, _BATCH_SIZE = 32, 16_384
"""Prompts embedded between two looks at cancellation, and their characters or tokens, if several.
"""
_TOO_LARGE = re.compile(r"input \((\d+) tokens\) is too large")


def embed(ask: Ask, spec: ModelSpec, request: GenerationRequest, sink: Sink) -> None:
    """Embed the prompts (see ``Engine.embed``)."""
    tokens = first = 0
    while first < len(request.prompts) and not sink.cancelled:
        batch = _next_batch(request.prompts[first : first + _BATCH])
        if not all(fits(ask, spec, request, text, sink) for text in batch):
            return
        try:
            answer = ask("/v1/embeddings", {"input": batch, "encoding_format": "base64"})
        except EngineError as exc:
            if too_large := _TOO_LARGE.search(str(exc)):
                tokens = int(too_large[1])
                raise ContextLengthExceeded(spec.context_length, tokens, "input") from exc
            raise
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
    ask: Ask, spec: ModelSpec, request: GenerationRequest, prompt: str | Sequence[int], sink: Sink
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
        return len(tokens_of(ask, text, add_special=False))

    return is_short_enough(prompt, most, spec.context_length, count, sink, request.subject)


def is_long(prompts: Sequence[str | tuple[int, ...]]) -> bool:
    """Whether the prompts of a completion are too long to be given to llama.cpp without a look."""
    return sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) > PIECE


def with_short_prompts(
    ask: Ask, spec: ModelSpec, request: GenerationRequest, sink: Sink
) -> GenerationRequest | None:
    """Return a completion whose prompts llama.cpp can be given now; None once it is cancelled.

    llama.cpp tokenizes all prompts of a request in one call, which nothing can stop. Those that are
    long together are tokenized here, one by one. Raise ContextLengthExceeded.
    """
    if not is_long(request.prompts):
        return None if sink.cancelled else request
    tokens = []
    for prompt in request.prompts:
        if not fits(ask, spec, request, prompt, sink):
            return None
        found = tokens_of(ask, prompt) if isinstance(prompt, str) else prompt
        if len(found) > spec.context_length:
            raise ContextLengthExceeded(spec.context_length, len(found), request.subject)
        tokens.append(tuple(found))
    return replace(request, prompts=tuple(tokens))


def tokenize(ask: Ask, spec: ModelSpec, request: GenerationRequest, sink: Sink) -> None:
    """Turn texts into tokens (see ``Engine.tokenize``)."""
    for index, text in _prompts(request, sink):
        if not fits(ask, spec, request, text, sink):
            return
        sink.feed(_tokens_delta(ask, request, str(text), index))
        sink.feed(Finish("stop", index))


def detokenize(ask: Ask, request: GenerationRequest, sink: Sink) -> None:
    """Turn tokens into texts (see ``Engine.detokenize``)."""
    for index, tokens in _prompts(request, sink):
        sink.feed(TextDelta(text_of(ask, tokens, request), index))
        sink.feed(Finish("stop", index))


def text_of(ask: Ask, tokens: Sequence[int], request: GenerationRequest) -> str:
    """Return the text of tokens. Raise InvalidRequest for an id that is none."""
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
    for index, prompt in enumerate(request.prompts):
        if sink.cancelled:
            return
        yield index, prompt


def tokens_of(
    ask: Ask, text: str, *, add_special: bool = True, with_pieces: bool = False
) -> list[Any]:
    """Return llama.cpp's tokens of a text: ids, or with pieces an object for each."""
    payload = {"content": text, "add_special": add_special, "parse_special": True}
    tokens: list[Any] = ask("/tokenize", {**payload, "with_pieces": with_pieces})["tokens"]
    return tokens


def tokens_of_words(ask: Ask, words: Sequence[str]) -> tuple[int, ...]:
    """Return the tokens that are these words, with a space before them and without, as in vLLM.

    Raise InvalidRequest for a word of several tokens: llama.cpp forbids tokens, and no sequences.
    """
    found: list[int] = []
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
        found += plain + (spaced if len(spaced) == 1 else [])
    return tuple(dict.fromkeys(found))


def _tokens_delta(ask: Ask, request: GenerationRequest, text: str, index: int) -> TokensDelta:
    wanted, special = request.token_texts, request.add_special_tokens
    found = tokens_of(ask, text, add_special=special, with_pieces=wanted)
    if not wanted:
        return TokensDelta(tuple(found), index)
    texts = tuple(piece_of(entry).decode("utf-8", "replace") for entry in found)
    return TokensDelta(tuple(entry["id"] for entry in found), index, texts)


def piece_of(entry: dict[str, Any]) -> bytes:
    """Return a token's text; one that is a part of a character comes as numbers."""
    piece: str | list[int] = entry["piece"]
    return piece.encode() if isinstance(piece, str) else bytes(piece)
