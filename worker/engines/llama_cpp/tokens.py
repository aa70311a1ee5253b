"""Requests to llama.cpp for tokens of a text: embed, rank, tokenize, render, score a prompt.

llama.cpp returns log probabilities of sampled tokens only. So ``PromptEcho`` samples the prompt:
after each prefix one token, forced by a logit bias, which does not change log probabilities. All of
a prefix but its last token is in the cache, so this takes as long as an answer of the prompt's
length.
"""

from __future__ import annotations

import base64
import math
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from inference_site.core.domain.deltas import (
    Delta,
    EmbeddingDelta,
    Finish,
    PromptDelta,
    PromptTokens,
    RankedLogprob,
    ScoreDelta,
    TextDelta,
    TokenLogprob,
    TokensDelta,
    Usage,
)
from inference_site.core.domain.errors import (
    ContextLengthExceeded,
    EngineError,
    GenerationFailed,
    InvalidRequest,
)
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest
from worker.engines.base import Sink
from worker.engines.llama_cpp.payload import LlamaCppPayloads
from worker.engines.openai_upstream.engine import piece_of
from worker.engines.texts import (
    PIECE,
    TOKENIZE_LIMIT,
    feed_entries,
    first_entry,
    is_short_enough,
    with_texts_of,
)

Ask = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Posts a payload to a path of the model's server, and returns the answer. Raise EngineError."""

_BATCH, _BATCH_SIZE = 32, 16_384
"""Prompts in one embedding request, and their total size in characters or token ids.

Cancellation is checked between two requests."""
_TOO_LARGE = re.compile(r"input \((\d+) tokens\) is too large")
_TOP_COUNTS = (500, 10**7)
"""Numbers of likeliest tokens to request; the second is the whole vocabulary."""


def embed(ask: Ask, spec: ModelSpec, request: GenerationRequest, sink: Sink) -> None:
    """Embed the prompts (see ``Engine.embed``)."""
    tokens = first = 0
    while first < len(request.prompts) and not sink.cancelled:
        candidates = request.prompts[first : first + _BATCH]
        sizes = accumulate(map(len, candidates))
        count = max(1, sum(size <= _BATCH_SIZE for size in sizes))
        batch = [list(p) if isinstance(p, tuple) else p for p in candidates[:count]]
        if request.truncate:
            batch = [_cut(ask, spec, prompt) for prompt in batch]
        elif not all(fits(ask, spec, request, prompt, sink) for prompt in batch):
            return
        body = {"input": batch, "encoding_format": "base64"}
        answer = _in_one_batch(ask, "/v1/embeddings", body, spec, request)
        for entry in answer["data"]:
            index, vector = first + entry["index"], base64.b64decode(entry["embedding"])
            if not math.isfinite(sum(array("f", vector))):
                raise GenerationFailed("The model computed an embedding that is not finite.")
            sink.feed(EmbeddingDelta(vector, index))
            sink.feed(Finish("stop", index))
        tokens += answer["usage"]["prompt_tokens"]
        first += len(batch)
        sink.feed(Usage(input_tokens=tokens))


def _cut(ask: Ask, spec: ModelSpec, prompt: str | list[int]) -> str | list[int]:
    """Return the prompt, or as many of its first tokens as the context holds.

    A token that the model's vocabulary puts after every prompt stays at the end. A long text is
    tokenized in pieces first, as in ``fits``.
    """
    limit, counted = spec.context_length, 0
    if not isinstance(prompt, str):
        return prompt[:limit]
    for end in range(PIECE, len(prompt), PIECE):
        counted += len(tokens_of(ask, prompt[end - PIECE : end], add_special=False))
        if counted > 2 * limit:  # Twice as many: cuts between pieces split tokens.
            prompt = prompt[:end]
            break
    tokens = tokens_of(ask, prompt)
    if len(tokens) <= limit:
        return prompt
    plain = tokens_of(ask, prompt, add_special=False)
    last = [] if tokens[-1] == plain[-1] else tokens[-1:]
    return [*tokens[: limit - len(last)], *last]


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
    """Send a request that llama.cpp computes in one batch a text. Raise ContextLengthExceeded."""
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


