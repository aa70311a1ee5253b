"""How much memory models take, by their files and their entries, without loading them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inference_site.catalogue.gguf_file import GgufInfo, read_gguf
from inference_site.catalogue.model_files import parts_of
from inference_site.domain.model_spec import ModelSpec

_BITS = {
    "f32": 32,
    "f16": 16,
    "bf16": 16,
    "q8_0": 8.5,
    "q5_1": 6,
    "q5_0": 5.5,
    "q4_1": 5,
    "q4_0": 4.5,
    "iq4_nl": 4.5,
}
"""What a cached value takes; quantised ones share a scale in blocks of 32."""
_SIDE_FILES = ("mmproj", "draft_model")


def needed_bytes(
    info: GgufInfo, slots: int, context_length: int, options: dict[str, Any] | None = None
) -> int:
    """Return about how much memory a model takes: weights, and keys and values of all slots."""
    types = [(options or {}).get(name, "f16") for name in ("cache_type_k", "cache_type_v")]
    share = sum(_BITS[name] for name in types) / (2 * _BITS["f16"])
    return info.size_bytes + round(slots * context_length * info.kv_bytes_per_token * share)


def entry_bytes(spec: ModelSpec, file: Path) -> int:
    """Return about how much memory a model of the catalogue takes, with what is loaded beside it.

    The cache of a draft model is not in it. Raise as ``read_gguf`` does.
    """
    beside = [*spec.lora_adapters.values(), *parts_of(file)[1:]]
    beside += [Path(spec.options[name]) for name in _SIDE_FILES if name in spec.options]
    own = needed_bytes(read_gguf(file), spec.slots, spec.context_length, spec.options)
    return own + sum(path.stat().st_size for path in beside)
