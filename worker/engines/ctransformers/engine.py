"""Models in ctransformers: GGML files of 2023, which no other library loads, and early GGUF."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from inference_site.catalogue.engines.ctransformers import (
    CtransformersOptions,
    normalized_model_type,
)
from inference_site.catalogue.gguf_files import is_gguf
from inference_site.core.domain.deltas import Finish, TextDelta, TokensDelta
from inference_site.core.domain.errors import ContextLengthExceeded, EngineLoadError, InvalidRequest
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest, Sampling
from worker.engines.base import Engine, Sink
from worker.engines.ctransformers.contexts import Context, Contexts
from worker.engines.ctransformers.files import (
    GgmlFile,
    adds_space,
    check_gguf,
    own_texts,
    read_ggml,
)
from worker.engines.ctransformers.run import ChoiceRun, RunUsage
from worker.engines.ctransformers.sampler import Sampler
from worker.engines.ctransformers.vocabulary import Vocabulary, own_tokenizer
from worker.engines.prompt_length import TOKENIZE_LIMIT, is_short_enough

_BREAKERS = ("\n", ":", '"', "*")
"""Default texts that end a repetition for the DRY penalty."""


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
            prompts.append(prompt := self._tokens(text))
            if len(prompt) >= self._context_length:
                raise ContextLengthExceeded(self._context_length, len(prompt), "prompt")
        usage = RunUsage()
        try:
            for number, prompt in enumerate(prompts):
                limit = self._context_length - len(prompt)
                if request.max_output_tokens is not None:
                    limit = min(limit, request.max_output_tokens)
                with self._contexts.take(prompt) as context:
                    runs = []
                    for index in range(number * request.choices, (number + 1) * request.choices):
                        sampler = self._sampler(request.sampling, index)
                        run = ChoiceRun(request, self._vocabulary, sink, usage, index, sampler)
                        runs.append(run)
                    if request.echo:
                        runs[0].echo(context, prompt, request.prompts[number])
                    for run in runs:
                        run.run(context, prompt, limit)
        finally:
            sink.feed(usage.to_delta())  # Also after an error: the tokens are accounted.

    def _sampler(self, sampling: Sampling, index: int) -> Sampler:
        breakers = sampling.dry_sequence_breakers or _BREAKERS
        tokens = [frozenset(self._vocabulary.tokens(text)[-1:]) for text in breakers]
        seed = None if sampling.seed is None else sampling.seed + index
        return Sampler(sampling, tokens, seed)

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

    def _tokens(self, prompt: str | tuple[int, ...]) -> list[int]:
        if isinstance(prompt, tuple):
            return self._vocabulary.checked(prompt, "prompt")
        tokens = self._vocabulary.tokens(prompt)
        return tokens or [self._vocabulary.bos]

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
