"""Prompts with the log probabilities of their tokens, of which llama.cpp only gives those it draws.

So it is made to draw the prompt: after each beginning of it one token, which a bias makes certain.
Biases do not change log probabilities. Each beginning is in the cache but for its last token, so
this takes as long as an answer of so many tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inference_site.domain.deltas import (
    Delta,
    Finish,
    PromptTokens,
    RankedLogprob,
    TextDelta,
    TokenLogprob,
    Usage,
)
from inference_site.domain.errors import ContextLengthExceeded, GenerationFailed
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from worker.engines.base import Sink
from worker.engines.llama_cpp.payload import LlamaCppPayloads
from worker.engines.llama_cpp.tokens import Ask, fits, piece_of, text_of, tokens_of
from worker.engines.prompt_echo import feed_entries, first_entry, shared_out

Tokens = tuple[int, ...]

_COUNTS = (500, 10**7)
"""How many of the likeliest tokens are asked for: the last is all that there are."""


class PromptEcho:
    """Tells the prompts of one request."""

    def __init__(
        self, spec: ModelSpec, payloads: LlamaCppPayloads, ask: Ask, request: GenerationRequest
    ) -> None:
        self._spec, self._payloads, self._ask, self._request = spec, payloads, ask, request
        self._found_harmless: int | None = None

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
                given = request.prompts[number]
                shown = shared_out(given, entries) if isinstance(given, str) else entries
                if request.tokens_as_ids:
                    shown = [entry.named_by_id() for entry in shown]
                feed_entries(shown, indices, sink)
                continue
            for index in indices:
                sink.feed(TextDelta(self._text(number, tokens), index))
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
                ranked = [_ranked(*pair) for pair in zip(tokens, entries, strict=False)]
            if sink.cancelled:
                break
            for index in range(number * request.choices, (number + 1) * request.choices):
                sink.feed(PromptTokens(tokens, index, tuple(ranked)))
        return tuple(prompts)

    def end(self, prompts: Sequence[Tokens], sink: Sink) -> None:
        """Feed the ends of choices that have no answer, and what the prompts have used."""
        for index in range(self._request.answers):
            sink.feed(Finish("length", index))
        sink.feed(Usage(input_tokens=sum(map(len, prompts))))

    def _tokenized(self, prompt: str | Tokens) -> tuple[Tokens, list[bytes]]:
        """Return the tokens of a prompt and, of a text, their texts."""
        tokens, pieces = prompt, list[bytes]()
        if isinstance(prompt, tuple):
            self._detokenized(prompt)  # Refuses what is no token.
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
        if drawn := self._drawn(before, token, top):
            return _entry(drawn, drawn["top_logprobs"][:top])
        # llama.cpp tells nothing of a token that ends inside a character. Another is drawn, and
        # this one is looked for among those that could have come.
        for count in _COUNTS:
            drawn = self._drawn(before, self._harmless(), count) or {}
            others = drawn.get("top_logprobs", [])
            if found := next((other for other in others if other["id"] == token), None):
                return _entry(found, others[:top])
        raise GenerationFailed(f"llama.cpp has no log probability of the token {token}.")

    def _drawn(self, before: Sequence[int], token: int, top: int) -> dict[str, Any] | None:
        payload = self._payloads.token(self._request, before, token, top)
        answer = self._ask("/v1/completions", payload)
        logprobs = answer["choices"][0]["logprobs"]
        entry: dict[str, Any] | None = logprobs and logprobs["content"][0]
        return entry if entry and entry["id"] == token else None

    def _harmless(self) -> int:
        """Return a token that is no part of a character."""
        if self._found_harmless is None:
            self._found_harmless = int(tokens_of(self._ask, "a")[-1])
        return self._found_harmless

    def _text(self, number: int, tokens: Tokens) -> str:
        prompt = self._request.prompts[number]
        return prompt if isinstance(prompt, str) else self._detokenized(tokens)

    def _detokenized(self, tokens: Tokens) -> str:
        return text_of(self._ask, tokens, self._request)


class Fresh:
    """A sink of an answer whose prompt was computed for it, and is only cached since then."""

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
    """Return the log probabilities at the place of this token; None where nothing is before it."""
    if math.isnan(entry.logprob):
        return None
    found = {token: RankedLogprob(entry.logprob, None, entry.token)}
    for rank, other in enumerate(entry.top, 1):
        assert other.id is not None
        found[other.id] = RankedLogprob(other.logprob, rank, other.token)
    return found
