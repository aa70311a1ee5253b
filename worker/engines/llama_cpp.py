"""llama.cpp in this process, through ``xllamacpp``: the default engine.

Many threads call ``chat`` at once and share one continuous batch of ``slots`` sequences. The engine
is always driven in streaming form, because only the callback can stop it. The callback runs once a
token, with the GIL held, so it does little: one JSON parse, one delta.

Options (``models.yaml``): ``chat_template_kwargs``, variables of the model's chat template.
"""

from __future__ import annotations

from typing import Any

import orjson

from worker.engines.base import (
    ContextLengthExceeded,
    EngineError,
    EngineLoadError,
    GenerationFailed,
    InvalidRequest,
    ModelSpec,
)
from worker.generation import (
    Finish,
    GenerationRequest,
    ReasoningDelta,
    Sink,
    TextDelta,
    Usage,
)

OPTIONS = frozenset({"chat_template_kwargs"})

_GGUF_MAGIC = b"GGUF"
_PREFILL_BATCH = 512
"""Tokens of a prompt between two looks at cancellation: smaller cancels sooner and runs slower."""


def load(spec: ModelSpec) -> LlamaCppEngine:
    """Load a GGUF file. Raise EngineLoadError naming the file and the reason."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = _checked_path(spec)
    params.n_parallel = spec.slots
    params.n_ctx = spec.context_length * spec.slots  # llama.cpp divides the context by its slots.
    params.n_batch = max(_PREFILL_BATCH, spec.slots)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = spec.threads
    params.verbosity = 0
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as exc:
        raise EngineLoadError(
            f"Model '{spec.id}': llama.cpp could not load {spec.file} "
            "(unsupported architecture, damaged file, or not enough memory)."
        ) from exc
    return LlamaCppEngine(server, dict(spec.options.get("chat_template_kwargs", {})))


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

    def __init__(self, server: Any, chat_template_kwargs: dict[str, Any]) -> None:
        self._server = server
        self._chat_template_kwargs = chat_template_kwargs

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        """Generate one answer into the sink (see ``Engine.chat``)."""
        run = _Run(sink)
        try:
            self._server.handle_chat_completions(self._payload(request), run.on_chunk)
        except (RuntimeError, ValueError) as exc:
            if run.begun:
                raise GenerationFailed(f"llama.cpp: {exc}") from exc
            raise InvalidRequest(str(exc), "messages") from exc
        run.close()

    def close(self) -> None:
        """Drop the model; its memory goes with the last reference."""
        self._server = None

    def _payload(self, request: GenerationRequest) -> bytes:
        sampling = request.sampling
        optional = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "max_tokens": request.max_output_tokens,
            "stop": list(request.stop) or None,
        }
        return orjson.dumps(
            {
                "messages": [{"role": m.role, "content": m.text} for m in request.messages],
                "stream": True,
                "timings_per_token": True,
                "return_progress": True,
                "ignore_eos": request.ignore_eos,
                "chat_template_kwargs": self._chat_template_kwargs,
                **{key: value for key, value in optional.items() if value is not None},
            }
        )


class _Run:
    """The callback side of one call: turns llama.cpp's chunks into deltas."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._timings: dict[str, Any] = {}
        self._failure: BaseException | None = None

    @property
    def begun(self) -> bool:
        """Whether llama.cpp took the request: what it raises before is about the request."""
        return bool(self._timings)

    def on_chunk(self, chunk: bytes) -> bool:
        """Feed one chunk; return True to stop. llama.cpp swallows exceptions, so they are kept."""
        if self._sink.cancelled:
            return True
        try:
            self._feed(orjson.loads(chunk))
        except BaseException as exc:  # noqa: BLE001  # Raised again by close().
            self._failure = exc
            return True
        return False

    def close(self) -> None:
        """Account for what ran, then raise what stopped it."""
        timings = self._timings
        if timings and (self._failure is None or not isinstance(self._failure, EngineError)):
            cached = timings.get("cache_n", 0)
            self._sink.feed(
                Usage(
                    input_tokens=cached + timings.get("prompt_n", 0),
                    cached_tokens=cached,
                    output_tokens=timings.get("predicted_n", 0),
                )
            )
        if self._failure is not None:
            raise self._failure

    def _feed(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            raise _engine_error(chunk["error"])
        if "timings" in chunk:
            self._timings = chunk["timings"]
        elif "prompt_progress" in chunk:
            progress = chunk["prompt_progress"]
            cached = progress["cache"]
            self._timings = {"cache_n": cached, "prompt_n": progress["processed"] - cached}
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if text := delta.get("content"):
                self._sink.feed(TextDelta(text, choice["index"]))
            if reasoning := delta.get("reasoning_content"):
                self._sink.feed(ReasoningDelta(reasoning, choice["index"]))
            if reason := choice["finish_reason"]:
                self._sink.feed(Finish("length" if reason == "length" else "stop", choice["index"]))


def _engine_error(error: dict[str, Any]) -> EngineError:
    """Map llama.cpp's error object to ours."""
    if error.get("type") == "exceed_context_size_error":
        return ContextLengthExceeded(error["n_ctx"], error["n_prompt_tokens"])
    message = str(error.get("message", "unknown error"))
    if 400 <= int(error.get("code", 500)) < 500:
        return InvalidRequest(message)
    return GenerationFailed(f"llama.cpp: {message}")
