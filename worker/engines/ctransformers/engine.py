"""Models in ctransformers: GGML files of 2023, which no other library loads, and early GGUF.

The library has no batching: a second sequence needs a second context, a loaded copy of the model
with its own weights, except for the pages of a mapped file that the operating system shares. A run
of a choice takes a context, evaluates the prompt, and samples token by token.
"""

from __future__ import annotations

import codecs
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import addressof, c_float, c_int
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher

from inference_site.catalogue.engines.ctransformers import (
    CtransformersOptions,
    normalized_model_type,
)
from inference_site.catalogue.gguf_files import is_gguf
from inference_site.core.domain.deltas import (
    Finish,
    PromptProgress,
    TextDelta,
    TokenLogprob,
    TokensDelta,
    Usage,
)
from inference_site.core.domain.errors import (
    ContextLengthExceeded,
    EngineLoadError,
    GenerationFailed,
    InvalidRequest,
)
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest
from worker.engines.base import Engine, Sink
from worker.engines.ctransformers.sampler import Floats, Sampler, log_probabilities
from worker.engines.ctransformers.vocabulary import (
    GgmlFile,
    Vocabulary,
    adds_space,
    check_gguf,
    own_texts,
    own_tokenizer,
    read_ggml,
)
from worker.engines.texts import (
    TOKENIZE_LIMIT,
    StopTexts,
    feed_entries,
    first_entry,
    is_short_enough,
    with_texts_of,
)

PREFILL_BATCH = 32
"""Tokens of a prompt between two checks for cancellation."""

_ONE_BUFFER = {
    **dict.fromkeys(("dollyv2", "gptj"), 1),
    **dict.fromkeys(("gpt2", "replit"), 8),
    **dict.fromkeys(("gptbigcode", "gptneox", "mpt", "starcoder"), 0),
}
"""Architectures whose models share one compute buffer in a process. A number other than 0 is the
divisor of the context length at which ``Context._reserve`` measures the buffer: 1, at the end; 8,
at an eighth, because the library copies the values of all tokens."""
_evaluates = threading.Lock()
"""Held while a model of these architectures evaluates tokens: one at a time uses the buffer."""
_BREAKERS = ("\n", ":", '"', "*")
"""Default texts that end a repetition for the DRY penalty."""


