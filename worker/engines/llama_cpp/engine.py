"""llama.cpp in this process, through ``xllamacpp``: the default engine.

Many threads call ``chat`` at once and share one continuous batch of ``slots`` sequences. The engine
is always driven in streaming form, because only the callback can stop it. The callback runs once a
token, with the GIL held, so it does little: one JSON parse, one delta.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import orjson

from inference_site.catalogue.engines.llama_cpp import LlamaCppOptions
from inference_site.domain.errors import EngineLoadError, GenerationFailed, InvalidRequest
from inference_site.domain.model_spec import ModelSpec
from inference_site.domain.request import GenerationRequest
from worker.engines.base import Engine, Sink
from worker.engines.batch_scheduling import batch_scheduled
from worker.engines.chat.configuration import check_prompt_templates, named_template
from worker.engines.chat.template import stop_texts_of
from worker.engines.grammars import prepare_trials
from worker.engines.llama_cpp.chunks import ChunkReader
from worker.engines.llama_cpp.grammar_meter import measured
from worker.engines.llama_cpp.loopback import Loopback
from worker.engines.llama_cpp.own_chat import needs_own_chat, own_chat, reads_its_own_way
from worker.engines.llama_cpp.payload import encode_chat, encode_completion
from worker.engines.llama_cpp.prompt_echo import Fresh, PromptEcho
from worker.engines.llama_cpp.template_trial import TemplateTrial
from worker.engines.llama_cpp.tokens import (
    detokenize,
    embed,
    fits,
    render,
    tokenize,
    with_short_prompts,
)
from worker.engines.llama_cpp.tuning import checked_gguf, tune
from worker.engines.step_clock import StepClock

_SPINS = "500"
"""How often a thread looks for the others at a barrier before it sleeps: for about 20 µs, twice
what it takes to wake it. By itself it would look for some milliseconds, and when another process
has a core, the model's threads would keep each other from running. See docs/performance.md."""
_THOUGHTS = ("think", "reasoning", "channel")
"""What chat templates of models that reason have in them."""


def load(spec: ModelSpec) -> LlamaCppEngine:
    """Load a GGUF file. Raise EngineLoadError naming the file and the reason."""
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    import xllamacpp  # Its OpenMP reads the environment when it is imported first.

    prepare_trials()
    options = LlamaCppOptions.of(spec)
    check_prompt_templates(spec, options)
    params = _params(spec, options)
    trial = TemplateTrial(spec, options)
    try:
        server = xllamacpp.Server(params)
        # Warms the weights up; and a server that is dropped before its first request can hang.
        server.handle_completions(b'{"prompt": "a", "n_predict": 1}', lambda _: False)
    except RuntimeError as exc:
        projector = f" with {options.mmproj}" if options.mmproj else ""
        projector += f" and {options.draft_model}" if options.draft_model else ""
        template = ", or a chat template that is not valid" if options.chat_template else ""
        raise EngineLoadError(
            f"Model '{spec.id}': llama.cpp could not load {spec.file}{projector} "
            f"(unsupported architecture, damaged file, or not enough memory{template})."
        ) from exc
    loopback = Loopback(server.listening_address, params.api_keys[0])
    return LlamaCppEngine(server, spec, loopback, trial)


def _params(spec: ModelSpec, options: LlamaCppOptions) -> Any:
    """Return llama.cpp's parameters. Raise EngineLoadError for a file that is missing or none."""
    from xllamacpp import CommonParams

    params = CommonParams()
    params.model.path = _checked_path(spec)
    if options.mmproj is not None:
        params.mmproj.path = checked_gguf(spec, Path(options.mmproj))
    params.n_gpu_layers = spec.gpu_layers
    params.n_parallel = spec.slots
    params.n_ctx = spec.context_length * spec.slots  # llama.cpp divides the context by its slots.
    tune(params, spec, options)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = spec.threads
    # llama.cpp would give a prompt that was read with adapters to a request without them.
    params.cache_ram_mib = 0 if spec.lora_adapters else options.prompt_cache_mib
    params.verbosity = 0
    if template := named_template(spec, options):
        params.chat_template = template
    params.prefill_assistant = False  # A last message of the assistant is a turn like any other.
    params.ui = params.endpoint_slots = False
    params.api_keys = [secrets.token_urlsafe(32)]
    _set_adapters(params, spec)
    _set_pooling(params, spec, options.embedding)
    return params


def _set_adapters(params: Any, spec: ModelSpec) -> None:
    """Load the adapters; requests say which are applied."""
    from xllamacpp import CommonAdapterLoraInfo

    paths = [checked_gguf(spec, path) for path in spec.lora_adapters.values()]
    params.lora_adapters = [CommonAdapterLoraInfo(path, 0.0) for path in paths]


def _set_pooling(params: Any, spec: ModelSpec, pooling: str | None) -> None:
    """Prepare for embeddings, whose inputs must fit into one batch."""
    from xllamacpp import llama_pooling_type

    if pooling is None:
        return
    params.embedding = True
    params.pooling_type = getattr(llama_pooling_type, f"LLAMA_POOLING_TYPE_{pooling.upper()}")
    params.n_batch = params.n_ubatch = max(spec.context_length, spec.slots)


