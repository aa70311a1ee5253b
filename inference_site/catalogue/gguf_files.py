"""The beginning of a GGUF file, read no further than is asked.

The package ``gguf`` reads every token of the vocabulary first: 0.15 s for a small one, seconds for
a large one. What a file is and how long its context is comes before that.
Source: the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

_FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
CHAT_TEMPLATE, TOKENS = "tokenizer.chat_template", "tokenizer.ggml.tokens"
"""Keys of the header."""
_SPECIAL_TOKENS = ("bos", "eos", "unknown", "padding")
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_LONGEST_TEXT, _LONGEST_ARRAY = 2**26, 2**40
"""Bytes: what is longer is no length."""
_ALIGNMENT, _MOST_DIMENSIONS = 32, 4


_PART = re.compile(r"-(\d{1,9})-of-(\d{1,9})$")
_MOST_PARTS = 1000
"""A name with a larger number is that of a file which is whole: each part takes memory and time."""


def _part(path: Path) -> re.Match[str] | None:
    """Return the number and the count in the name of a part of a split file."""
    found = _PART.search(path.stem)
    is_part = found is not None and 1 <= int(found[1]) <= int(found[2]) <= _MOST_PARTS
    return found if is_part else None


def is_later_part(path: Path) -> bool:
    """Return whether it is a part of a split file, and not the first."""
    found = _part(path)
    return found is not None and int(found[1]) > 1


def parts_of(path: Path) -> list[Path]:
    """Return all parts of a split file by its first; other files have one."""
    found = _part(path)
    if found is None:
        return [path]
    number, count = found[1], int(found[2])
    stem = path.stem[: found.start()]
    names = (f"{stem}-{n:0{len(number)}}-of-{found[2]}" for n in range(1, count + 1))
    return [path.with_name(f"{name}{path.suffix}") for name in names]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as the header describes it. ``kind`` is the number of its type in GGML.

    ``offset`` is from the end of the header on. ``size_bytes`` is 0 for a type of a later GGML.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    size_bytes: int


def metadata(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a file, in its order; an array's value is None.

    Only what is taken is read. Raise ValueError for what is no GGUF file, OSError as ``open`` does.
    """
    with path.open("rb") as file:
        _tensors, count = _begin(file)
        yield from _pairs(file, count)


def fields(path: Path, *keys: str) -> dict[str, Any]:
    """Return those of these keys that a file has, arrays as lists; none of what is no GGUF file."""
    found: dict[str, Any] = {}
    try:
        with path.open("rb") as file:
            _tensors, count = _begin(file)
            for key, value in _pairs(file, count, keys):
                if key in keys:
                    found[key] = value
                if len(found) == len(keys):
                    break
    except (OSError, ValueError):
        return {}
    return found