class Context:
    """One copy of the model, and the tokens it has read."""

    def __init__(self, llm: Any, threads: int, architecture: str) -> None:
        self._llm, self._threads = llm, threads  # The last reference to it frees the model.
        shares_buffer = architecture in _ONE_BUFFER
        # The layout of Falcon's values depends on the length, so its tokens cannot be removed.
        self._rewinds = architecture != "falcon"
        self._turn: AbstractContextManager[Any] = _evaluates if shares_buffer else nullcontext()
        self.tokens: list[int] = []
        # Kept, because the library creates these objects at each access.
        self._eval = llm.ctransformers_llm_batch_eval
        self._logits_data = llm.ctransformers_llm_logits_data
        self._logits_type: Any = c_float * int(llm.ctransformers_llm_vocab_size())
        if divisor := _ONE_BUFFER.get(architecture):
            self._reserve(int(llm.context_length), divisor)

    def _reserve(self, context_length: int, divisor: int) -> None:
        """Make the library allocate the memory of a full context. Raise GenerationFailed.

        The library measures the memory of the first token, and allocates that for each token of a
        later batch. But the memory of a token grows with its position, and too little ends the
        process. So a token at a late position is evaluated first, then a batch of full size.
        """
        late = min(context_length // divisor, context_length - 1)
        for count, before in ((1, late), (min(PREFILL_BATCH, context_length), 0)):
            self.tokens = [0] * before
            self.read([0] * count)
        self.tokens = []

    def rewind(self, tokens: Sequence[int]) -> int:
        """Keep the common prefix with these tokens, except the last one; return its length."""
        kept = min(common_prefix(self.tokens, tokens), max(0, len(tokens) - 1))
        if kept < len(self.tokens) and not self._rewinds:
            kept = 0
        del self.tokens[kept:]
        return kept

    def read(self, tokens: Sequence[int]) -> None:
        """Evaluate the next tokens. Raise GenerationFailed."""
        array = (c_int * len(tokens))(*tokens)
        with self._turn:
            done = self._eval(array, len(tokens), len(self.tokens), PREFILL_BATCH, self._threads)
        if not done:
            self.tokens.clear()
            raise GenerationFailed("ctransformers could not evaluate the tokens.")
        self.tokens += tokens

    def logits(self) -> Floats:
        """Return a copy of the logits of the next token."""
        data = self._logits_type.from_address(addressof(self._logits_data().contents))
        return np.frombuffer(data, np.float32).copy()


class Contexts:
    """The contexts of one model. As many are taken at once as there are slots."""

    def __init__(self, contexts: list[Context]) -> None:
        self._free = contexts
        self._changed = threading.Condition()

    @contextmanager
    def take(self, tokens: Sequence[int]) -> Iterator[Context]:
        """Take the free context with the longest common prefix with these tokens."""
        with self._changed:
            while not self._free:
                self._changed.wait()
            best = max(self._free, key=lambda context: common_prefix(context.tokens, tokens))
            self._free.remove(best)
        try:
            yield best
        finally:
            with self._changed:
                self._free.append(best)
                self._changed.notify()


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens that both begin with."""
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)


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
            if self.request.running_usage:
                self.sink.feed(self.usage.to_delta())
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
            ended = None
            if token in self.request.stop_token_ids:
                ended = Finish("stop", self.index, token)
            elif self.vocabulary.is_end(token) and not self.request.ignore_eos:
                ended = Finish("stop", self.index)
            elif matcher is not None and not matcher.consume_token(token):
                raise GenerationFailed(f"The grammar does not allow its own token {token}.")
            else:
                history.append(token)
                self.output.append(token)
                logprob = None if raw is None else self._logprob(token, raw)
                if delta := text.feed(self.vocabulary.bytes_of(token), logprob):
                    self.sink.feed(delta)
                if text.stop is not None:
                    ended = Finish("stop", self.index, text.stop)
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


def open_model(spec: ModelSpec) -> CtransformersEngine:
    """Load a context for each slot into this process. Raise EngineLoadError."""
    from ctransformers.llm import LLM, Config

    options = CtransformersOptions.of(spec)
    ggml = _checked(spec, options)
    config = Config(
        context_length=spec.context_length,
        threads=spec.threads,
        gpu_layers=max(0, spec.gpu_layers),
    )
    try:
        library = _library(options.lib) if options.lib or not config.gpu_layers else None
        llms = [
            LLM(
                str(spec.file),
                options.model_type and normalized_model_type(options.model_type),
                config=config,
                lib=library,
            )
            for _ in range(spec.slots)
        ]
    except (OSError, RuntimeError, ValueError) as exc:
        raise EngineLoadError(f"Model '{spec.id}': {_reason(spec, exc)}") from exc
    return CtransformersEngine(spec, llms, ggml)


def _checked(spec: ModelSpec, options: CtransformersOptions) -> GgmlFile | None:
    """Return a GGML file's vocabulary; None for GGUF. Raise EngineLoadError for a bad file."""
    assert spec.file is not None
    try:
        if is_gguf(spec.file):
            check_gguf(spec.file)
            return None
        if options.model_type is None:
            return None  # The library raises an error that names the option.
        return read_ggml(spec.file, normalized_model_type(options.model_type))
    except (OSError, ValueError) as exc:
        kind = f" as {options.model_type}" if options.model_type else ""
        raise EngineLoadError(f"Model '{spec.id}': cannot read {spec.file}{kind}: {exc}.") from exc


@cache
def _library(build: str | None) -> str:
    """Return the file of a build of the library, by default of the build for this processor.

    The library would detect the processor for each copy of each model, which takes a second, and
    would load any path in place of an unknown build. Raise OSError for an unknown build.
    """
    from ctransformers.lib import find_library

    path = str(find_library(build))
    if not Path(path).is_absolute():
        raise OSError(f"it has no build {build}")
    return path


def _reason(spec: ModelSpec, exc: Exception) -> str:
    if "model type" in str(exc):
        return f"{spec.file} does not say what it is: set 'model_type' (gpt2, gptj, mpt, …)."
    if isinstance(exc, OSError):
        return f"the library of ctransformers cannot be loaded ({exc}); set 'lib' to basic."
    return (
        f"ctransformers could not load {spec.file}: its 'model_type' is wrong, its GGUF is newer "
        "than the library (2023), or the memory is not enough."
    )


class CtransformersEngine(Engine):
    """A model loaded in ctransformers (see ``worker.engines.base.Engine``)."""

    def __init__(self, spec: ModelSpec, llms: list[Any], ggml: GgmlFile | None) -> None:
        self._spec = spec
        assert spec.file is not None
        self._vocabulary = Vocabulary(
            llms[0],
            own_texts(spec.file),
            adds_space=adds_space(spec.file),
            tokenize=own_tokenizer(ggml) if ggml else None,
            eos=ggml.end if ggml else None,
        )
        # The library may lower the context length to what the model can read.
        self._context_length = min(spec.context_length, int(llms[0].context_length))
        architecture = ggml.architecture if ggml else ""
        contexts = [Context(llm, spec.threads, architecture) for llm in llms]
        self._contexts = Contexts(contexts)

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        """Chats come as prompts, through the chat adapter."""
        raise InvalidRequest(f"The model `{self._spec.id}` has no chat template.", "messages")

    def complete(self, request: GenerationRequest, sink: Sink) -> None:
        """Continue the prompts, one choice after the other (see ``Engine.complete``)."""
        prompts = []
        for text in request.prompts:
            if not self._fits(request, text, self._context_length, sink):
                return
            if isinstance(text, tuple):
                prompt = self._vocabulary.checked(text, "prompt")
            else:
                prompt = self._vocabulary.tokens(text) or [self._vocabulary.bos]
            prompts.append(prompt)
            if len(prompt) >= self._context_length:
                raise ContextLengthExceeded(self._context_length, len(prompt), "prompt")
        sampling, usage = request.sampling, RunUsage()
        try:
            texts = sampling.dry_sequence_breakers or _BREAKERS
            breakers = [frozenset(self._vocabulary.tokens(text)[-1:]) for text in texts]
            for number, prompt in enumerate(prompts):
                limit = self._context_length - len(prompt)
                if request.max_output_tokens is not None:
                    limit = min(limit, request.max_output_tokens)
                with self._contexts.take(prompt) as context:
                    runs = []
                    for index in range(number * request.choices, (number + 1) * request.choices):
                        seed = None if sampling.seed is None else sampling.seed + index
                        sampler = Sampler(sampling, breakers, seed)
                        run = ChoiceRun(request, self._vocabulary, sink, usage, index, sampler)
                        runs.append(run)
                    if request.echo:
                        runs[0].echo(context, prompt, request.prompts[number])
                    for run in runs:
                        run.run(context, prompt, limit)
        finally:
            sink.feed(usage.to_delta())  # Also after an error: the tokens are accounted.

    def _fits(
        self, request: GenerationRequest, prompt: str | tuple[int, ...], limit: int, sink: Sink
    ) -> bool:
        """Whether the prompt is short enough to be tokenized; False once the sink is cancelled.

        Raise ContextLengthExceeded for a text with more than ``limit`` tokens.
        """
        if not isinstance(prompt, str):
            return not sink.cancelled

        def count(text: str) -> int:
            return len(self._vocabulary.tokens(text))

        return is_short_enough(prompt, limit, self._context_length, count, sink, request.subject)

    def tokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn texts into tokens (see ``Engine.tokenize``)."""
        limit = max(self._context_length, TOKENIZE_LIMIT)
        for index, prompt in enumerate(request.prompts):
            if not self._fits(request, prompt, limit, sink):
                return
            tokens = self._vocabulary.tokens(str(prompt), request.add_special_tokens)
            pieces = map(self._vocabulary.bytes_of, tokens) if request.token_texts else ()
            texts = tuple(piece.decode("utf-8", "replace") for piece in pieces)
            sink.feed(TokensDelta(tuple(tokens), index, texts))
            sink.feed(Finish("stop", index))

    def detokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn tokens into texts (see ``Engine.detokenize``)."""
        for index, prompt in enumerate(request.prompts):
            tokens = self._vocabulary.checked(tuple(prompt), "tokens")  # type: ignore[arg-type]  # Token ids: see the contract.
            text = b"".join(self._vocabulary.bytes_of(token) for token in tokens)
            sink.feed(TextDelta(text.decode("utf-8", "replace"), index))
            sink.feed(Finish("stop", index))

    def close(self) -> None:
        """Drop the contexts; the last reference frees their memory."""
        self._contexts = Contexts([])
