"""Tiny models with random weights in the GGML formats of 2023, which only ctransformers loads.

``write_ggml`` writes one of any architecture in a few milliseconds: kilobytes, one token for each
byte, and a token that ends the text.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

CONTEXT, WIDTH, HEADS, LAYERS = 64, 32, 2, 2
_BYTES = [bytes([value]) for value in range(1, 256)]
_END = b"<|endoftext|>"
_LONGER = [b"He", b"ll", b"the", b" the", b" t", b"\n\n", b"  "]
VOCABULARY = [*_BYTES, *_LONGER, _END]
_FALCON_END = 11  # The library knows no other.
_GGML, _GGJT, _GGCC = 0x67676D6C, 0x67676A74, 0x67676363
_F32 = 0

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def write_ggml(path: Path, architecture: str, seed: int = 1) -> Path:
    """Write the file: magic, sizes, vocabulary, then each tensor with its name; return its path."""
    head, shapes, is_aligned = _FORMATS[architecture]()
    random = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(head)
        for name, shape in shapes:
            mean, scale = (1.0, 0.1) if _is_gain(name) else (0.0, 0.3)
            values = random.normal(mean, scale, shape).astype(np.float32)
            file.write(_tensor_head(name, shape))
            if is_aligned:
                file.write(bytes(-file.tell() % 32))
            file.write(values.tobytes())
    return path


def _is_gain(name: str) -> bool:
    return name.endswith(("/g", "norm.weight", "ln_1.weight", "ln_f.weight", "norm_f.weight"))


def _tensor_head(name: str, shape: tuple[int, ...]) -> bytes:
    sizes = tuple(reversed(shape))  # GGML counts from the innermost.
    numbers = (len(sizes), len(name), _F32, *sizes)
    return struct.pack(f"<{len(numbers)}i", *numbers) + name.encode()


def _head(magic: int, *sizes: int | float) -> bytes:
    kinds = "".join("f" if isinstance(size, float) else "i" for size in sizes)
    return struct.pack(f"<I{kinds}", magic, *sizes)


def _words(words: list[bytes], scores: list[float] | None = None, count: bool = False) -> bytes:
    """Return a vocabulary; some formats say its size again, and some give each word a score."""
    written = struct.pack("<i", len(words)) if count else b""
    for number, word in enumerate(words):
        written += struct.pack("<I", len(word)) + word
        written += b"" if scores is None else struct.pack("<f", scores[number])
    return written


def _linear(name: str, rows: int, columns: int, bias: bool = True) -> Shapes:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _scale(name: str, bias: bool = True) -> Shapes:
    yield f"{name}.weight", (WIDTH,)
    if bias:
        yield f"{name}.bias", (WIDTH,)


Format = tuple[bytes, Shapes, bool]


def _gpt2() -> Format:
    head = _head(_GGML, len(VOCABULARY), CONTEXT, WIDTH, HEADS, LAYERS, _F32)
    return head + _words(VOCABULARY, count=True), _gpt2_shapes(), False


def _gpt2_shapes() -> Shapes:
    yield from (("model/ln_f/g", (WIDTH,)), ("model/ln_f/b", (WIDTH,)))
    yield from (("model/wte", (len(VOCABULARY), WIDTH)), ("model/wpe", (CONTEXT, WIDTH)))
    for layer in range(LAYERS):
        for norm in ("ln_1", "ln_2"):
            yield from ((f"model/h{layer}/{norm}/{part}", (WIDTH,)) for part in "gb")
        for name, rows, columns in (
            ("attn/c_attn", 3 * WIDTH, WIDTH),
            ("attn/c_proj", WIDTH, WIDTH),
            ("mlp/c_fc", 4 * WIDTH, WIDTH),
            ("mlp/c_proj", WIDTH, 4 * WIDTH),
        ):
            yield f"model/h{layer}/{name}/w", (rows, columns)
            yield f"model/h{layer}/{name}/b", (rows,)


def _gptj() -> Format:
    sizes = (len(VOCABULARY), CONTEXT, WIDTH, HEADS, LAYERS, WIDTH // HEADS, _F32)
    return _head(_GGML, *sizes) + _words(VOCABULARY, count=True), _gptj_shapes(), False


def _gptj_shapes() -> Shapes:
    yield "transformer.wte.weight", (len(VOCABULARY), WIDTH)
    yield from _scale("transformer.ln_f")
    yield from _linear("lm_head", len(VOCABULARY), WIDTH)
    for layer in range(LAYERS):
        block = f"transformer.h.{layer}"
        yield from _scale(f"{block}.ln_1")
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{block}.attn.{part}", WIDTH, WIDTH, bias=False)
        yield from _linear(f"{block}.mlp.fc_in", 4 * WIDTH, WIDTH)
        yield from _linear(f"{block}.mlp.fc_out", WIDTH, 4 * WIDTH)


def _gpt_neox() -> Format:
    sizes = (len(VOCABULARY), CONTEXT, WIDTH, HEADS, LAYERS, WIDTH // HEADS, 1, _F32)
    return _head(_GGML, *sizes) + _words(VOCABULARY), _gpt_neox_shapes(), False


def _gpt_neox_shapes() -> Shapes:
    yield "gpt_neox.embed_in.weight", (len(VOCABULARY), WIDTH)
    yield from _scale("gpt_neox.final_layer_norm")
    yield "embed_out.weight", (len(VOCABULARY), WIDTH)
    for layer in range(LAYERS):
        block = f"gpt_neox.layers.{layer}"
        yield from _scale(f"{block}.input_layernorm")
        yield from _scale(f"{block}.post_attention_layernorm")
        yield from _linear(f"{block}.attention.query_key_value", 3 * WIDTH, WIDTH)
        yield from _linear(f"{block}.attention.dense", WIDTH, WIDTH)
        yield from _linear(f"{block}.mlp.dense_h_to_4h", 4 * WIDTH, WIDTH)
        yield from _linear(f"{block}.mlp.dense_4h_to_h", WIDTH, 4 * WIDTH)


def _mpt() -> Format:
    sizes = (WIDTH, CONTEXT, HEADS, LAYERS, len(VOCABULARY), 8.0, 0.0, _F32)
    words = [word.decode("latin-1").encode() for word in VOCABULARY]
    return _head(_GGML, *sizes) + _words(words), _mpt_shapes(), False


def _mpt_shapes() -> Shapes:
    yield "transformer.wte.weight", (len(VOCABULARY), WIDTH)
    yield from _scale("transformer.norm_f", bias=False)
    for layer in range(LAYERS):
        block = f"transformer.blocks.{layer}"
        yield from _scale(f"{block}.norm_1", bias=False)
        yield from _scale(f"{block}.norm_2", bias=False)
        yield from _linear(f"{block}.attn.Wqkv", 3 * WIDTH, WIDTH, bias=False)
        yield from _linear(f"{block}.attn.out_proj", WIDTH, WIDTH, bias=False)
        yield from _linear(f"{block}.ffn.up_proj", 4 * WIDTH, WIDTH, bias=False)
        yield from _linear(f"{block}.ffn.down_proj", WIDTH, 4 * WIDTH, bias=False)


def _replit() -> Format:
    """Its words are those of SentencePiece: a space is a mark of three bytes."""
    sizes = (WIDTH, CONTEXT, HEADS, LAYERS, len(VOCABULARY), _F32)
    words = [b"<unk>", _END, *_BYTES, *_LONGER][: len(VOCABULARY)]
    words = [word.replace(b" ", "\u2581".encode()) for word in words]
    scores = [-float(number) for number in range(len(words))]
    return _head(_GGML, *sizes) + _words(words, scores), _mpt_shapes(), False


def _llama() -> Format:
    words = [b"<unk>", b"<s>", b"</s>", *_BYTES, b"\0"]
    sizes = (3, len(words), WIDTH * HEADS, 32, HEADS, LAYERS, WIDTH, _F32)
    head = _head(_GGJT, *sizes) + _words(words, [0.0] * len(words))
    return head, _llama_shapes(len(words)), True


def _llama_shapes(vocabulary: int) -> Shapes:
    width, inner = WIDTH * HEADS, 192  # Two thirds of four times the width, up to a multiple of 32.
    yield "tok_embeddings.weight", (vocabulary, width)
    yield "norm.weight", (width,)
    yield "output.weight", (vocabulary, width)
    for layer in range(LAYERS):
        block = f"layers.{layer}"
        yield f"{block}.attention_norm.weight", (width,)
        yield f"{block}.ffn_norm.weight", (width,)
        for part in ("wq", "wk", "wv", "wo"):
            yield f"{block}.attention.{part}.weight", (width, width)
        yield f"{block}.feed_forward.w1.weight", (inner, width)
        yield f"{block}.feed_forward.w2.weight", (width, inner)
        yield f"{block}.feed_forward.w3.weight", (inner, width)


def _falcon() -> Format:
    words = [*_BYTES, b"\0"]
    words[_FALCON_END : _FALCON_END + 1] = [_END, words[_FALCON_END]]
    sizes = (10, len(words), WIDTH * HEADS, HEADS, 1, LAYERS, 7, _F32, 0)
    head = _head(_GGCC, *sizes) + _words(words, [0.0] * len(words)) + struct.pack("<i", 0)
    return head, _falcon_shapes(len(words)), True


def _falcon_shapes(vocabulary: int) -> Shapes:
    width = WIDTH * HEADS
    yield "transformer.word_embeddings.weight", (vocabulary, width)
    yield from (("transformer.ln_f.weight", (width,)), ("transformer.ln_f.bias", (width,)))
    yield "lm_head.weight", (vocabulary, width)
    for layer in range(LAYERS):
        block = f"transformer.h.{layer}"
        yield f"{block}.input_layernorm.weight", (width,)
        yield f"{block}.input_layernorm.bias", (width,)
        yield f"{block}.self_attention.query_key_value.weight", (width + 2 * WIDTH, width)
        yield f"{block}.self_attention.dense.weight", (width, width)
        yield f"{block}.mlp.dense_h_to_4h.weight", (4 * width, width)
        yield f"{block}.mlp.dense_4h_to_h.weight", (width, 4 * width)


_FORMATS: dict[str, Callable[[], Format]] = {
    "gpt2": _gpt2,
    "gptj": _gptj,
    "gpt_neox": _gpt_neox,
    "dolly-v2": _gpt_neox,
    "mpt": _mpt,
    "replit": _replit,
    "starcoder": _gpt2,
    "llama": _llama,
    "falcon": _falcon,
}
ARCHITECTURES = tuple(_FORMATS)
