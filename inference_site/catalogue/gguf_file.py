"""What a GGUF file says of itself, without loading it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGUFReader


@dataclass(frozen=True, slots=True)
class GgufInfo:
    """``type`` is "model", "adapter" or "mmproj"; ``context_length`` is tokens, as trained.

    ``kv_bytes_per_token`` is what one token of context takes at 16 bits a value.
    """

    type: str
    architecture: str
    name: str
    quantisation: str
    context_length: int
    size_bytes: int
    kv_bytes_per_token: int
    has_chat_template: bool


def read_gguf(path: Path) -> GgufInfo:
    """Return what the file says. Raise ValueError or OSError for what is no GGUF file."""
    from gguf import GGUFReader  # Brings numpy, which web processes have no other use for.

    reader = GGUFReader(path, "r")
    architecture = str(_value(reader, "general.architecture", "unknown"))
    kind = str(_value(reader, "general.type", "mmproj" if architecture == "clip" else "model"))
    return GgufInfo(
        type=kind,
        architecture=architecture,
        name=str(_value(reader, "general.name", path.stem)),
        quantisation=_quantisation(reader),
        context_length=int(_value(reader, f"{architecture}.context_length", 0)),
        size_bytes=path.stat().st_size,
        kv_bytes_per_token=_kv_bytes(reader, architecture),
        has_chat_template="tokenizer.chat_template" in reader.fields,
    )


def _value(reader: GGUFReader, key: str, default: Any) -> Any:
    field = reader.fields.get(key)
    return default if field is None else field.contents()


def _quantisation(reader: GGUFReader) -> str:
    """Return the type of most of the weights, by their size."""
    sizes: dict[str, int] = {}
    for tensor in reader.tensors:
        name = tensor.tensor_type.name
        sizes[name] = sizes.get(name, 0) + int(tensor.n_bytes)
    return max(sizes, key=lambda name: sizes[name], default="none")


def _kv_bytes(reader: GGUFReader, architecture: str) -> int:
    def number(key: str, default: int) -> int:
        value = _value(reader, f"{architecture}.{key}", default)
        return int(max(value)) if isinstance(value, list) else int(value)

    return kv_bytes_per_token(number)


def kv_bytes_per_token(number: Callable[[str, int], int]) -> int:
    """Return the bytes of keys and values of one token in all layers, at 16 bits a value.

    ``number`` gives what the header says by a key of the architecture, or a default.
    """
    heads = number("attention.head_count", 1) or 1
    width = number("embedding_length", 0) // heads
    kv_heads = number("attention.head_count_kv", heads)
    keys = number("attention.key_length", width)
    values = number("attention.value_length", width)
    return number("block_count", 0) * kv_heads * (keys + values) * 2


def read_fields(path: Path) -> Callable[[str, Any], Any]:
    """Return a function that gives a header field of the file by its key, or a default.

    Of a file that is no GGUF, or cannot be read, every field has its default.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path, "r")
    except (OSError, ValueError):
        return lambda _key, default: default
    return partial(_value, reader)