def _checked_path(spec: ModelSpec) -> str:
    """Return the model file's path once it looks like GGUF."""
    if spec.file is None:
        raise EngineLoadError(f"Model '{spec.id}': the engine llama_cpp needs a 'file'.")
    return checked_gguf(spec, spec.file)


class LlamaCppEngine(Engine):
    """A model loaded in llama.cpp (see ``worker.engines.base.Engine``)."""

    def __init__(
        self, server: Any, spec: ModelSpec, loopback: Loopback, trial: TemplateTrial
    ) -> None:
        self._server, self._spec, self._loopback, self._trial = server, spec, loopback, trial
        self._clock = StepClock()
        self._echo = PromptEcho(spec, loopback, self._whole)
        template = str(loopback.get("/props").get("chat_template", ""))
        self._may_think = any(mark in template for mark in _THOUGHTS)
        self._stop_texts = stop_texts_of(template)
        self._own_chat = cache(partial(own_chat, spec, loopback, self._complete))

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        """Generate one answer into the sink (see ``Engine.chat``)."""
        if needs_own_chat(request, self._spec):
            self._own_chat(request.prompt_template).chat(request, sink)
            return
        if sink.cancelled:
            return
        prompt = self._trial.check(request)
        with self._clock.watched(sink) as watched:
            if not fits(self._loopback, self._spec, request, prompt, watched):
                return
        encode = partial(encode_chat, may_think=self._may_think, stop_texts=self._stop_texts)
        self._drive(self._server.handle_chat_completions, encode, request, sink)

    def complete(self, request: GenerationRequest, sink: Sink) -> None:
        """Continue the prompts into the sink (see ``Engine.complete``)."""
        if not request.echo:
            self._complete(request, sink)
            return
        prompts = self._echo.feed(request, sink)
        if sink.cancelled:
            return
        if request.max_output_tokens == 0:
            self._echo.end(request, prompts, sink)
            return
        is_fresh = request.scores_prompts
        self._complete(replace(request, prompts=prompts), Fresh(sink) if is_fresh else sink)

    def _whole(self, payload: bytes) -> dict[str, Any]:
        """Return the answer of a completion that does not stream; nothing can stop it."""
        answers: list[bytes] = []

        def keep(chunk: bytes) -> bool:
            answers.append(chunk)
            return False

        try:
            with self._clock.running():
                self._server.handle_completions(payload, self._clock.counted(keep))
        except (RuntimeError, ValueError) as exc:
            raise InvalidRequest(str(exc), "prompt") from exc
        answer: dict[str, Any] = orjson.loads(answers[-1])
        return answer

    def _complete(
        self, request: GenerationRequest, sink: Sink, shown: tuple[str, ...] = ()
    ) -> None:
        with self._clock.watched(sink) as watched:
            ready = with_short_prompts(self._loopback, self._spec, request, watched)
        if ready is None:
            return
        encode = partial(encode_completion, shown=shown)
        self._drive(self._server.handle_completions, encode, ready, sink, is_plain=not shown)

    def _drive(
        self,
        handle: Callable[[bytes, Callable[[bytes], bool]], None],
        encode: Callable[[GenerationRequest, ModelSpec], bytes],
        request: GenerationRequest,
        sink: Sink,
        *,
        is_plain: bool = True,
    ) -> None:
        """Generate; without ``is_plain``, the text also shows tokens that no constraint has."""
        constraint = request.constraint or request.forced_grammar
        reader = ChunkReader(request, measured(constraint, sink, is_plain=is_plain))
        try:
            payload = encode(request, self._spec)
            with self._clock.running(), batch_scheduled():
                handle(payload, self._clock.counted(reader.on_chunk))
        except (RuntimeError, ValueError) as exc:
            if reader.begun:
                raise GenerationFailed(f"llama.cpp: {exc}") from exc
            raise InvalidRequest(str(exc), _blamed(request, str(exc))) from exc
        reader.close()

    def embed(self, request: GenerationRequest, sink: Sink) -> None:
        """Embed the prompts (see ``Engine.embed``)."""
        with self._clock.watched(sink) as watched:
            embed(self._server, self._loopback, self._spec, request, watched)

    def tokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn texts into tokens (see ``Engine.tokenize``)."""
        with self._clock.watched(sink) as watched:
            tokenize(self._loopback, self._spec, request, watched)

    def detokenize(self, request: GenerationRequest, sink: Sink) -> None:
        """Turn tokens into texts (see ``Engine.detokenize``)."""
        with self._clock.watched(sink) as watched:
            detokenize(self._loopback, request, watched)

    def render(self, request: GenerationRequest, sink: Sink) -> None:
        """Apply the chat template (see ``Engine.render``)."""
        if request.prompt_template or reads_its_own_way(self._spec):
            self._own_chat(request.prompt_template).render(request, sink)
            return
        if sink.cancelled:
            return
        self._trial.check(request)
        with self._clock.watched(sink) as watched:
            render(self._loopback, self._spec, request, watched)

    @property
    def steps(self) -> int | None:
        """Count what llama.cpp's loop has sent (see ``Engine.steps``)."""
        return self._clock.steps

    def close(self) -> None:
        """Drop the model; its memory goes with the last reference."""
        self._loopback.close()
        self._server = None


def _blamed(request: GenerationRequest, problem: str) -> str:
    """Return the field of the request that llama.cpp could not read."""
    if request.tools and "JSON schema" in problem:
        return "tools"
    return request.constraint.param if request.constraint else request.subject
