"""Weights without a meaning, small enough to be written by the test that needs them.

``write_model`` makes a llama model of random weights: it says anything, so what it says in a
certain form, it says because it was made to. ``write_adapter`` makes a LoRA adapter that turns the
demo model's head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from inference_site.catalogue.catalogue import DEMO_FILE

_WIDTH, _HEADS, _FEED_FORWARD, _LAYERS = 64, 2, 128, 2
_LOGIT_STD = 3.0  # Wide enough for some tokens to be likelier than others, whatever came before.
_RANK, _ALPHA = 4, 8.0

Tensor = np.ndarray[Any, np.dtype[np.float32]]
Tensors = Iterator[tuple[str, Tensor]]


def write_model(
    path: Path,
    seed: int = 0,
    chat_template: str | None = None,
    control_tokens: Mapping[int, str] | None = None,
    *,
    adds_bos: bool = True,
) -> Path:
    """Write a model with the demo model's vocabulary; return its path.

    Without a ``chat_template`` it has the demo model's. ``control_tokens`` take the places of the
    tokens of these ids. ``adds_bos``: each prompt begins with the BOS token.
    """
    controls = control_tokens or {}
    replaced = {
        "tokenizer.ggml.tokens": controls,
        "tokenizer.ggml.token_type": dict.fromkeys(controls, gguf.TokenType.CONTROL),
    }
    demo = gguf.GGUFReader(DEMO_FILE)
    writer = gguf.GGUFWriter(path, "llama")
    for field in demo.fields.values():
        if field.name == "tokenizer.chat_template" and chat_template is not None:
            writer.add_chat_template(chat_template)
        elif field.name == gguf.Keys.Tokenizer.ADD_BOS:
            writer.add_add_bos_token(adds_bos)
        elif field.name.startswith("tokenizer."):
            main, *inner = field.types
            value = field.contents()
            for id_, new in replaced.get(field.name, {}).items():
                value[id_] = new
            writer.add_key_value(field.name, value, main, inner[-1] if inner else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(2048)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    vocabulary = len(demo.fields["tokenizer.ggml.tokens"].contents())
    return _write(writer, _model_tensors(vocabulary, np.random.default_rng(seed)), path)


def write_reranker(path: Path, words: Sequence[str]) -> Path:
    """Write a BERT model of random weights that ranks documents; it knows these words alone."""
    writer = gguf.GGUFWriter(path, "bert")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"▁{word}" for word in words)]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types([*[gguf.TokenType.CONTROL] * 5, *[gguf.TokenType.NORMAL] * len(words)])
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_eos_token_id(3)
    writer.add_token_type_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_head_count(_HEADS)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.RANK)
    return _write(writer, _reranker_tensors(len(tokens), np.random.default_rng(1)), path)


def write_adapter(path: Path, seed: int = 0, architecture: str = "llama") -> Path:
    """Write a LoRA adapter for the attention of every layer of the demo model; return its path."""
    demo = gguf.GGUFReader(DEMO_FILE)
    shapes = {tensor.name: tensor.shape for tensor in demo.tensors if "attn_q" in tensor.name}
    writer = _adapter_writer(path, architecture)
    return _write(writer, _adapter_tensors(shapes, np.random.default_rng(seed)), path)


def write_misfit(path: Path) -> Path:
    """Write an adapter that only llama.cpp refuses: a tensor has an unknown end."""
    tensor = ("blk.0.attn_q.weight.lora_c", _noise(np.random.default_rng(0), _RANK, _RANK))
    return _write(_adapter_writer(path), iter([tensor]), path)


def write_uneven(path: Path) -> Path:
    """Write an adapter whose halves fit the demo, and not each other: their ranks differ."""
    demo = gguf.GGUFReader(DEMO_FILE)
    columns, rows = next(t.shape for t in demo.tensors if t.name == "blk.0.attn_q.weight")
    rng = np.random.default_rng(0)
    halves = (
        ("blk.0.attn_q.weight.lora_a", _noise(rng, _RANK, int(columns))),
        ("blk.0.attn_q.weight.lora_b", _noise(rng, int(rows), _RANK + 1)),
    )
    return _write(_adapter_writer(path), iter(halves), path)


def write_stranger(path: Path, name: str = "blk.0.attn_q.weight") -> Path:
    """Write an adapter for a model whose tensor of this name is smaller than the demo's."""
    tensors = _adapter_tensors({name: (8, 8)}, np.random.default_rng(0))
    return _write(_adapter_writer(path), tensors, path)


