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
    cache = cache_bytes(info.kv_bytes_per_token, slots, context_length, options or {})
    return info.size_bytes + cache


def cache_bytes(
    kv_bytes_per_token: int, slots: int, context_length: int, options: dict[str, Any]
) -> int:
    """Return how much memory the keys and values of all slots take; ``options`` say their types.

    ``kv_bytes_per_token`` is what one token takes at 16 bits a value.
    """
    types = [options.get(name, "f16") for name in ("cache_type_k", "cache_type_v")]
    share = sum(_BITS[name] for name in types) / (2 * _BITS["f16"])
    return round(slots * context_length * kv_bytes_per_token * share)


def entry_bytes(spec: ModelSpec, file: Path) -> int:
    """Return about how much memory a model of the catalogue takes, with what is loaded beside it.

    The cache of a draft model is not in it. Raise as ``read_gguf`` does.
    """
    own = needed_bytes(read_gguf(file), spec.slots, spec.context_length, spec.options)
    more = sum(path.stat().st_size for path in parts_of(file)[1:])
    return own + more + beside_bytes(spec)


def beside_bytes(spec: ModelSpec) -> int:
    """Return the size of the files that are loaded beside a model's own. Raise OSError."""
    beside = [*spec.lora_adapters.values()]
    beside += [Path(spec.options[name]) for name in _SIDE_FILES if name in spec.options]
    return sum(path.stat().st_size for path in beside)
