"""Prompts with the log probabilities of their tokens, of which llama.cpp only gives those it draws.

So it is made to draw the prompt: after each beginning of it one token, which a bias makes certain.
Biases do not change log probabilities. Each beginning is in the cache but for its last token, so
this takes as long as an answer of so many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import orjson

from inference_site.domain.deltas import Delta, Finish, TextDelta, TokenLogprob, Usage
from inference_site.domain.errors import ContextLengthExceeded, GenerationFailed
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from worker.engines.base import Sink
from worker.engines.llama_cpp.chunks import engine_error
from worker.engines.llama_cpp.loopback import Loopback
from worker.engines.llama_cpp.payload import encode_token
from worker.engines.llama_cpp.tokens import detokenized, fits, piece_of
from worker.engines.prompt_echo import feed_entries, first_entry, shared_out

Complete = Callable[[bytes], dict[str, Any]]
"""Runs a completion that does not stream; returns its answer."""
Tokens = tuple[int, ...]

_COUNTS = (500, 10**7)
"""How many of the likeliest tokens are asked for: the last is all that there are."""


class PromptEcho:
    """Tells the prompts of one model."""

    def __init__(self, spec: ModelSpec, loopback: Loopback, complete: Complete) -> None:
        self._spec, self._loopback, self._complete = spec, loopback, complete

    def feed(self, request: GenerationRequest, sink: Sink) -> tuple[Tokens, ...]:
        """Feed each prompt to each of its choices; return the prompts as token ids.

        Raise EngineError. Return early when the sink is cancelled.
        """
        prompts = []
        for prompt in request.prompts:
            if not fits(self._loopback, self._spec, request, prompt, sink):
                return ()
            prompts.append(self._tokenized(request, prompt))
        for number, (tokens, pieces) in enumerate(prompts):
            indices = range(number * request.choices, (number + 1) * request.choices)
            if request.scores_prompts:
                entries = self._entries(request, tokens, pieces, sink)
                if sink.cancelled:
                    break
                given = request.prompts[number]
                feed_entries(
                    shared_out(given, entries) if isinstance(given, str) else entries, indices, sink
                )
                continue
            for index in indices:
                sink.feed(TextDelta(self._text(request, number, tokens), index))
        return tuple(tokens for tokens, _ in prompts)

    def end(self, request: GenerationRequest, prompts: Sequence[Tokens], sink: Sink) -> None:
        """Feed the ends of choices that have no answer, and what the prompts have used."""
        for index in range(request.answers):
            sink.feed(Finish("length", index))
        sink.feed(Usage(input_tokens=sum(map(len, prompts))))

    def _tokenized(
        self, request: GenerationRequest, prompt: str | Tokens
    ) -> tuple[Tokens, list[bytes]]:
        """Return the tokens of a prompt and, of a text, their texts."""
        tokens, pieces = prompt, list[bytes]()
        if isinstance(prompt, tuple):
            self._detokenized(request, prompt)  # Refuses what is no token.
        else:
            payload = {"content": prompt, "add_special": True, "parse_special": True}
            answer = self._ask("/tokenize", {**payload, "with_pieces": True}, request)["tokens"]
            tokens = tuple(entry["id"] for entry in answer)
            pieces = [piece_of(entry) for entry in answer]
        if len(tokens) > self._spec.context_length:
            raise ContextLengthExceeded(self._spec.context_length, len(tokens), "prompt")
        return tuple(tokens), pieces  # type: ignore[arg-type]  # No text any more.

    def _entries(
        self, request: GenerationRequest, tokens: Tokens, pieces: list[bytes], sink: Sink
    ) -> list[TokenLogprob]:
        first = pieces[0] if pieces else self._detokenized(request, tokens[:1]).encode()
        entries = [first_entry(first)]
        for end in range(1, len(tokens)):
            if sink.cancelled:
                break
            entry = self._scored(request, tokens[: end + 1])
            entries.append(replace(entry, text_bytes=pieces[end]) if pieces else entry)
        return entries

    def _scored(self, request: GenerationRequest, tokens: Tokens) -> TokenLogprob:
        """Return the entry of the last of these tokens."""
        *before, token = tokens
        top = request.top_logprobs or 0
        if drawn := self._drawn(request, before, token, top):
            return _entry(drawn, drawn["top_logprobs"][:top])
        # llama.cpp tells nothing of a token that ends inside a character. Another is drawn, and
        # this one is looked for among those that could have come.
        for count in _COUNTS:
            drawn = self._drawn(request, before, self._harmless, count) or {}
            others = drawn.get("top_logprobs", [])
            if found := next((other for other in others if other["id"] == token), None):
                return _entry(found, others[:top])
        raise GenerationFailed(f"llama.cpp has no log probability of the token {token}.")

    def _drawn(
        self, request: GenerationRequest, before: Sequence[int], token: int, top: int
    ) -> dict[str, Any] | None:
        answer = self._complete(encode_token(request, self._spec, before, token, top))
        if "error" in answer:
            raise engine_error(answer["error"], request)
        logprobs = answer["choices"][0]["logprobs"]
        entry: dict[str, Any] | None = logprobs and logprobs["content"][0]
        return entry if entry and entry["id"] == token else None

    @cached_property
    def _harmless(self) -> int:
        """A token that is no part of a character."""
        return int(self._loopback.post("/tokenize", b'{"content": "a"}')["tokens"][-1])

    def _text(self, request: GenerationRequest, number: int, tokens: Tokens) -> str:
        prompt = request.prompts[number]
        return prompt if isinstance(prompt, str) else self._detokenized(request, tokens)

    def _detokenized(self, request: GenerationRequest, tokens: Tokens) -> str:
        answer = self._loopback.post("/detokenize", orjson.dumps({"tokens": tokens}))
        return detokenized(answer, request)

    def _ask(
        self, path: str, payload: dict[str, Any], request: GenerationRequest
    ) -> dict[str, Any]:
        answer = self._loopback.post(path, orjson.dumps(payload))
        if "error" in answer:
            raise engine_error(answer["error"], request)
        return answer


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
    return TokenLogprob(wire["token"], wire["logprob"], bytes(wire["bytes"]), others)
