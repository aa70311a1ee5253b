"""How much memory models take, by their files and their entries, and which sizes fit the host.

No model is loaded for it. The estimates are of llama.cpp on a CPU with all slots full, and of its
layers on GPUs. They are compared with what it takes by ``benchmarks.memory``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from inference_site.catalogue.engines.llama_cpp import PREFILL_BATCH
from inference_site.catalogue.gguf_files import Tensor, beginning, header, parts_of
from inference_site.domain.model_spec import ModelSpec
from inference_site.host import memory_bytes

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
_SLOTS, _LONGEST_CONTEXT = 4, 8192
"""The sizes of a model whose entry says none: tokens of context are those of each slot."""
_CACHE_SHARE = 4
"""Keys and values may take a quarter of the memory beside the file, unless an entry says more:
other models and the platform need the rest."""


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


class ModelMemory:
    """What a model takes, by the header of its file: ``metadata`` and ``tensors``.

    Raise as ``gguf_header.header`` does.
    """

    def __init__(self, spec: ModelSpec, file: Path) -> None:
        self._spec, self._file = spec, file
        self.metadata, self.tensors = header(file)
        for part in parts_of(file)[1:]:
            self.tensors += header(part)[1]
        self.number = _numbers(self.metadata)

    @property
    def needs(self) -> Needs:
        """About what it takes on a host whose CPU runs it, with what is loaded beside it.

        The cache of a draft model is not in it. Raise OSError.
        """
        spec = self._spec
        files = sum(path.stat().st_size for path in parts_of(self._file)) + beside_bytes(spec)
        has_prompts = not spec.lora_adapters and "embedding" not in spec.options
        prompts = spec.options.get("prompt_cache_mib", _DEFAULT_CACHE_MIB) if has_prompts else 0
        return Needs(
            weights=files + self.repacked_bytes,
            cache=self.cache_bytes,
            compute=self.step_bytes + self.vocabulary * _VOCABULARY_BYTES + _PROCESS_BYTES,
            prompts=prompts * _MIB,
        )

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
        """Return what keys and values of all slots take."""
        tokens = self._spec.slots * self._spec.context_length
        return round(tokens * _kv_bytes(self.number, self._spec.options))

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


def fitting_sizes(
    file: Path, slots: int | None, context_length: int | None, options: Mapping[str, Any]
) -> tuple[int, int]:
    """Return the slots and the context of each, in tokens, for a model whose entry leaves them out.

    These are four slots and the context that the model was trained with, 8,192 tokens at most. On a
    host whose memory that would fill, the context is shorter, down to 2,048 tokens, then the slots
    are fewer, then the context is shorter still. What the entry says stays. A host that has not the
    file takes the longest context that it may have.
    """
    try:
        found, size = beginning(file), sum(part.stat().st_size for part in parts_of(file))
    except (OSError, ValueError):
        return slots or _SLOTS, context_length or _LONGEST_CONTEXT
    number = _numbers(found)
    trained = min(number("context_length") or _LONGEST_CONTEXT, _LONGEST_CONTEXT)
    halves = [trained, *(n for n in (4096, 2048, 1024, 512) if n < trained)]
    contexts = [context_length] if context_length else halves
    counts = [slots] if slots else [_SLOTS, _SLOTS // 2, 1]
    usual = [context for context in contexts if context >= 2048] or contexts[:1]
    sizes = [*product(counts, usual), *((counts[-1], context) for context in contexts)]
    room = (memory_bytes()[0] - size) // _CACHE_SHARE
    token = _kv_bytes(number, options)
    return next((s for s in sizes if s[0] * s[1] * token <= room), sizes[-1])


def _numbers(metadata: Mapping[str, Any]) -> Callable[..., int]:
    """Return what gives a number of the header by a key of the architecture, or a default."""
    name = metadata.get("general.architecture", "")

    def number(key: str, default: int = 0) -> int:
        value = metadata.get(f"{name}.{key}")
        return value if isinstance(value, int) and value > 0 else default

    return number


def _kv_bytes(number: Callable[..., int], options: Mapping[str, Any]) -> float:
    """Return the bytes of keys and values of one token in all layers; options say their types."""
    heads = number("attention.head_count", 1)
    width = number("embedding_length") // heads
    kv_heads = number("attention.head_count_kv", heads)
    values = kv_heads * number("attention.value_length", width)
    keys = kv_heads * number("attention.key_length", width)
    bits_k, bits_v = (_BITS[options.get(f"cache_type_{of}", "f16")] for of in "kv")
    return number("block_count") * (keys * bits_k + values * bits_v) / 8


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
    model = ModelMemory(spec, file)
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
