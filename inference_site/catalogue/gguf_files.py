"""GGUF files: the parts of split files, and a reader of their headers.

The package ``gguf`` reads every token of the vocabulary first: 0.15 s for a small vocabulary,
seconds for a large one. This reader stops at the keys that are asked for; the type of a file and
its context length come before the vocabulary.
Source: the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, TypeVar

GGUF_MAGIC = b"GGUF"
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
"""Keys of the metadata."""
_SPECIAL_TOKENS = ("bos", "eos", "unknown", "padding")
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_TEXT_BYTES, _MAX_ARRAY_BYTES = 2**26, 2**40
"""A larger length means that the file is damaged."""
_DEFAULT_ALIGNMENT, _MAX_DIMENSIONS = 32, 4
_CACHED_FILES = 256
Fact = TypeVar("Fact")


_PART = re.compile(r"-(\d{1,9})-of-(\d{1,9})$")
_MAX_PARTS = 1000
"""A file with a larger number in its name counts as one file: each part costs memory and time."""


def _match_part(path: Path) -> re.Match[str] | None:
    """Match the number and the count in the name of a part of a split file."""
    match = _PART.search(path.stem)
    is_part = match is not None and 1 <= int(match[1]) <= int(match[2]) <= _MAX_PARTS
    return match if is_part else None


def is_later_part(path: Path) -> bool:
    """Whether the file is a part of a split file, but not the first part."""
    match = _match_part(path)
    return match is not None and int(match[1]) > 1


def parts_of(path: Path) -> list[Path]:
    """Return the paths of all parts of a split file; a list of one path for another file."""
    match = _match_part(path)
    if match is None:
        return [path]
    number, count = match[1], int(match[2])
    stem = path.stem[: match.start()]
    names = (f"{stem}-{n:0{len(number)}}-of-{match[2]}" for n in range(1, count + 1))
    return [path.with_name(f"{name}{path.suffix}") for name in names]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as the header describes it. ``kind`` is the number of its GGML type.

    ``offset`` counts from the end of the header. ``size_bytes`` is 0 for an unknown type.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    size_bytes: int


def cached_until_replaced(read: Callable[[Path], Fact]) -> Callable[[Path], Fact]:
    """Cache what a function reads from a file until the file is replaced or changed."""

    @lru_cache(_CACHED_FILES)
    def cached(path: Path, _inode: int, _size_bytes: int, _changed_at_ns: int) -> Fact:
        return read(path)

    @wraps(read)
    def current(path: Path) -> Fact:
        try:
            found = path.stat()
        except OSError:
            return read(path)
        return cached(path, found.st_ino, found.st_size, found.st_mtime_ns)

    return current


def is_gguf(path: Path) -> bool:
    """Whether the file begins as GGUF. Raise OSError as ``open`` does."""
    with path.open("rb") as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def metadata(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a file in order; the value of an array is None. It reads lazily.

    Raise ValueError for a file that is not GGUF, and OSError as ``open`` does.
    """
    with path.open("rb") as file:
        _tensor_count, pair_count = _read_counts(file)
        yield from _read_pairs(file, pair_count)


def fields(path: Path, *keys: str) -> dict[str, Any]:
    """Return the values of these keys, arrays as lists; nothing for a file that is not GGUF."""
    found: dict[str, Any] = {}
    try:
        with path.open("rb") as file:
            _tensor_count, pair_count = _read_counts(file)
            for key, value in _read_pairs(file, pair_count, keys):
                if key in keys:
                    found[key] = value
                if len(found) == len(keys):
                    break
    except (OSError, ValueError):
        return {}
    return found


def chat_template(path: Path) -> str | None:
    """Return the chat template of a GGUF file; None without one, or for another file."""
    template: str | None = fields(path, CHAT_TEMPLATE).get(CHAT_TEMPLATE)
    return template


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """The tokenizer of a file.

    ``kind`` is the algorithm in GGUF's terms: ``llama`` (SentencePiece), ``gpt2`` (BPE), ``bert``
    (WordPiece), ``t5`` … ``special`` has the texts of the tokens ``bos``, ``eos``, ``unknown`` and
    ``padding`` that the file defines.
    """

    kind: str
    special: dict[str, str]
    adds_bos: bool | None
    adds_eos: bool | None


@cached_until_replaced
def tokenizer_facts(path: Path) -> TokenizerFacts | None:
    """Return the tokenizer of a GGUF file; None without one, or for another file."""
    id_keys = {name: f"tokenizer.ggml.{name}_token_id" for name in _SPECIAL_TOKENS}
    add_keys = [f"tokenizer.ggml.add_{name}_token" for name in ("bos", "eos")]
    found = fields(path, "tokenizer.ggml.model", TOKENS, *id_keys.values(), *add_keys)
    tokens = found.get(TOKENS)
    if tokens is None:
        return None
    special = {
        name: tokens[found[key]]
        for name, key in id_keys.items()
        if key in found and found[key] < len(tokens)
    }
    kind = str(found.get("tokenizer.ggml.model", ""))
    return TokenizerFacts(kind, special, *(found.get(key) for key in add_keys))


