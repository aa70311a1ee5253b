"""llama.cpp in this process, through ``xllamacpp``: the default engine.

Many threads call ``chat`` at once and share one continuous batch of ``slots`` sequences. The engine
is always driven in streaming form, because only the callback can stop it. The callback runs once a
token, with the GIL held, so it does little: one JSON parse, one delta.

Options (``models.yaml``): ``chat_template_kwargs``, variables of the model's chat template;
``prompt_cache_mib``, host memory for prompts that lost their slot (llama.cpp would take 8 GiB).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from worker.engines.base import EngineLoadError, GenerationFailed, InvalidRequest, ModelSpec
from worker.engines.llama_cpp.chunks import ChunkReader
from worker.engines.llama_cpp.payload import encode_chat, encode_completion
from worker.generation import GenerationRequest, Sink

_GGUF_MAGIC = b"GGUF"
_PROMPT_CACHE_MIB = 256
_PREFILL_BATCH = 512
"""Tokens of a prompt between two looks at cancellation: smaller cancels sooner and runs slower."""


def load(spec: ModelSpec) -> LlamaCppEngine:
    """Load a GGUF file. Raise EngineLoadError naming the file and the reason."""
    import xllamacpp

    if not isinstance(spec.options.get("chat_template_kwargs", {}), dict):
        raise EngineLoadError(f"Model '{spec.id}': 'chat_template_kwargs' must be a mapping.")
    cache_mib = spec.options.get("prompt_cache_mib", _PROMPT_CACHE_MIB)
    if not isinstance(cache_mib, int) or cache_mib < 0:
        raise EngineLoadError(f"Model '{spec.id}': 'prompt_cache_mib' must be a number from 0.")
    params = xllamacpp.CommonParams()
    params.model.path = _checked_path(spec)
    params.n_parallel = spec.slots
    params.n_ctx = spec.context_length * spec.slots  # llama.cpp divides the context by its slots.
    params.n_batch = max(_PREFILL_BATCH, spec.slots)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = spec.threads
    params.cache_ram_mib = cache_mib
    params.verbosity = 0
    try:
        server = xllamacpp.Server(params)
        # Warms the weights up; and a server that is dropped before its first request can hang.
        server.handle_completions(b'{"prompt": "a", "n_predict": 1}', lambda _: False)
    except RuntimeError as exc:
        raise EngineLoadError(
            f"Model '{spec.id}': llama.cpp could not load {spec.file} "
            "(unsupported architecture, damaged file, or not enough memory)."
        ) from exc
    return LlamaCppEngine(server, spec)


def _checked_path(spec: ModelSpec) -> str:
    """Return the model file's path once it looks like GGUF; llama.cpp itself gives no reason."""
    if spec.file is None:
        raise EngineLoadError(f"Model '{spec.id}': the engine llama_cpp needs a 'file'.")
    try:
        with spec.file.open("rb") as weights:
            magic = weights.read(len(_GGUF_MAGIC))
    except OSError as exc:
        raise EngineLoadError(
            f"Model '{spec.id}': cannot read {spec.file}: {exc.strerror}."
        ) from exc
    if magic != _GGUF_MAGIC:
        raise EngineLoadError(f"Model '{spec.id}': {spec.file} is not a GGUF file.")
    return str(spec.file)


class LlamaCppEngine:
    """A model loaded in llama.cpp (see ``worker.engines.base.Engine``)."""

    def __init__(self, server: Any, spec: ModelSpec) -> None:
        self._server, self._spec = server, spec

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        """Generate one answer into the sink (see ``Engine.chat``)."""
        self._drive(self._server.handle_chat_completions, encode_chat, request, sink)

    def complete(self, request: GenerationRequest, sink: Sink) -> None:
        """Continue the prompts into the sink (see ``Engine.complete``)."""
        self._drive(self._server.handle_completions, encode_completion, request, sink)

    def _drive(
        self,
        handle: Callable[[bytes, Callable[[bytes], bool]], None],
        encode: Callable[[GenerationRequest, ModelSpec], bytes],
        request: GenerationRequest,
        sink: Sink,
    ) -> None:
        reader = ChunkReader(request, sink)
        try:
            payload = encode(request, self._spec)
            handle(payload, reader.on_chunk)
        except (RuntimeError, ValueError) as exc:
            if reader.begun:
                raise GenerationFailed(f"llama.cpp: {exc}") from exc
            subject = "prompt" if request.prompts else "messages"
            param = request.constraint.param if request.constraint else subject
            raise InvalidRequest(str(exc), param) from exc
        reader.close()

    def close(self) -> None:
        """Drop the model; its memory goes with the last reference."""
        self._server = None