def chat_template(path: Path) -> str | None:
    """Return the chat template of a file, if it is a GGUF file and has one."""
    template: str | None = fields(path, CHAT_TEMPLATE).get(CHAT_TEMPLATE)
    return template


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a file says of its tokenizer.

    ``kind`` is the algorithm as GGUF names it: ``llama`` (SentencePiece), ``gpt2`` (BPE), ``bert``
    (WordPiece), ``t5`` … ``special`` has the texts of the tokens ``bos``, ``eos``, ``unknown`` and
    ``padding``, where there are such.
    """

    kind: str
    special: dict[str, str]
    adds_bos: bool | None
    adds_eos: bool | None


@cache
def tokenizer_facts(path: Path) -> TokenizerFacts | None:
    """Return what a GGUF file says of its tokenizer; None for what is none or has none."""
    ids = {name: f"tokenizer.ggml.{name}_token_id" for name in _SPECIAL_TOKENS}
    adds = [f"tokenizer.ggml.add_{name}_token" for name in ("bos", "eos")]
    found = fields(path, "tokenizer.ggml.model", TOKENS, *ids.values(), *adds)
    tokens = found.get(TOKENS)
    if tokens is None:
        return None
    special = {
        name: tokens[found[key]] for name, key in ids.items() if found.get(key, -1) < len(tokens)
    }
    return TokenizerFacts(
        str(found.get("tokenizer.ggml.model", "")),
        {name: text for name, text in special.items() if ids[name] in found},
        *(found.get(key) for key in adds),
    )


def model_context(path: Path) -> int | None:
    """Return the context length of a model, 0 if it does not say; None for what is no model.

    Files say what they are before their vocabulary, which is long and is not read. Raise as
    ``metadata`` does.
    """
    found = beginning(path)
    is_projector = found.get("general.architecture") == "clip"
    if found.get("general.type", "mmproj" if is_projector else "model") != "model":
        return None
    return int(found.get(f"{found.get('general.architecture')}.context_length") or 0)


def beginning(path: Path) -> dict[str, Any]:
    """Return the keys that come before the vocabulary: what the model is, and its sizes.

    Of a file that has its context after the vocabulary, return more. Raise as ``metadata`` does.
    """
    found: dict[str, Any] = {}
    for key, value in metadata(path):
        found[key] = value
        length = found.get(f"{found.get('general.architecture')}.context_length")
        if length is not None and key.startswith("tokenizer."):
            break
    return found


def check_whole(path: Path) -> None:
    """Read all of the header. Raise ValueError if not all of the tensors that it names are there.

    It takes 0.2 s for a large vocabulary. Raise as ``metadata`` does, too.
    """
    with path.open("rb") as file:
        found, tensors = _whole_header(file)
        length = max((tensor.offset + tensor.size_bytes for tensor in tensors), default=0)
        step = int(found.get("general.alignment") or _ALIGNMENT)
        whole = -(-file.tell() // step) * step + length
        size = file.seek(0, 2)
    if size < whole:
        raise ValueError(f"it is cut short: it has {size:,} of {whole:,} bytes")


def header(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """Return all keys, with None for arrays, and all tensors of a file.

    It takes 0.2 s for a large vocabulary. Raise as ``metadata`` does.
    """
    with path.open("rb") as file:
        return _whole_header(file)


def _whole_header(file: BinaryIO) -> tuple[dict[str, Any], list[Tensor]]:
    tensors, count = _begin(file)
    found = dict(_pairs(file, count))
    return found, [_tensor(file) for _ in range(tensors)]


def _begin(file: BinaryIO) -> tuple[int, int]:
    """Return how many tensors and how many keys there are."""
    if file.read(4) != b"GGUF":
        raise ValueError("it is not a GGUF file")
    version, tensors, count = _unpack(file, "IQQ")
    if version not in _VERSIONS:
        raise ValueError(f"its version of GGUF, {version}, is not known")
    return tensors, count


def _pairs(file: BinaryIO, count: int, arrays: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values; of arrays, only those of the keys ``arrays`` are read."""
    for _ in range(count):
        key = _text(file)
        (kind,) = _unpack(file, "I")
        is_wanted = kind == _ARRAY and key in arrays
        yield key, _array(file) if is_wanted else _value(file, kind)


def _tensor(file: BinaryIO) -> Tensor:
    name = _text(file)
    (dimensions,) = _unpack(file, "I")
    if dimensions > _MOST_DIMENSIONS:
        raise ValueError("it is damaged")
    shape = _unpack(file, f"{dimensions}Q")
    kind, offset = _unpack(file, "IQ")
    in_block, block_bytes = _block_sizes().get(int(kind), (1, 0))
    return Tensor(name, shape, kind, offset, math.prod(shape) // in_block * block_bytes)


@cache
def _block_sizes() -> dict[int, tuple[int, int]]:
    """Return how many elements a block of each type has, and its bytes."""
    from gguf.constants import GGML_QUANT_SIZES  # Brings numpy, which few processes use.

    return {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind == _ARRAY:
        _skip_array(file)
        return None
    if kind not in _FORMATS:
        raise ValueError(f"it holds a value of the unknown type {kind}")
    return _unpack(file, _FORMATS[kind])[0]


def _array(file: BinaryIO) -> list[Any]:
    kind, count = _unpack(file, "IQ")
    if kind in _FORMATS:
        length = count * struct.calcsize(_FORMATS[kind])
        if length > _LONGEST_TEXT:
            raise ValueError("it is damaged")
        return list(struct.unpack(f"<{count}{_FORMATS[kind]}", _read(file, length)))
    if kind != _STRING:
        raise ValueError(f"it holds an array of the type {kind}")
    return [_text(file) for _ in range(count)]


def _skip_array(file: BinaryIO) -> None:
    kind, count = _unpack(file, "IQ")
    if kind in _FORMATS:
        _skip(file, count * struct.calcsize(_FORMATS[kind]))
        return
    if kind != _STRING:
        raise ValueError(f"it holds an array of the type {kind}")
    for _ in range(count):
        _skip(file, _unpack(file, "Q")[0])


def _skip(file: BinaryIO, length: int) -> None:
    if length > _LONGEST_ARRAY:
        raise ValueError("it is damaged")
    file.seek(length, 1)


def _text(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    if length > _LONGEST_TEXT:
        raise ValueError("it is damaged")
    return _read(file, length).decode("utf-8", "replace")


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    layout = f"<{layout}"
    return struct.unpack(layout, _read(file, struct.calcsize(layout)))


def _read(file: BinaryIO, length: int) -> bytes:
    data = file.read(length)
    if len(data) < length:
        raise ValueError("it is cut short")
    return data