def with_text(ask: Ask, request: GenerationRequest) -> GenerationRequest:
    """Return the completion with texts in place of prompts of token ids.

    Raise InvalidRequest for tokens whose text has others.
    """
    texts = tuple(
        prompt if isinstance(prompt, str) else _exact_text(ask, prompt, request)
        for prompt in request.prompts
    )
    return replace(request, prompts=texts)


def _exact_text(ask: Ask, tokens: tuple[int, ...], request: GenerationRequest) -> str:
    start = tuple(tokens_of(ask, ""))  # llama.cpp adds them to each text.
    has_start = tokens[: len(start)] == start
    text = text_of(ask, tokens[len(start) :] if has_start else tokens, request)
    if tuple(tokens_of(ask, text)) != tokens:
        raise InvalidRequest(
            f"The model '{request.model}' has a projector: its prompt must be a text, and no text "
            "has these tokens.",
            request.subject,
        )
    return text


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
    if request.has_parts:
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


Tokens = tuple[int, ...]


class PromptEcho:
    """Feeds the prompts of one request to its sink, with log probabilities."""

    def __init__(
        self, spec: ModelSpec, payloads: LlamaCppPayloads, ask: Ask, request: GenerationRequest
    ) -> None:
        self._spec, self._payloads, self._ask, self._request = spec, payloads, ask, request
        self._whole_token: int | None = None

    def feed(self, sink: Sink) -> tuple[Tokens, ...]:
        """Feed each prompt to each of its choices; return the prompts as token ids.

        Raise EngineError. Return early when the sink is cancelled.
        """
        request, prompts = self._request, []
        for prompt in request.prompts:
            if not fits(self._ask, self._spec, request, prompt, sink):
                return ()
            prompts.append(self._tokenized(prompt))
        for number, (tokens, pieces) in enumerate(prompts):
            indices = range(number * request.choices, (number + 1) * request.choices)
            if request.scores_prompts:
                entries = self._entries(tokens, pieces, request.top_logprobs or 0, sink)
                if sink.cancelled:
                    break
                prompt = request.prompts[number]
                if isinstance(prompt, str):
                    entries = with_texts_of(prompt, entries)
                if request.tokens_as_ids:
                    entries = [entry.named_by_id() for entry in entries]
                feed_entries(entries, indices, sink)
                continue
            prompt = request.prompts[number]
            text = prompt if isinstance(prompt, str) else self._detokenized(tokens)
            for index in indices:
                sink.feed(TextDelta(text, index))
        return tuple(tokens for tokens, _ in prompts)

    def feed_tokens(self, sink: Sink) -> tuple[Tokens, ...]:
        """Feed the tokens of each prompt to each of its choices; return the prompts as token ids.

        Raise EngineError. Return early when the sink is cancelled.
        """
        request, prompts = self._request, []
        for number, prompt in enumerate(request.prompts):
            tokens, pieces = self._tokenized(prompt)
            prompts.append(tokens)
            ranked: list[dict[int, RankedLogprob] | None] = []
            if (top := request.prompt_logprobs) is not None:
                entries = self._entries(tokens, pieces, top, sink)
                # Cancellation may leave fewer entries than tokens.
                ranked = [_ranked(*pair) for pair in zip(tokens, entries, strict=False)]
            if sink.cancelled:
                break
            for index in range(number * request.choices, (number + 1) * request.choices):
                sink.feed(PromptTokens(tokens, index, tuple(ranked)))
        return tuple(prompts)

    def end(self, prompts: Sequence[Tokens], sink: Sink) -> None:
        """Feed the ends of choices without an answer, and the usage of the prompts."""
        for index in range(self._request.answers):
            sink.feed(Finish("length", index))
        sink.feed(Usage(input_tokens=sum(map(len, prompts))))

    def _tokenized(self, prompt: str | Tokens) -> tuple[Tokens, list[bytes]]:
        """Return the tokens of a prompt and, if it is a text, the pieces of text of each."""
        tokens, pieces = prompt, list[bytes]()
        if isinstance(prompt, tuple):
            self._detokenized(prompt)  # Raises InvalidRequest for an unknown id.
        else:
            answer = tokens_of(self._ask, prompt, with_pieces=True)
            tokens = tuple(entry["id"] for entry in answer)
            pieces = [piece_of(entry) for entry in answer]
        if len(tokens) > self._spec.context_length:
            raise ContextLengthExceeded(self._spec.context_length, len(tokens), "prompt")
        return tuple(tokens), pieces  # type: ignore[arg-type]  # No text any more.

    def _entries(
        self, tokens: Tokens, pieces: list[bytes], top: int, sink: Sink
    ) -> list[TokenLogprob]:
        first = pieces[0] if pieces else self._detokenized(tokens[:1]).encode()
        entries = [replace(first_entry(first), id=tokens[0])]
        for end in range(1, len(tokens)):
            if sink.cancelled:
                break
            entry = self._scored(tokens[: end + 1], top)
            entries.append(replace(entry, text_bytes=pieces[end]) if pieces else entry)
        return entries

    def _scored(self, tokens: Tokens, top: int) -> TokenLogprob:
        """Return the entry of the last of these tokens."""
        *before, token = tokens
        if sampled := self._sampled(before, token, top):
            return _entry(sampled, sampled["top_logprobs"][:top])
        # llama.cpp returns no entry for a token that ends inside a character. So another token is
        # sampled, and the entry is among its ``top_logprobs``.
        if self._whole_token is None:
            self._whole_token = int(tokens_of(self._ask, "a")[-1])
        for count in _TOP_COUNTS:
            sampled = self._sampled(before, self._whole_token, count) or {}
            others = sampled.get("top_logprobs", [])
            if match := next((other for other in others if other["id"] == token), None):
                return _entry(match, others[:top])
        raise GenerationFailed(f"llama.cpp has no log probability of the token {token}.")

    def _sampled(self, before: Sequence[int], token: int, top: int) -> dict[str, Any] | None:
        """Have the model sample this token after those before it; return its entry."""
        payload = self._payloads.token(self._request, before, token, top)
        found = self._ask("/completion", payload).get("completion_probabilities")
        entry: dict[str, Any] | None = found[0] if found else None
        return entry if entry and entry["id"] == token else None

    def _detokenized(self, tokens: Tokens) -> str:
        return text_of(self._ask, tokens, self._request)


class UncachedUsageSink:
    """A sink that reports no cached tokens: scoring the prompt for this request has cached it."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    @property
    def cancelled(self) -> bool:
        return self._sink.cancelled

    def feed(self, delta: Delta) -> None:
        self._sink.feed(replace(delta, cached_tokens=0) if isinstance(delta, Usage) else delta)


def _entry(wire: dict[str, Any], top: Sequence[dict[str, Any]]) -> TokenLogprob:
    others = tuple(_entry(other, ()) for other in top)
    return TokenLogprob(wire["token"], wire["logprob"], bytes(wire["bytes"]), others, wire["id"])


def _ranked(token: int, entry: TokenLogprob) -> dict[int, RankedLogprob] | None:
    """Return the log probabilities at the position of this token; None for the first token."""
    if math.isnan(entry.logprob):
        return None
    ranked = {token: RankedLogprob(entry.logprob, None, entry.token)}
    for rank, other in enumerate(entry.top, 1):
        assert other.id is not None
        ranked[other.id] = RankedLogprob(other.logprob, rank, other.token)
    return ranked