def write_zeros(path: Path, shapes: Mapping[str, tuple[int, ...]], *, is_adapter: bool) -> Path:
    """Write tensors of these shapes, rows first, as a llama model or an adapter of one."""
    writer = _adapter_writer(path) if is_adapter else gguf.GGUFWriter(path, "llama")
    zeros = ((name, np.zeros(shape, np.float32)) for name, shape in shapes.items())
    return _write(writer, zeros, path)


def _adapter_writer(path: Path, architecture: str = "llama") -> gguf.GGUFWriter:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, _ALPHA)
    return writer


def _write(writer: gguf.GGUFWriter, tensors: Tensors, path: Path) -> Path:
    for name, tensor in tensors:
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _noise(rng: np.random.Generator, rows: int, columns: int, std: float = 1.0) -> Tensor:
    """Return weights that keep the size of what they are multiplied with, times ``std``."""
    scale = std / np.sqrt(columns)
    noise: Tensor = (rng.standard_normal((rows, columns)) * scale).astype(np.float32)
    return noise


def _model_tensors(vocabulary: int, rng: np.random.Generator) -> Tensors:
    ones = np.ones(_WIDTH, np.float32)
    yield "token_embd.weight", _noise(rng, vocabulary, _WIDTH, std=np.sqrt(_WIDTH))
    for layer in range(_LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield f"blk.{layer}.{part}.weight", _noise(rng, _WIDTH, _WIDTH)
        for part in ("ffn_gate", "ffn_up"):
            yield f"blk.{layer}.{part}.weight", _noise(rng, _FEED_FORWARD, _WIDTH)
        yield f"blk.{layer}.ffn_down.weight", _noise(rng, _WIDTH, _FEED_FORWARD)
        yield f"blk.{layer}.attn_norm.weight", ones
        yield f"blk.{layer}.ffn_norm.weight", ones
    yield "output_norm.weight", ones
    yield "output.weight", _noise(rng, vocabulary, _WIDTH, std=_LOGIT_STD)


def _reranker_tensors(vocabulary: int, rng: np.random.Generator) -> Tensors:
    tables = {"token_embd": vocabulary, "position_embd": 512, "token_types": 2}
    for name, rows in tables.items():
        yield f"{name}.weight", _noise(rng, rows, _WIDTH, std=np.sqrt(_WIDTH))
    for name in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        yield f"{name}.weight", np.ones(_WIDTH, np.float32)
        yield f"{name}.bias", np.zeros(_WIDTH, np.float32)
    squares = [f"blk.0.{part}" for part in ("attn_q", "attn_k", "attn_v", "attn_output")]
    for name in (*squares, "blk.0.ffn_up", "blk.0.ffn_down", "cls"):
        yield f"{name}.weight", _noise(rng, _WIDTH, _WIDTH)
        yield f"{name}.bias", np.zeros(_WIDTH, np.float32)
    yield "cls.output.weight", _noise(rng, 1, _WIDTH)
    yield "cls.output.bias", np.zeros(1, np.float32)


def _adapter_tensors(shapes: dict[str, Any], rng: np.random.Generator) -> Tensors:
    for name, (columns, rows) in shapes.items():
        yield f"{name}.lora_a", _noise(rng, _RANK, int(columns), std=4.0)
        yield f"{name}.lora_b", _noise(rng, int(rows), _RANK, std=4.0)
