"""Random weights of a realistic size, where the model costs more than the server around it.

The file is a llama-architecture GGUF of about 130 M parameters (Q8_0) that borrows tokenizer, chat
template and sampling defaults from the demo model, so that it can chat: nonsense, at a real cost.
"""

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

SEED = 130
BLOCK = 32  # Weights of a Q8_0 block: one float16 scale, then 32 signed bytes.
CODE_STD = 127 / np.sqrt(3)  # Standard deviation of codes drawn evenly from -127 … 127.
# Wide logits: a token whose output row is zero is then never sampled.
LOGIT_STD = 5.0
NORMAL = int(gguf.TokenType.NORMAL)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a llama-architecture model; the defaults make 131 M parameters."""

    layers: int = 18
    width: int = 768
    heads: int = 12
    feed_forward: int = 2048
    context_length: int = 2048


def random_weights(path: Path, tokenizer: Path, shape: Shape | None = None) -> Path:
    """Write the model file at ``path`` unless it is there, and return ``path``.

    The content depends on ``shape`` and on ``tokenizer`` (a GGUF file) only.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        _write(partial, gguf.GGUFReader(tokenizer), shape or Shape())
        partial.rename(path)
    return path


def _write(path: Path, tokenizer: gguf.GGUFReader, shape: Shape) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    _copy_metadata(tokenizer, writer)
    _add_hyperparameters(writer, shape)
    _add_tensors(writer, shape, _printable(tokenizer))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for field in reader.fields.values():
        if field.name.startswith(("tokenizer.", "general.sampling.")):
            main, *inner = field.types
            writer.add_key_value(field.name, field.contents(), main, inner[-1] if inner else None)


def _add_hyperparameters(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name("Random weights")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_rope_freq_base(10000.0)


def _add_tensors(writer: gguf.GGUFWriter, shape: Shape, printable: npt.NDArray[np.bool_]) -> None:
    rng = np.random.default_rng(SEED)
    width, vocabulary, small = shape.width, len(printable), shape.width**-0.5

    def matrix(name: str, rows: int, columns: int, std: float) -> None:
        _add_q8_0(writer, name, _random_q8_0(rng, rows, columns, std))

    matrix("token_embd.weight", vocabulary, width, 1.0)
    for layer in range(shape.layers):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{layer}.{part}.weight", width, width, small)
        for part in ("ffn_gate", "ffn_up"):
            matrix(f"blk.{layer}.{part}.weight", shape.feed_forward, width, small)
        matrix(f"blk.{layer}.ffn_down.weight", width, shape.feed_forward, small)
        for part in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{part}.weight", np.ones(width, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    output = _random_q8_0(rng, vocabulary, width, LOGIT_STD * small)
    output[~printable, :, 2:] = 0
    _add_q8_0(writer, "output.weight", output)


def _add_q8_0(writer: gguf.GGUFWriter, name: str, blocks: Bytes) -> None:
    rows = blocks.reshape(len(blocks), -1)
    writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType.Q8_0)


def _random_q8_0(rng: np.random.Generator, rows: int, columns: int, std: float) -> Bytes:
    """Return a random matrix as Q8_0 blocks: uint8[rows, columns / 32, 34]."""
    blocks = np.empty((rows, columns // BLOCK, 2 + BLOCK), np.uint8)
    blocks[..., :2] = np.array([std / CODE_STD], np.float16).view(np.uint8)
    codes = rng.integers(-127, 128, (rows, columns // BLOCK, BLOCK), np.int8)
    blocks[..., 2:] = codes.view(np.uint8)
    return blocks


def _printable(tokenizer: gguf.GGUFReader) -> npt.NDArray[np.bool_]:
    """Return which tokens may be sampled: plain text that no parser of chat markup holds back."""
    tokens = tokenizer.fields["tokenizer.ggml.tokens"].contents()
    types = tokenizer.fields["tokenizer.ggml.token_type"].contents()
    pairs = zip(tokens, types, strict=True)
    return np.array([kind == NORMAL and token.lstrip("\u2581").isalnum() for token, kind in pairs])
