"""A vision projector of random weights, small enough to be written by the test that needs it.

It is a CLIP tower of one working layer with a LLaVA projector: the kind for which llama.cpp asks
for the fewest tensors. What the model says of an image is noise, but it is the image's noise: other
pixels give other embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

IMAGE_SIZE = 32
PATCH_SIZE = 8
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
"""Tokens of the prompt that one image takes."""

_WIDTH, _HEADS, _FEED_FORWARD = 32, 2, 64
_LAYERS = 2  # A LLaVA projector reads the layer before the last, so the last one never runs.

Tensor = np.ndarray[Any, np.dtype[np.float32]]


def write_projector(path: Path, embedding_length: int, seed: int = 0) -> Path:
    """Write the projector for a model of this embedding length as GGUF; return its path."""
    writer = gguf.GGUFWriter(path, "clip")
    _write_hyperparameters(writer, embedding_length)
    for name, tensor in _tensors(embedding_length, np.random.default_rng(seed)):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_hyperparameters(writer: gguf.GGUFWriter, embedding_length: int) -> None:
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("mlp")
    writer.add_vision_use_gelu(True)
    writer.add_vision_image_size(IMAGE_SIZE)
    writer.add_vision_patch_size(PATCH_SIZE)
    writer.add_vision_embedding_length(_WIDTH)
    writer.add_vision_feed_forward_length(_FEED_FORWARD)
    writer.add_vision_projection_dim(embedding_length)
    writer.add_vision_head_count(_HEADS)
    writer.add_vision_block_count(_LAYERS)
    writer.add_vision_attention_layernorm_eps(1e-5)
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])


def _tensors(embedding_length: int, rng: np.random.Generator) -> Iterator[tuple[str, Tensor]]:
    def noise(*shape: int) -> Tensor:
        """Return weights that keep the size of what they are multiplied with."""
        weights: Tensor = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        return weights

    yield "v.patch_embd.weight", noise(_WIDTH, 3, PATCH_SIZE, PATCH_SIZE)
    yield "v.position_embd.weight", noise(IMAGE_TOKENS, _WIDTH)
    for layer in range(_LAYERS):
        yield from _layer(f"v.blk.{layer}", noise)
    yield "mm.0.weight", noise(embedding_length, _WIDTH)
    yield "mm.0.bias", noise(embedding_length)
    yield "mm.2.weight", noise(embedding_length, embedding_length)
    yield "mm.2.bias", noise(embedding_length)


def _layer(name: str, noise: Callable[..., Tensor]) -> Iterator[tuple[str, Tensor]]:
    for norm in ("ln1", "ln2"):
        yield f"{name}.{norm}.weight", np.ones(_WIDTH, dtype=np.float32)
        yield f"{name}.{norm}.bias", np.zeros(_WIDTH, dtype=np.float32)
    shapes = {
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_out"), (_WIDTH, _WIDTH)),
        "ffn_up": (_FEED_FORWARD, _WIDTH),
        "ffn_down": (_WIDTH, _FEED_FORWARD),
    }
    for part, shape in shapes.items():
        yield f"{name}.{part}.weight", noise(*shape)
        yield f"{name}.{part}.bias", noise(shape[0])
