"""Estimates of memory, against what llama.cpp has printed of well-known models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import gguf
import pytest

from inference_site.catalogue import memory
from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.catalogue.memory import ModelMemory, fitting_sizes, layers_that_fit
from inference_site.core.domain.model_spec import ModelSpec

MIB = 2**20


class Known(NamedTuple):
    """A model's header, and what its cache of so many tokens takes at 16 bits a value."""

    architecture: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int | None
    tokens: int
    cache_mib: int


KNOWN = {
    "Llama-3-8B": Known("llama", 32, 4096, 32, 8, None, 8192, 1024),
    "Llama-3.1-70B": Known("llama", 80, 8192, 64, 8, None, 8192, 2560),
    "Qwen2.5-7B": Known("qwen2", 28, 3584, 28, 4, None, 2048, 112),
    "Gemma-2-9B": Known("gemma2", 42, 3584, 16, 8, 256, 8192, 2688),
    "Phi-3-mini": Known("phi3", 32, 3072, 32, 32, None, 4096, 1536),
}


def write_header(path: Path, known: Known, size_bytes: int) -> Path:
    """Write the header of a model; what would follow is a hole in the file."""
    writer = gguf.GGUFWriter(path, known.architecture)
    writer.add_block_count(known.layers)
    writer.add_context_length(known.tokens)
    writer.add_embedding_length(known.width)
    writer.add_head_count(known.heads)
    writer.add_head_count_kv(known.kv_heads)
    if known.head_width is not None:
        writer.add_key_length(known.head_width)
        writer.add_value_length(known.head_width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.truncate(path, size_bytes)
    return path


@pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN)
def test_cache_is_what_llama_cpp_takes_for_it(tmp_path: Path, known: Known) -> None:
    file = write_header(tmp_path / "m.gguf", known, 5 * MIB)
    one, four = (
        ModelMemory(
            ModelSpec("m", "llama_cpp", file, slots=n, context_length=known.tokens), file
        ).needs
        for n in (1, 4)
    )
    assert (one.weights, one.cache) == (5 * MIB, known.cache_mib * MIB)
    assert (four.weights, four.cache) == (5 * MIB, 4 * known.cache_mib * MIB)


@pytest.mark.parametrize(
    ("types", "cache_mib"),
    [
        ({"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, 544),
        ({"cache_type_k": "q4_0", "cache_type_v": "q4_0"}, 288),
        ({"cache_type_k": "q8_0"}, 784),
        ({"cache_type_k": "f32", "cache_type_v": "f32"}, 2048),
    ],
)
def test_types_of_the_cache_and_files_beside_the_model_count(
    tmp_path: Path, types: dict[str, str], cache_mib: int
) -> None:
    """Of Llama 3 8B in Q4_K_M: 4.58 GiB of weights, 1 GiB for 8,192 tokens at 16 bits."""
    file = write_header(tmp_path / "m.gguf", KNOWN["Llama-3-8B"], 4_920_734_272)
    draft = write_header(tmp_path / "d.gguf", KNOWN["Llama-3-8B"], 300 * MIB)
    spec = ModelSpec("m", "llama_cpp", file, slots=2, context_length=4096, options=types)
    alone = ModelMemory(spec, file).needs
    assert (alone.weights, alone.cache) == (4_920_734_272, cache_mib * MIB)
    spec.options["draft_model"] = str(draft)
    assert ModelMemory(spec, file).needs.weights == 4_920_734_272 + 300 * MIB


def test_the_prompt_cache_counts_unless_there_is_none(tmp_path: Path) -> None:
    file = write_header(tmp_path / "m.gguf", KNOWN["Qwen2.5-7B"], 5 * MIB)

    def prompts(**options: object) -> int:
        return (
            ModelMemory(ModelSpec("m", "llama_cpp", file, options=options), file).needs.prompts
            // MIB
        )

    assert (prompts(), prompts(prompt_cache_mib=64), prompts(embedding="mean")) == (256, 64, 0)
    with_adapter = ModelSpec("m", "llama_cpp", file, lora_adapters={"a": file})
    assert ModelMemory(with_adapter, file).needs.prompts == 0


def test_the_total_is_the_sum_of_its_parts_which_are_named() -> None:
    needs = ModelMemory(ModelSpec("demo", "llama_cpp", DEMO_FILE, slots=8), DEMO_FILE).needs
    parts = (needs.weights, needs.cache, needs.compute, needs.prompts)
    assert needs.total == sum(parts)
    assert min(parts) > 0
    assert [part.split()[0] for part in str(needs).split(", ")] == [
        *("weights", "cache", "compute", "prompt"),
    ]


class TestSizesThatFit:
    """Of Llama 3 8B in Q4_K_M: 4.6 GiB, and a quarter of a MiB of cache for two tokens."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return write_header(tmp_path / "m.gguf", KNOWN["Llama-3-8B"], 4_920_734_272)

    @pytest.mark.parametrize(
        ("gib", "sizes"),
        [
            (64, (4, 8192)),
            (21, (4, 8192)),
            (20, (4, 4096)),
            (12, (4, 2048)),
            (8, (2, 2048)),
            (6, (1, 2048)),
            (5.2, (1, 1024)),
            (4, (1, 512)),
        ],
    )
    def test_a_small_host_gets_a_shorter_context_then_fewer_slots(
        self, file: Path, gib: float, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory, "memory_bytes", lambda: (int(gib * 2**30), 0))
        assert fitting_sizes(file, None, None, {}) == sizes

    def test_what_the_entry_says_stays(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory, "memory_bytes", lambda: (8 * 2**30, 0))
        assert fitting_sizes(file, 8, 4096, {}) == (8, 4096)
        assert fitting_sizes(file, 8, None, {}) == (8, 512)
        assert fitting_sizes(file, None, 4096, {}) == (1, 4096)
        quantised = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
        assert fitting_sizes(file, None, None, quantised) == (4, 2048)

    def test_a_host_without_the_file_takes_the_usual_sizes(self, tmp_path: Path) -> None:
        assert fitting_sizes(tmp_path / "elsewhere.gguf", None, None, {}) == (4, 8192)


class TestLayersOnGpus:
    SPEC = ModelSpec("demo", "llama_cpp", DEMO_FILE, slots=4, context_length=2048)

    def fit(self, free_mib: int, gpus: int = 1) -> tuple[int, int]:
        found = layers_that_fit(self.SPEC, DEMO_FILE, free_mib * MIB, gpus)
        return found.layers, found.all_layers

    def test_all_fit_where_there_is_room(self) -> None:
        assert self.fit(2000) == (7, 7)

    def test_none_fit_where_there_is_none(self) -> None:
        assert self.fit(0) == (0, 7)
        assert self.fit(600, gpus=2) == (0, 7), "each GPU's driver takes memory of its own"

    def test_more_memory_never_holds_fewer_layers(self) -> None:
        counts = [self.fit(mib)[0] for mib in range(500, 700, 5)]
        assert counts == sorted(counts)
        assert set(counts) >= {0, 1, 7}
        assert len(set(counts)) > 3, "some sizes hold a part of the layers"
