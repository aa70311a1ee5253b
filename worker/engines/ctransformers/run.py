"""The run of one choice: evaluate the prompt, then sample token by token."""

from __future__ import annotations

import codecs
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher

from inference_site.core.domain.deltas import Finish, PromptProgress, TextDelta, TokenLogprob, Usage
from inference_site.core.domain.errors import GenerationFailed, InvalidRequest
from inference_site.core.domain.request import GenerationRequest
from worker.engines.base import Sink
from worker.engines.ctransformers.contexts import PREFILL_BATCH, Context
from worker.engines.ctransformers.sampler import Floats, Sampler, log_probabilities
from worker.engines.ctransformers.vocabulary import Vocabulary
from worker.engines.prompt_echo import feed_entries, first_entry, with_texts_of
from worker.engines.stop_texts import StopTexts


@dataclass
class RunUsage:
    """Usage of a request so far."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0

    def to_delta(self) -> Usage:
        """Return the usage as a delta."""
        return Usage(
            self.input_tokens,
            self.cached_tokens,
            self.output_tokens,
            0,
            self.prefill_ms,
            self.decode_ms,
        )


@dataclass
class ChoiceRun:
    """The run of the choice with this index."""

    request: GenerationRequest
    vocabulary: Vocabulary
    sink: Sink
    usage: RunUsage
    index: int
    sampler: Sampler
    output: list[int] = field(default_factory=list)

    def echo(self, context: Context, tokens: Sequence[int], prompt: str | tuple[int, ...]) -> None:
        """Feed the prompt to all its choices; for log probabilities evaluate it token by token."""
        entries = [first_entry(self.vocabulary.bytes_of(token)) for token in tokens]
        if self.request.scores_prompts:
            context.tokens.clear()
            for place, token in enumerate(tokens[1:], 1):
                if self.sink.cancelled:
                    return
                context.read(tokens[place - 1 : place])
                entries[place] = self._logprob(token, context.logits())
        if isinstance(prompt, str):
            entries = with_texts_of(prompt, entries)
        indices = range(self.index, self.index + self.request.choices)
        feed_entries(entries, indices, self.sink, self.request.scores_prompts)

    def run(self, context: Context, prompt: Sequence[int], limit: int) -> None:
        """Generate up to ``limit`` tokens; return early when the sink is cancelled."""
        if not self._prefill(context, prompt):
            return
        started = time.perf_counter()
        if limit == 0 and self.request.echo:
            self.sink.feed(Finish("length", self.index))
            return
        finish = self._decode(context, [*prompt], limit)
        self.usage.decode_ms += (time.perf_counter() - started) * 1000
        if finish is not None:
            self.sink.feed(finish)

    def _prefill(self, context: Context, prompt: Sequence[int]) -> bool:
        started = time.perf_counter()
        cached = context.rewind(prompt) if self.request.cache_prompt else 0
        if not self.request.cache_prompt:
            context.tokens.clear()
        if self.index % self.request.choices == 0:
            self.usage.input_tokens += len(prompt)
            self.usage.cached_tokens += 0 if self.request.scores_prompts else cached
        for first in range(cached, len(prompt), PREFILL_BATCH):
            if self.sink.cancelled:
                return False
            context.read(prompt[first : first + PREFILL_BATCH])
            if self.request.return_progress:
                done, elapsed_ms = len(context.tokens), (time.perf_counter() - started) * 1000
                self.sink.feed(PromptProgress(len(prompt), cached, done, elapsed_ms))
        self.usage.prefill_ms += (time.perf_counter() - started) * 1000
        return True

    def _decode(self, context: Context, history: list[int], limit: int) -> Finish | None:
        text = AnswerText(self.request.stop, self.index)
        matcher = self._matcher()
        while not self.sink.cancelled:
            logits = context.logits()
            raw = logits.copy() if self.request.top_logprobs is not None else None
            token = self._choose(logits, history, matcher)
            self.usage.output_tokens += 1
            if self.request.running_usage:
                self.sink.feed(self.usage.to_delta())
            ended = self._ended(token, text)
            if ended is None and matcher is not None and not matcher.consume_token(token):
                raise GenerationFailed(f"The grammar does not allow its own token {token}.")
            if ended is None:
                history.append(token)
                self.output.append(token)
                ended = self._feed(token, raw, text)
            if ended is None and matcher is not None and matcher.is_stopped():
                ended = Finish("stop", self.index)
            if ended is None and len(self.output) >= limit:
                ended = Finish("length", self.index)
            if ended is not None:
                if rest := text.end():
                    self.sink.feed(rest)
                return ended
            context.read([token])
        return None

    def _choose(self, logits: Floats, history: list[int], matcher: LLMatcher | None) -> int:
        if matcher is not None:
            allowed = np.unpackbits(
                np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"
            )[: len(logits)].astype(bool)
            if not allowed.any():
                raise GenerationFailed("No token of this model can go on with the grammar.")
            logits[~allowed] = -np.inf
        elif self.request.ignore_eos:
            logits[self.vocabulary.eos] = -np.inf
        return self.sampler.choose(logits, history, self.output)

    def _ended(self, token: int, text: AnswerText) -> Finish | None:
        if token in self.request.stop_token_ids:
            return Finish("stop", self.index, token)
        if self.vocabulary.is_end(token) and not self.request.ignore_eos:
            return Finish("stop", self.index)
        return None

    def _feed(self, token: int, raw: Floats | None, text: AnswerText) -> Finish | None:
        logprob = None if raw is None else self._logprob(token, raw)
        if delta := text.feed(self.vocabulary.bytes_of(token), logprob):
            self.sink.feed(delta)
        return None if text.stop is None else Finish("stop", self.index, text.stop)

    def _logprob(self, token: int, raw: Floats) -> TokenLogprob:
        scores = log_probabilities(raw)
        count = min(self.request.top_logprobs or 0, len(scores))
        best = np.argsort(-scores)[:count].tolist()
        return self._entry(token, scores, tuple(self._entry(t, scores) for t in best))

    def _entry(
        self, token: int, scores: Floats, top: tuple[TokenLogprob, ...] = ()
    ) -> TokenLogprob:
        piece = self.vocabulary.bytes_of(token)
        return TokenLogprob(piece.decode("utf-8", "replace"), float(scores[token]), piece, top)

    def _matcher(self) -> LLMatcher | None:
        constraint = self.request.constraint
        if constraint is None:
            return None
        matcher = LLMatcher(self.vocabulary.for_grammars, constraint.source)
        if error := matcher.get_error():
            raise InvalidRequest(f"Invalid grammar: {error.strip()}", constraint.param)
        return matcher


class AnswerText:
    """The text of one choice. A fold over its tokens' bytes."""

    def __init__(self, stops: Sequence[str], index: int) -> None:
        self._stops, self._index = StopTexts(stops), index
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._logprobs: list[TokenLogprob] = []

    @property
    def stop(self) -> str | None:
        """The stop text that ended the answer."""
        return self._stops.found

    def feed(self, piece: bytes, logprob: TokenLogprob | None) -> TextDelta | None:
        """Take the next token's bytes; return the text that is certain now."""
        if logprob is not None:
            self._logprobs.append(logprob)
        return self._delta(self._stops.feed(self._decoder.decode(piece)))

    def end(self) -> TextDelta | None:
        """Return the rest of the text at the end of the answer."""
        if self.stop is not None:
            return None
        return self._delta(
            self._stops.feed(self._decoder.decode(b"", final=True)) + self._stops.end()
        )

    def _delta(self, text: str) -> TextDelta | None:
        if not text:
            return None
        logprobs, self._logprobs = tuple(self._logprobs), []
        return TextDelta(text, self._index, logprobs)