def model_context(path: Path) -> int | None:
    """Return the context length of a model, 0 if unknown; None for a projector or an adapter.

    The vocabulary is not read. Raise as ``metadata`` does.
    """
    found = metadata_before_vocabulary(path)
    architecture = found.get("general.architecture")
    if found.get("general.type", "mmproj" if architecture == "clip" else "model") != "model":
        return None
    return int(found.get(f"{architecture}.context_length") or 0)


def metadata_before_vocabulary(path: Path) -> dict[str, Any]:
    """Return the keys before the vocabulary: the type, the architecture and the sizes of a model.

    If the context length comes after the vocabulary, read on until there. Raise as ``metadata``
    does.
    """
    found: dict[str, Any] = {}
    for key, value in metadata(path):
        found[key] = value
        length = found.get(f"{found.get('general.architecture')}.context_length")
        if length is not None and key.startswith("tokenizer."):
            break
    return found


def check_complete(path: Path) -> None:
    """Read the whole header; raise ValueError if the file ends before its last tensor does.

    It takes 0.2 s for a large vocabulary. Raise as ``metadata`` does, too.
    """
    with path.open("rb") as file:
        found, tensors = _read_header(file)
        length = max((tensor.offset + tensor.size_bytes for tensor in tensors), default=0)
        alignment = int(found.get("general.alignment") or _DEFAULT_ALIGNMENT)
        expected = -(-file.tell() // alignment) * alignment + length
        size = file.seek(0, 2)
    if size < expected:
        raise ValueError(f"it is cut short: it has {size:,} of {expected:,} bytes")


def header(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """Return all keys, with None for arrays, and all tensors of a file.

    It takes 0.2 s for a large vocabulary. Raise as ``metadata`` does.
    """
    with path.open("rb") as file:
        return _read_header(file)


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], list[Tensor]]:
    tensor_count, pair_count = _read_counts(file)
    found = dict(_read_pairs(file, pair_count))
    tensors = []
    for _ in range(tensor_count):
        name = _read_text(file)
        (dimensions,) = _unpack(file, "I")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError("it is damaged")
        shape = _unpack(file, f"{dimensions}Q")
        kind, offset = _unpack(file, "IQ")
        block_elements, block_bytes = _block_sizes().get(int(kind), (1, 0))
        size = math.prod(shape) // block_elements * block_bytes
        tensors.append(Tensor(name, shape, kind, offset, size))
    return found, tensors


def _read_counts(file: BinaryIO) -> tuple[int, int]:
    """Return the numbers of tensors and of key-value pairs."""
    if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
        raise ValueError("it is not a GGUF file")
    version, tensor_count, pair_count = _unpack(file, "IQQ")
    if version not in _VERSIONS:
        raise ValueError(f"its version of GGUF, {version}, is not known")
    return tensor_count, pair_count


def _read_pairs(
    file: BinaryIO, count: int, arrays: Collection[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values; arrays are read only for the keys in ``arrays``, else skipped."""
    for _ in range(count):
        key = _read_text(file)
        (kind,) = _unpack(file, "I")
        if kind == _STRING:
            yield key, _read_text(file)
        elif kind == _ARRAY:
            yield key, _read_array(file, is_wanted=key in arrays)
        elif kind in _FORMATS:
            yield key, _unpack(file, _FORMATS[kind])[0]
        else:
            raise ValueError(f"it holds a value of the unknown type {kind}")


def _read_array(file: BinaryIO, is_wanted: bool) -> list[Any] | None:
    """Read an array, or skip it and return None."""
    kind, count = _unpack(file, "IQ")
    if kind == _STRING:
        if is_wanted:
            return [_read_text(file) for _ in range(count)]
        for _ in range(count):
            _skip(file, _unpack(file, "Q")[0])
        return None
    if kind not in _FORMATS:
        raise ValueError(f"it holds an array of the type {kind}")
    length = count * struct.calcsize(_FORMATS[kind])
    if not is_wanted:
        _skip(file, length)
        return None
    if length > _MAX_TEXT_BYTES:
        raise ValueError("it is damaged")
    return list(struct.unpack(f"<{count}{_FORMATS[kind]}", _read(file, length)))


@cache
def _block_sizes() -> dict[int, tuple[int, int]]:
    """Return the elements and the bytes of a block of each GGML type."""
    return {int(kind): size for kind, size in gguf_constants().GGML_QUANT_SIZES.items()}


@cache
def gguf_constants() -> ModuleType:
    """Return the module ``gguf.constants``, loaded from its file.

    An import of it runs the package ``gguf`` first, which imports numpy: 12 MiB in each worker.
    """
    package = find_spec("gguf")
    assert package is not None
    spec = PathFinder.find_spec("gguf.constants", package.submodule_search_locations)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _skip(file: BinaryIO, length: int) -> None:
    if length > _MAX_ARRAY_BYTES:
        raise ValueError("it is damaged")
    file.seek(length, 1)


def _read_text(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    if length > _MAX_TEXT_BYTES:
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
