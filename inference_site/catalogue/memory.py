"""The memory that models take, estimated from their files and entries, and the sizes that fit.

The estimates are for llama.cpp on a CPU with all slots full, and for its layers on GPUs.
``benchmarks.memory`` compares them with measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from inference_site.catalogue.engines.llama_cpp import (
    PREFILL_BATCH,
    PREFILL_UBATCH,
    PROMPT_CACHE_MIB,
)
from inference_site.catalogue.gguf_files import (
    Tensor,
    header,
    metadata_before_vocabulary,
    parts_of,
)
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.host import memory_bytes

_MIB = 2**20
_CACHE_TYPE_BITS = {
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
"""Bits of a value in the KV cache; quantised types share a scale in blocks of 32."""
_REPACKED_TYPES = frozenset({2, 10, 12, 20})
"""Q4_0, Q2_K, Q4_K and IQ4_NL: on CPUs llama.cpp repacks such layers into a second copy, and the
file stays in memory, too."""
_VOCABULARY_TOKEN_BYTES = 256
"""A token of the vocabulary with llama.cpp's lookup tables."""
_PROCESS_BYTES = 64 * _MIB
"""An engine process without a model."""
_GPU_RESERVE_BYTES = 512 * _MIB
"""The driver's memory for a process on one GPU, and a margin."""
_DEFAULT_SLOTS, _MAX_DEFAULT_CONTEXT = 4, 8192
"""Sizes of a model whose entry gives none; the context is that of one slot, in tokens."""
_KV_CACHE_SHARE = 4
"""By default the KV cache may take a quarter of the memory beside the file, because other models
and the platform need the rest."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The memory of a model, in bytes, with all slots and the prompt cache full.

    ``weights`` is for all files of the model, ``cache`` the KV cache of all slots, ``compute`` the
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
    """How many of a model's layers fit on the GPUs, and the bytes that all of them would take.

    The output layer counts as a layer, as in llama.cpp.
    """

    layers: int
    all_layers: int
    all_bytes: int


class ModelMemory:
    """An estimate from the header of the model's file: ``metadata`` and ``tensors``.

    Raise as ``gguf_files.header`` does.
    """

    def __init__(self, spec: ModelSpec, file: Path) -> None:
        self._spec, self._file = spec, file
        self.metadata, self.tensors = header(file)
        for part in parts_of(file)[1:]:
            self.tensors += header(part)[1]
        self.number = _number_reader(self.metadata)

    @property
    def needs(self) -> MemoryNeeds:
        """The estimate on a host that runs the model on its CPU, including side files.

        The KV cache of a draft model is not included. Raise OSError.
        """
        spec = self._spec
        files = (*parts_of(self._file), *side_files_of(spec))
        has_prompts = not spec.lora_adapters and "embedding" not in spec.options
        prompts = spec.options.get("prompt_cache_mib", PROMPT_CACHE_MIB) if has_prompts else 0
        return MemoryNeeds(
            weights=sum(path.stat().st_size for path in files) + self.repacked_bytes,
            cache=self.cache_bytes,
            compute=self.step_bytes + self.vocabulary * _VOCABULARY_TOKEN_BYTES + _PROCESS_BYTES,
            prompts=prompts * _MIB,
        )

    @property
    def holds_all_prompts(self) -> bool:
        """Whether the prompt cache holds the prompts of all slots at once. Raise OSError."""
        needs = self.needs
        return needs.cache <= needs.prompts

    @property
    def vocabulary(self) -> int:
        """The tokens of the vocabulary; 0 if unknown."""
        shapes = (t.shape for t in self.tensors if t.name == "token_embd.weight")
        return next((shape[1] for shape in shapes if len(shape) == 2), 0)

    @property
    def batch(self) -> int:
        """The most tokens of one step."""
        spec = self._spec
        if "embedding" in spec.options:
            return max(spec.context_length, spec.slots)
        batch = max(spec.options.get("n_batch") or PREFILL_BATCH, spec.slots)
        return int(spec.options.get("n_ubatch") or min(PREFILL_UBATCH, batch))

    @property
    def cache_bytes(self) -> int:
        """The KV cache of all slots."""
        tokens = self._spec.slots * self._spec.context_length
        return round(tokens * _kv_bytes(self.number, self._spec.options))

    @property
    def step_bytes(self) -> int:
        """The buffers of a step: a mask over the context, the activations of a layer."""
        context = self._spec.slots * self._spec.context_length
        width = self.number("embedding_length")
        row = context + 2 * self.number("feed_forward_length", 4 * width) + 6 * width
        return 4 * self.batch * row

    @property
    def repacked_bytes(self) -> int:
        """The second copies of layers that llama.cpp makes if they stay on the CPU."""
        if self._spec.gpu_layers > 0:
            return 0
        return sum(
            tensor.size_bytes
            for tensor in self.tensors
            if tensor.kind in _REPACKED_TYPES and _layer_of(tensor) >= 0
        )


def fitting_sizes(
    file: Path, slots: int | None, context_length: int | None, options: Mapping[str, Any]
) -> tuple[int, int]:
    """Return the slots and the context of each, in tokens; the defaults are for this host's memory.

    A given value is kept. The default is four slots and the context that the model was trained
    with, at most 8,192 tokens. If the KV cache would take too much memory, first halve the context
    down to 2,048 tokens, then the slots, then the context again. On a host without the file, return
    the maximum.
    """
    try:
        found = metadata_before_vocabulary(file)
        size = sum(part.stat().st_size for part in parts_of(file))
    except (OSError, ValueError):
        return slots or _DEFAULT_SLOTS, context_length or _MAX_DEFAULT_CONTEXT
    number = _number_reader(found)
    trained = min(number("context_length") or _MAX_DEFAULT_CONTEXT, _MAX_DEFAULT_CONTEXT)
    halves = [trained, *(n for n in (4096, 2048, 1024, 512) if n < trained)]
    contexts = [context_length] if context_length else halves
    counts = [slots] if slots else [_DEFAULT_SLOTS, _DEFAULT_SLOTS // 2, 1]
    long_contexts = [context for context in contexts if context >= 2048] or contexts[:1]
    sizes = [*product(counts, long_contexts), *((counts[-1], context) for context in contexts)]
    available = (memory_bytes()[0] - size) // _KV_CACHE_SHARE
    token_bytes = _kv_bytes(number, options)
    return next((s for s in sizes if s[0] * s[1] * token_bytes <= available), sizes[-1])


def _number_reader(metadata: Mapping[str, Any]) -> Callable[..., int]:
    """Return a function that reads a positive number of the architecture, or returns a default."""
    architecture = metadata.get("general.architecture", "")

    def number(key: str, default: int = 0) -> int:
        value = metadata.get(f"{architecture}.{key}")
        return value if isinstance(value, int) and value > 0 else default

    return number


def _kv_bytes(number: Callable[..., int], options: Mapping[str, Any]) -> float:
    """Return the KV cache of one token in all layers; the options have the types of its values."""
    heads = number("attention.head_count", 1)
    width = number("embedding_length") // heads
    kv_heads = number("attention.head_count_kv", heads)
    values = kv_heads * number("attention.value_length", width)
    keys = kv_heads * number("attention.key_length", width)
    bits_k, bits_v = (_CACHE_TYPE_BITS[options.get(f"cache_type_{of}", "f16")] for of in "kv")
    return number("block_count") * (keys * bits_k + values * bits_v) / 8


def side_files_of(spec: ModelSpec) -> list[Path]:
    """Return the files that are loaded beside a model's own."""
    named = (spec.options.get(name) for name in ("mmproj", "draft_model"))
    return [*spec.lora_adapters.values(), *(Path(file) for file in named if file is not None)]


