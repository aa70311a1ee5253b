"""The command of a model's llama.cpp server, and the checks of its files before the start."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from inference_site.catalogue.engines.llama_cpp import PREFILL_BATCH, LlamaCppOptions
from inference_site.catalogue.gguf_files import is_gguf
from inference_site.core.domain.errors import EngineLoadError
from inference_site.core.domain.model_spec import ModelSpec
from worker.engines.chat.configuration import check_prompt_templates, named_template
from worker.engines.openai_upstream.server import Endpoint
from worker.engines.own_server import HOST, server_settings
from worker.model_servers import llama_server
from worker.model_servers.process import Order

_SPINS = "500"
"""Spins of an OpenMP thread at a barrier before it sleeps: about 20 µs, twice the time to wake it.
The default is some milliseconds; when another process uses a core, the model's threads would keep
each other from running. See docs/performance.md."""
_SPARE_THREADS = 4
"""HTTP threads of the server beside one for each slot: for health checks and tokenization."""
_PROGRAM = Path(str(llama_server.__file__))


def checked(spec: ModelSpec) -> list[str]:
    """Check the model's files and return the command of the server.

    Raise EngineLoadError naming the file and the reason, which llama.cpp does not give, and
    ImportError where the library is not installed.
    """
    options = LlamaCppOptions.of(spec)
    if build := options.llama_server or server_settings.llama_server:
        program = shlex.split(build)
    elif find_spec("xllamacpp") is None:
        raise ImportError("No module named 'xllamacpp'")
    else:
        program = [sys.executable, "-I", str(_PROGRAM)]
    if spec.file is None:
        raise EngineLoadError(f"Model '{spec.id}': the engine llama_cpp needs a 'file'.")
    _check_gguf(spec, spec.file)
    for path in (options.mmproj, options.draft_model, *spec.lora_adapters.values()):
        if path is not None:
            _check_gguf(spec, Path(path))
    check_prompt_templates(spec, options)
    return [*program, *_arguments(spec, options)]


def order(spec: ModelSpec, arguments: list[str], at: Endpoint) -> Order:
    """Return the order to start the server at this endpoint; its requests need the key."""
    return Order(
        name=server_settings.file_of(spec.id, "").name,
        command=[*arguments, "--host", HOST, "--port", str(at.port)],
        env={"LLAMA_API_KEY": at.key, "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", _SPINS)},
    )


def _check_gguf(spec: ModelSpec, path: Path) -> None:
    try:
        is_model = is_gguf(path)
    except OSError as exc:
        raise EngineLoadError(f"Model '{spec.id}': cannot read {path}: {exc.strerror}.") from exc
    if not is_model:
        raise EngineLoadError(f"Model '{spec.id}': {path} is not a GGUF file.")


def _arguments(spec: ModelSpec, options: LlamaCppOptions) -> Iterator[str]:
    """Yield the arguments of ``llama-server``."""
    batch, ubatch = max(options.n_batch or PREFILL_BATCH, spec.slots), options.n_ubatch
    if options.embedding is not None:  # An input must fit into one batch.
        batch = ubatch = max(spec.context_length, spec.slots)
    named = {
        "model": spec.file,
        "alias": spec.id,
        "mmproj": options.mmproj,
        "gpu-layers": spec.gpu_layers,
        "parallel": spec.slots,
        "ctx-size": spec.context_length * spec.slots,  # llama.cpp divides it by the slots.
        "threads": spec.threads,
        "threads-http": spec.slots + _SPARE_THREADS,
        "batch-size": batch,
        "ubatch-size": ubatch,
        "flash-attn": {True: "on", False: "off", "auto": "auto"}[options.flash_attn],
        "cache-type-k": options.cache_type_k,
        "cache-type-v": options.cache_type_v,
        "rope-scaling": options.rope_scaling,
        "rope-freq-base": options.rope_freq_base,
        "rope-freq-scale": options.rope_freq_scale,
        "yarn-orig-ctx": options.yarn_orig_ctx,
        "split-mode": options.split_mode,
        "main-gpu": options.main_gpu,
        "tensor-split": options.tensor_split and ",".join(map(str, options.tensor_split)),
        "numa": options.numa,
        "model-draft": options.draft_model,
        "draft-max": options.draft_max,
        "draft-min": options.draft_min,
        "draft-p-min": options.draft_p_min,
        "gpu-layers-draft": options.draft_gpu_layers,
        # A request without adapters would reuse a prompt that was read with them.
        "cache-ram": 0 if spec.lora_adapters else options.prompt_cache_mib,
        "pooling": options.embedding,
        "chat-template-file": _template_file(spec, options),
    }
    for name, value in named.items():
        if value is not None:
            yield from (f"--{name}", str(value))
    for path in spec.lora_adapters.values():
        yield from ("--lora", str(path))
    switches = {
        "metrics": True,
        "no-webui": True,
        "no-slots": True,
        "no-prefill-assistant": True,  # A last message of the assistant is an ordinary turn.
        "jinja": True,
        "mlock": options.mlock,
        "embedding": options.embedding is not None,
        "lora-init-without-apply": bool(spec.lora_adapters),  # Each request selects its adapters.
    }
    yield from (f"--{name}" for name, is_on in switches.items() if is_on)


def _template_file(spec: ModelSpec, options: LlamaCppOptions) -> Path | None:
    """Write the template that the entry names into a file for the server; return its path."""
    template = named_template(spec, options)
    if template is None:
        return None
    server_settings.files.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = server_settings.file_of(spec.id, ".jinja")
    path.write_text(template, encoding="utf-8")
    return path
