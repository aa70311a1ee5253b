"""What a model is loaded from and with: its files, and the options that are llama.cpp's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inference_site.catalogue.engines.llama_cpp import PREFILL_BATCH, LlamaCppOptions
from inference_site.domain.errors import EngineLoadError
from inference_site.domain.model_spec import ModelSpec

_GGUF_MAGIC = b"GGUF"


def tune(params: Any, spec: ModelSpec, options: LlamaCppOptions) -> None:
    """Set what the entry says. Raise EngineLoadError for a draft model that cannot be read."""
    import xllamacpp

    params.n_batch = max(options.n_batch or PREFILL_BATCH, spec.slots)
    params.n_ubatch = options.n_ubatch or min(params.n_ubatch, params.n_batch)
    params.flash_attn_type = _value(
        xllamacpp.llama_flash_attn_type,
        {True: "ENABLED", False: "DISABLED", "auto": "AUTO"}[options.flash_attn],
    )
    for name in ("rope_freq_base", "rope_freq_scale", "yarn_orig_ctx", "main_gpu"):
        _set_given(params, name, getattr(options, name))
    for name, names, chosen in (
        ("cache_type_k", xllamacpp.ggml_type, options.cache_type_k),
        ("cache_type_v", xllamacpp.ggml_type, options.cache_type_v),
        ("rope_scaling_type", xllamacpp.llama_rope_scaling_type, options.rope_scaling),
        ("split_mode", xllamacpp.llama_split_mode, options.split_mode),
        ("numa", xllamacpp.ggml_numa_strategy, options.numa),
    ):
        if chosen is not None:
            setattr(params, name, _value(names, chosen.upper()))
    if options.tensor_split is not None:
        params.tensor_split = options.tensor_split + [0.0] * (
            len(params.tensor_split) - len(options.tensor_split)
        )
    if options.mlock:
        params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP_MLOCK
    if options.draft_model is not None:
        _set_draft(params, spec, options)


def checked_gguf(spec: ModelSpec, path: Path) -> str:
    """Return the path once it looks like GGUF. Raise EngineLoadError naming it and the reason.

    llama.cpp gives no reason for a file that it cannot load.
    """
    try:
        with path.open("rb") as weights:
            magic = weights.read(len(_GGUF_MAGIC))
    except OSError as exc:
        raise EngineLoadError(f"Model '{spec.id}': cannot read {path}: {exc.strerror}.") from exc
    if magic != _GGUF_MAGIC:
        raise EngineLoadError(f"Model '{spec.id}': {path} is not a GGUF file.")
    return str(path)


def _set_draft(params: Any, spec: ModelSpec, options: LlamaCppOptions) -> None:
    from xllamacpp import common_speculative_type

    assert options.draft_model is not None
    params.speculative.types = [common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    draft = params.speculative.draft
    draft.mparams.path = checked_gguf(spec, Path(options.draft_model))
    for name in ("cpuparams", "cpuparams_batch"):
        getattr(draft, name).n_threads = spec.threads
    for name, given in (
        ("n_max", options.draft_max),
        ("n_min", options.draft_min),
        ("p_min", options.draft_p_min),
        ("n_gpu_layers", options.draft_gpu_layers),
    ):
        _set_given(draft, name, given)


def _set_given(owner: Any, name: str, given: Any) -> None:
    if given is not None:
        setattr(owner, name, given)


def _value(names: Any, ending: str) -> Any:
    """Return the value of an enumeration whose name ends so: llama.cpp repeats its own in each."""
    return next(value for value in names if value.name.endswith(f"_{ending}"))