def layers_that_fit(spec: ModelSpec, file: Path, free_bytes: int, gpus: int = 1) -> GpuFit:
    """Return how many layers of a model fit into the free memory of all GPUs together.

    llama.cpp offloads the output layer first, then the others from the last to the first, each with
    its part of the KV cache. The buffers of a step and a reserve for the driver are subtracted from
    the free memory. Raise as ``gguf_files.header`` does.
    """
    model = ModelMemory(spec, file)
    count = model.number("block_count") or 1 + max(map(_layer_of, model.tensors), default=0)
    weights = [0] * count
    for tensor in model.tensors:
        if 0 <= _layer_of(tensor) < count:
            weights[_layer_of(tensor)] += tensor.size_bytes
    by_name = {tensor.name: tensor.size_bytes for tensor in model.tensors}
    output = sum(size for name, size in by_name.items() if name.startswith("output"))
    if "output.weight" not in by_name:  # The output layer shares the weights of the input table.
        output += by_name.get("token_embd.weight", 0)
    cache = model.cache_bytes // count
    logits = 4 * model.batch * model.vocabulary
    side_files = sum(path.stat().st_size for path in side_files_of(spec))
    fixed = model.step_bytes + logits + gpus * _GPU_RESERVE_BYTES + side_files
    layers = [output, *(size + cache for size in reversed(weights))]
    needed = [fixed + size for size in accumulate(layers)]
    return GpuFit(sum(size <= free_bytes for size in needed), len(layers), needed[-1])


def _layer_of(tensor: Tensor) -> int:
    """Return the number of a tensor's layer; -1 if the tensor belongs to no layer."""
    first, _, rest = tensor.name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if first == "blk" and number.isdecimal() else -1
