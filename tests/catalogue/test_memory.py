"""Estimates of memory, against what llama.cpp has printed of well-known models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import gguf
import pytest

from inference_site.catalogue.gguf_file import read_gguf
from inference_site.catalogue.memory import entry_bytes, needed_bytes
from inference_site.domain.model_spec import ModelSpec

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
    info = read_gguf(write_header(tmp_path / "m.gguf", known, 5 * MIB))
    assert needed_bytes(info, 1, known.tokens) == (5 + known.cache_mib) * MIB
    assert needed_bytes(info, 4, known.tokens) == (5 + 4 * known.cache_mib) * MIB


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
    assert entry_bytes(spec, file) == 4_920_734_272 + cache_mib * MIB
    spec.options["draft_model"] = str(draft)
    assert entry_bytes(spec, file) == 4_920_734_272 + (cache_mib + 300) * MIB
