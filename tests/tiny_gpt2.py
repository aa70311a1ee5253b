"""A tiny GPT-2 with random weights in the GGML format of 2023, which only ctransformers loads."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

VOCABULARY = [bytes([value]) for value in range(1, 256)] + [b"<|endoftext|>"]
CONTEXT, WIDTH, HEADS, LAYERS = 64, 32, 2, 2
_MAGIC = 0x67676D6C
_F32 = 0


def write_gpt2(path: Path, seed: int = 1) -> None:
    """Write the file: magic, sizes, vocabulary, then each tensor with its name."""
    random = np.random.default_rng(seed)
    with path.open("wb") as file:
        sizes = (len(VOCABULARY), CONTEXT, WIDTH, HEADS, LAYERS, _F32)
        file.write(struct.pack("<i6i", _MAGIC, *sizes))
        file.write(struct.pack("<i", len(VOCABULARY)))
        for token in VOCABULARY:
            file.write(struct.pack("<I", len(token)) + token)
        for name, shape in _tensors():
            scale = 1.0 if name.endswith("/g") else 0.3
            values = random.normal(0, scale, shape).astype(np.float32)
            file.write(_header(name, shape) + values.tobytes())


def _tensors() -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes, rows first."""
    found: list[tuple[str, tuple[int, ...]]] = [
        ("model/ln_f/g", (WIDTH,)),
        ("model/ln_f/b", (WIDTH,)),
        ("model/wte", (len(VOCABULARY), WIDTH)),
        ("model/wpe", (CONTEXT, WIDTH)),
    ]
    for layer in range(LAYERS):
        block = f"model/h{layer}"
        found += [
            (f"{block}/ln_1/g", (WIDTH,)),
            (f"{block}/ln_1/b", (WIDTH,)),
            (f"{block}/ln_2/g", (WIDTH,)),
            (f"{block}/ln_2/b", (WIDTH,)),
            (f"{block}/attn/c_attn/w", (3 * WIDTH, WIDTH)),
            (f"{block}/attn/c_attn/b", (3 * WIDTH,)),
            (f"{block}/attn/c_proj/w", (WIDTH, WIDTH)),
            (f"{block}/attn/c_proj/b", (WIDTH,)),
            (f"{block}/mlp/c_fc/w", (4 * WIDTH, WIDTH)),
            (f"{block}/mlp/c_fc/b", (4 * WIDTH,)),
            (f"{block}/mlp/c_proj/w", (WIDTH, 4 * WIDTH)),
            (f"{block}/mlp/c_proj/b", (WIDTH,)),
        ]
    return found


def _header(name: str, shape: tuple[int, ...]) -> bytes:
    sizes = tuple(reversed(shape))  # GGML counts from the innermost.
    return (
        struct.pack("<3i", len(sizes), len(name), _F32)
        + struct.pack(f"<{len(sizes)}i", *sizes)
        + name.encode()
    )
