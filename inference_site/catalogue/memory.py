"""How much memory models take, by their files and their entries, without loading them.

The estimates are of llama.cpp on a CPU with all slots full, and of its layers on GPUs. They are
compared with what it takes by ``benchmarks.memory``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from inference_site.catalogue.engines.llama_cpp import PREFILL_BATCH
from inference_site.catalogue.gguf_file import kv_bytes_per_token
from inference_site.catalogue.gguf_header import Tensor, header
from inference_site.catalogue.model_files import parts_of
from inference_site.domain.model_spec import ModelSpec

_MIB = 2**20
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
_REPACKED = frozenset({2, 10, 12, 20})
"""The types Q4_0, Q2_K, Q4_K and IQ4_NL: on CPUs llama.cpp keeps a second copy of such layers, in
the order in which it reads them. The file stays in memory, too."""
_VOCABULARY_BYTES = 256
"""What a token of the vocabulary takes, with the tables in which llama.cpp finds it."""
_PROCESS_BYTES = 64 * _MIB
"""A process around the library, without a model."""
_CONTEXT_BYTES = 512 * _MIB
"""What a GPU's driver takes for a process, and what is left free."""
_DEFAULT_CACHE_MIB = 256


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model takes, in bytes, once all slots are full and its prompt cache is in use.

    ``weights`` has all files of the model, ``cache`` keys and values of all slots, ``compute`` the
    buffers of a step and the process, ``prompts`` the prompt cache.
    """

    weights: int
    cache: int
    compute: int
    prompts: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.cache + self.compute + self.prompts

    def __str__(self) -> str:
        parts = (
            ("weights", self.weights),
            ("cache", self.cache),
            ("compute", self.compute),
            ("prompt cache", self.prompts),
        )
        return ", ".join(f"{name} {size / 2**30:,.2f} GiB" for name, size in parts if size)


@dataclass(frozen=True, slots=True)
class GpuFit:
    """How many layers fit on the GPUs, of all, and what all of them take there, in bytes.

    The output layer counts as one, as llama.cpp counts it.
    """

    layers: int
    all_layers: int
    all_bytes: int


class _Model:
    """What the header of a model's file says of its memory. Raise as ``header`` does."""

    def __init__(self, spec: ModelSpec, file: Path) -> None:
        self._spec = spec
        self._found, self.tensors = header(file)
        for part in parts_of(file)[1:]:
            self.tensors += header(part)[1]
        self._name = str(self._found.get("general.architecture", ""))

    def number(self, key: str, default: int = 0) -> int:
        """Return a number that the header has by a key of the architecture, or a default."""
        value = self._found.get(f"{self._name}.{key}")
        return value if isinstance(value, int) and value > 0 else default

    @property
    def vocabulary(self) -> int:
        """How many tokens there are; 0 if no tensor tells."""
        shapes = (t.shape for t in self.tensors if t.name == "token_embd.weight")
        return next((shape[1] for shape in shapes if len(shape) == 2), 0)

    @property
    def batch(self) -> int:
        """Tokens of one step, at most."""
        spec = self._spec
        if "embedding" in spec.options:
            return max(spec.context_length, spec.slots)
        batch = max(spec.options.get("n_batch") or PREFILL_BATCH, spec.slots)
        return int(spec.options.get("n_ubatch") or min(PREFILL_BATCH, batch))

    @property
    def cache_bytes(self) -> int:
        spec = self._spec
        return cache_bytes(
            kv_bytes_per_token(self.number), spec.slots, spec.context_length, spec.options
        )

    @property
    def step_bytes(self) -> int:
        """Return the buffers of a step: a mask over the context, the activations of a layer."""
        context = self._spec.slots * self._spec.context_length
        width = self.number("embedding_length")
        row = context + 2 * self.number("feed_forward_length", 4 * width) + 6 * width
        return 4 * self.batch * row

    @property
    def repacked_bytes(self) -> int:
        """Return what llama.cpp copies of the layers, if they stay on the CPU."""
        if self._spec.gpu_layers > 0:
            return 0
        return sum(t.size_bytes for t in self.tensors if t.kind in _REPACKED and _layer(t) >= 0)


def needs_of(spec: ModelSpec, file: Path) -> Needs:
    """Return about what a model takes on a host whose CPU runs it, with what is loaded beside it.

    The cache of a draft model is not in it. Raise as ``gguf_header.header`` does.
    """
    model = _Model(spec, file)
    files = sum(path.stat().st_size for path in parts_of(file)) + beside_bytes(spec)
    has_prompts = not spec.lora_adapters and "embedding" not in spec.options
    prompts = spec.options.get("prompt_cache_mib", _DEFAULT_CACHE_MIB) if has_prompts else 0
    return Needs(
        weights=files + model.repacked_bytes,
        cache=model.cache_bytes,
        compute=model.step_bytes + model.vocabulary * _VOCABULARY_BYTES + _PROCESS_BYTES,
        prompts=prompts * _MIB,
    )


def cache_bytes(
    kv_bytes_per_token: int, slots: int, context_length: int, options: dict[str, Any]
) -> int:
    """Return how much memory the keys and values of all slots take; ``options`` say their types.

    ``kv_bytes_per_token`` is what one token takes at 16 bits a value.
    """
    types = [options.get(name, "f16") for name in ("cache_type_k", "cache_type_v")]
    share = sum(_BITS[name] for name in types) / (2 * _BITS["f16"])
    return round(slots * context_length * kv_bytes_per_token * share)


def beside_bytes(spec: ModelSpec) -> int:
    """Return the size of the files that are loaded beside a model's own. Raise OSError."""
    beside = [*spec.lora_adapters.values()]
    beside += [Path(spec.options[name]) for name in _SIDE_FILES if name in spec.options]
    return sum(path.stat().st_size for path in beside)


def layers_that_fit(spec: ModelSpec, file: Path, free_bytes: int, gpus: int = 1) -> GpuFit:
    """Return how many layers of a model fit into the free memory of all GPUs together.

    llama.cpp puts the output layer there first, then the others from the last on, each with its
    part of the cache. What a step takes, and the driver, is taken from what is free. Raise as
    ``gguf_header.header`` does.
    """
    model = _Model(spec, file)
    count = model.number("block_count") or 1 + max(map(_layer, model.tensors), default=0)
    weights = [0] * count
    for tensor in model.tensors:
        if 0 <= _layer(tensor) < count:
            weights[_layer(tensor)] += tensor.size_bytes
    cache = model.cache_bytes // count
    logits = 4 * model.batch * model.vocabulary
    fixed = model.step_bytes + logits + gpus * _CONTEXT_BYTES + beside_bytes(spec)
    sizes = [_output_bytes(model.tensors), *(size + cache for size in reversed(weights))]
    needed = [fixed + taken for taken in accumulate(sizes)]
    return GpuFit(sum(taken <= free_bytes for taken in needed), len(sizes), needed[-1])


def _layer(tensor: Tensor) -> int:
    """Return the number of the layer that a tensor belongs to; -1 for those of none."""
    first, _, rest = tensor.name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if first == "blk" and number.isdecimal() else -1


def _output_bytes(tensors: list[Tensor]) -> int:
    sizes = {tensor.name: tensor.size_bytes for tensor in tensors}
    own = sum(size for name, size in sizes.items() if name.startswith("output"))
    # Without one of its own, the output is the table of the input once more.
    return own if "output.weight" in sizes else own + sizes.get("token_embd.weight", 0)
