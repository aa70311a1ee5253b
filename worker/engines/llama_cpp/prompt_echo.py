"""Prompts with the log probabilities of their tokens.

llama.cpp returns log probabilities of sampled tokens only. So it samples the prompt: after each
prefix one token, forced by a logit bias, which does not change log probabilities. All of a prefix
but its last token is in the cache, so this takes as long as an answer of the prompt's length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inference_site.core.domain.deltas import (
    Delta,
    Finish,
    PromptTokens,
    RankedLogprob,
    TextDelta,
    TokenLogprob,
    Usage,
)
from inference_site.core.domain.errors import ContextLengthExceeded, GenerationFailed
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest
from worker.engines.base import Sink
from worker.engines.llama_cpp.payload import LlamaCppPayloads
from worker.engines.llama_cpp.tokens import Ask, fits, piece_of, text_of, tokens_of
from worker.engines.prompt_echo import feed_entries, first_entry, with_texts_of

Tokens = tuple[int, ...]

_TOP_COUNTS = (500, 10**7)
"""Numbers of likeliest tokens to request; the second is the whole vocabulary."""


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
        answer = self._ask("/v1/completions", payload)
        logprobs = answer["choices"][0]["logprobs"]
        entry: dict[str, Any] | None = logprobs and logprobs["content"][0]
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
