"""ctransformers: models of the GGML era, which nothing else loads any more, and early GGUF."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from ctypes import addressof, c_float, c_int
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from inference_site.catalogue.engines.ctransformers import (
    CtransformersOptions,
    library_name,
)
from inference_site.domain.deltas import Finish, TextDelta, TokensDelta
from inference_site.domain.errors import (
    ContextLengthExceeded,
    EngineLoadError,
    GenerationFailed,
    InvalidRequest,
)
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from inference_site.domain.sampling import Sampling
from worker.engines.base import Engine, Sink
from worker.engines.ctransformers.files import (
    GgmlFile,
    adds_space,
    check_gguf,
    is_gguf,
    own_texts,
    read_ggml,
)
from worker.engines.ctransformers.run import ChoiceRun, RunUsage
from worker.engines.ctransformers.sampler import Floats, Sampler
from worker.engines.ctransformers.vocabulary import Vocabulary, own_tokenizer
from worker.engines.prompt_length import LEAST_TOKENS, is_short_enough

_BREAKERS = ("\n", ":", '"', "*")
"""Texts that a repetition does not reach across, unless the request names others."""


def open_model(spec: ModelSpec) -> CtransformersEngine:
    """Load a context for each slot into this process. Raise EngineLoadError with the fix."""
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
                options.model_type and library_name(options.model_type),
                config=config,
                lib=library,
            )
            for _ in range(spec.slots)
        ]
    except (OSError, RuntimeError, ValueError) as exc:
        raise EngineLoadError(f"Model '{spec.id}': {_reason(spec, exc)}") from exc
    return CtransformersEngine(spec, llms, ggml)


def _checked(spec: ModelSpec, options: CtransformersOptions) -> GgmlFile | None:
    """Return what a GGML file says, None for GGUF. Raise EngineLoadError for a bad one."""
    assert spec.file is not None
    try:
        if is_gguf(spec.file):
            check_gguf(spec.file)
            return None
        if options.model_type is None:
            return None  # The library asks for it.
        return read_ggml(spec.file, library_name(options.model_type))
    except (OSError, ValueError) as exc:
        kind = f" as {options.model_type}" if options.model_type else ""
        raise EngineLoadError(f"Model '{spec.id}': cannot read {spec.file}{kind}: {exc}.") from exc


@cache
def _library(build: str | None) -> str:
    """Return the file of a build of the library; without one, of the build for this processor.

    The library would ask the processor anew for each copy of each model, which takes a second, and
    load any path in place of a build that it does not have. Raise OSError for such a build.
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
            prompts.append(prompt := self._tokens(text))
            if len(prompt) >= self._context_length:
                raise ContextLengthExceeded(self._context_length, len(prompt), "prompt")
        self._continue(request, prompts, sink)

    def _continue(self, request: GenerationRequest, prompts: list[list[int]], sink: Sink) -> None:
        usage = RunUsage()
        try:
            for number, prompt in enumerate(prompts):
                with self._contexts.take(prompt) as context:
                    runs = [
                        self._choice(request, sink, usage, number * request.choices + choice)
                        for choice in range(request.choices)
                    ]
                    if request.echo:
                        runs[0].echo(context, prompt, request.prompts[number])
                    for run in runs:
                        run.run(context, prompt, self._limit(request, prompt))
        finally:
            sink.feed(usage.to_delta())  # However it ends: what was used is accounted.

    def _choice(
        self, request: GenerationRequest, sink: Sink, usage: RunUsage, index: int
    ) -> ChoiceRun:
        sampler = self._sampler(request.sampling, index)
        return ChoiceRun(request, self._vocabulary, sink, usage, index, sampler)

    def _limit(self, request: GenerationRequest, prompt: list[int]) -> int:
        room = self._context_length - len(prompt)
        return room if request.max_output_tokens is None else min(request.max_output_tokens, room)

    def _sampler(self, sampling: Sampling, index: int) -> Sampler:
        breakers = sampling.dry_sequence_breakers or _BREAKERS
        tokens = [frozenset(self._vocabulary.tokens(text)[-1:]) for text in breakers]
        seed = None if sampling.seed is None else sampling.seed + index
        return Sampler(sampling, tokens, seed)

    def _fits(
        self, request: GenerationRequest, prompt: str | tuple[int, ...], most: int, sink: Sink
    ) -> bool:
        """Return whether the prompt can be tokenized now; False once the sink is cancelled.

        Raise ContextLengthExceeded for a long text with more tokens than ``most``.
        """
        if not isinstance(prompt, str):
            return not sink.cancelled

        def count(text: str) -> int:
            return len(self._vocabulary.tokens(text))

        return is_short_enough(prompt, most, self._context_length, count, sink, request.subject)

    def _tokens(self, prompt: str | tuple[int, ...]) -> list[int]:
        if isinstance(prompt, tuple):
            return self._vocabulary.checked(prompt, "prompt")
        tokens = self._vocabulary.tokens(prompt)
        return tokens or [self._vocabulary.bos]

    def tokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn texts into tokens (see ``Engine.tokenize``)."""
        most = max(self._context_length, LEAST_TOKENS)
        for index, prompt in enumerate(request.prompts):
            if not self._fits(request, prompt, most, sink):
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
        """Drop the contexts; their memory goes with the last reference."""
        self._contexts = Contexts([])


PREFILL_BATCH = 32
"""Tokens of a prompt between two looks at cancellation."""

_ONE_BUFFER = {
    **dict.fromkeys(("dollyv2", "gptj"), 1),
    **dict.fromkeys(("gpt2", "replit"), 8),
    **dict.fromkeys(("gptbigcode", "gptneox", "mpt", "starcoder"), 0),
}
"""Architectures all models of which compute in one buffer, which the library has once in a process.
Where it must be made to grow (see ``Context._make_room``), the number says how late in the context
it is measured: 1, at its end; 8, at an eighth, because the values of all tokens are copied."""
_evaluates = threading.Lock()


class Context:
    """One copy of the model, and the tokens it has read."""

    def __init__(self, llm: Any, threads: int, architecture: str) -> None:
        self._llm, self._threads = llm, threads  # It frees the model when nobody holds it.
        is_alone = architecture in _ONE_BUFFER
        self._rewinds = architecture != "falcon"  # Its values lie where the length put them.
        self._turn: AbstractContextManager[Any] = _evaluates if is_alone else nullcontext()
        self.tokens: list[int] = []
        # Looked up once: the library makes these anew whenever they are asked for.
        self._eval = llm.ctransformers_llm_batch_eval
        self._logits_data = llm.ctransformers_llm_logits_data
        self._logits_type: Any = c_float * int(llm.ctransformers_llm_vocab_size())
        if share := _ONE_BUFFER.get(architecture):
            self._make_room(int(llm.context_length), share)

    def _make_room(self, context_length: int, share: int) -> None:
        """Have the library allot what a full context takes. Raise GenerationFailed.

        It measures what a token took the first time, and later allots that for each token of a
        batch; but what a token takes grows with those before it, and too little ends the process.
        So the first is a single one late in the context, and the next as many as there ever are.
        """
        late = min(context_length // share, context_length - 1)
        for count, before in ((1, late), (min(PREFILL_BATCH, context_length), 0)):
            self.tokens = [0] * before
            self.read([0] * count)
        self.tokens = []

    def rewind(self, tokens: Sequence[int]) -> int:
        """Keep what is read already of these tokens, all but the last; return how many."""
        kept = min(common_prefix(self.tokens, tokens), max(0, len(tokens) - 1))
        if kept < len(self.tokens) and not self._rewinds:
            kept = 0
        del self.tokens[kept:]
        return kept

    def read(self, tokens: Sequence[int]) -> None:
        """Read on. Raise GenerationFailed."""
        given = (c_int * len(tokens))(*tokens)
        with self._turn:
            done = self._eval(given, len(tokens), len(self.tokens), PREFILL_BATCH, self._threads)
        if not done:
            self.tokens.clear()
            raise GenerationFailed("ctransformers could not evaluate the tokens.")
        self.tokens += tokens

    def logits(self) -> Floats:
        """Return the scores of all tokens for the next place, as a copy."""
        data = self._logits_type.from_address(addressof(self._logits_data().contents))
        return np.frombuffer(data, np.float32).copy()


class Contexts:
    """The contexts of one model. As many are taken at once as there are slots."""

    def __init__(self, contexts: list[Context]) -> None:
        self._free = contexts
        self._changed = threading.Condition()

    @contextmanager
    def take(self, tokens: Sequence[int]) -> Iterator[Context]:
        """Lend the free context that has read most of these tokens already."""
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
    """Return how many tokens both begin with."""
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)
