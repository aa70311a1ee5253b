"""A GGML file of 2023, read before the library does.

The library takes a file that was cut off for a whole one, and a vocabulary that is not what it
expects ends its process. What is read here is also what its tokenizers lack: see ``tokenizers``.
Source: the loaders of https://github.com/marella/ctransformers 0.2.27.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from inference_site.catalogue.gguf_files import CHAT_TEMPLATE, TOKENS, fields
from worker.engines.chat.configuration import Vocabulary

_GGML, _GGMF, _GGJT, _GGCC = 0x67676D6C, 0x67676D66, 0x67676A74, 0x67676363
_END = b"<|endoftext|>"
_ALIGNMENT = 32
_LONGEST_WORD, _LARGEST_VOCABULARY = 2**16, 2**22
"""What is more is no length."""


@dataclass(frozen=True, slots=True)
class _Format:
    """``sizes`` are the numbers at the beginning, of which the one at ``words`` counts the words.

    ``counts_again``: the vocabulary begins with its size. ``may_be_aligned``: files with a version
    have tensors at multiples of 32 bytes.
    """

    sizes: int
    words: int = 0
    counts_again: bool = False
    has_scores: bool = False
    is_utf8: bool = False
    may_be_aligned: bool = False


_FORMATS = {
    "gpt2": _Format(6, counts_again=True),
    "starcoder": _Format(6, counts_again=True),
    "gptbigcode": _Format(6, counts_again=True),
    "gptj": _Format(7, counts_again=True),
    "gptneox": _Format(8),
    "dollyv2": _Format(8),
    "mpt": _Format(8, words=4, is_utf8=True),
    "replit": _Format(6, words=4, has_scores=True),
    "llama": _Format(7, has_scores=True, may_be_aligned=True),
    "falcon": _Format(7, has_scores=True, may_be_aligned=True),
}


@dataclass(frozen=True, slots=True)
class GgmlFile:
    """``words`` are the tokens' bytes by id; ``scores`` are empty where a format has none."""

    architecture: str
    words: tuple[bytes, ...]
    scores: tuple[float, ...]

    @property
    def end(self) -> int | None:
        """The token that ends a text, None if it has not the usual name."""
        return self.words.index(_END) if _END in self.words else None


def read_ggml(path: Path, architecture: str) -> GgmlFile:
    """Return the vocabulary of a file. Raise ValueError saying what is wrong with it.

    ``architecture`` is the library's name of it (``library_name``).
    """
    form = _FORMATS[architecture]
    with path.open("rb") as file:
        magic, version = _begin(file, form)
        sizes = _read(file, f"{form.sizes}i")
        merges = _read(file, "i")[0] if magic == _GGCC else None
        count = _vocabulary_size(file, form, sizes)
        has_scores = form.has_scores and not (architecture == "falcon" and magic == _GGML)
        words, scores = _vocabulary(file, count, has_scores)
        if form.is_utf8:
            _check_utf8(words)
        if architecture == "falcon":
            _skip_merges(file, merges)
        is_aligned = form.may_be_aligned and magic in (_GGJT, _GGCC) and version > 0
        _check_tensors(file, path.stat().st_size, is_aligned)
    return GgmlFile(architecture, tuple(words), tuple(scores))


def _begin(file: BinaryIO, form: _Format) -> tuple[int, int]:
    (magic,) = _read(file, "I")
    if magic == _GGML:
        return magic, 0
    if magic not in (_GGMF, _GGJT, _GGCC) or not form.may_be_aligned:
        raise ValueError("it is no GGML file of this architecture")
    return magic, _read(file, "I")[0]


def _vocabulary_size(file: BinaryIO, form: _Format, sizes: tuple[int, ...]) -> int:
    count: int = sizes[form.words]
    if not 0 < count < _LARGEST_VOCABULARY:
        raise ValueError(f"its vocabulary cannot have {count} tokens")
    if form.counts_again and (again := _read(file, "i")[0]) != count:
        raise ValueError(f"it has {again} tokens, but is for {count}")
    return count


def _vocabulary(file: BinaryIO, count: int, has_scores: bool) -> tuple[list[bytes], list[float]]:
    words, scores = [], []
    for number in range(count):
        (length,) = _read(file, "I")
        if length > _LONGEST_WORD:
            raise ValueError(f"its token {number} cannot have {length} bytes")
        words.append(_bytes(file, length))
        if has_scores:
            scores.append(_read(file, "f")[0])
    return words, scores


def _check_utf8(words: list[bytes]) -> None:
    for number, word in enumerate(words):
        try:
            word.decode()
        except UnicodeDecodeError as exc:
            raise ValueError(f"its token {number} is not UTF-8") from exc


def _skip_merges(file: BinaryIO, count: int | None) -> None:
    if count is None:
        raise ValueError("it is of an old version without merges; convert it to 'ggcc'")
    if _read(file, "i")[0] != count:
        raise ValueError("its number of merges is not what its beginning says")
    for _ in range(2 * count):
        _bytes(file, _read(file, "I")[0])


def _check_tensors(file: BinaryIO, size: int, is_aligned: bool) -> None:
    """Walk to the end of the file. Raise ValueError when it ends within a tensor, or has none."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    found = 0
    while file.tell() < size:
        dimensions, length, kind = _read(file, "3i")
        if dimensions not in (1, 2) or not 0 < length < _LONGEST_WORD:
            raise ValueError(f"it is damaged after {found} tensors")
        rows = _read(file, f"{dimensions}i")
        name = _bytes(file, length).decode("utf-8", "replace")
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except ValueError as exc:
            raise ValueError(f"its tensor '{name}' is of the unknown type {kind}") from exc
        if is_aligned:
            file.seek(-file.tell() % _ALIGNMENT, 1)
        elements = rows[0] * (rows[1] if dimensions == 2 else 1)
        end = file.tell() + elements // block * block_bytes
        if min(rows) <= 0 or end > size:
            raise ValueError(f"it ends within its tensor '{name}': a part of it is missing")
        file.seek(end)
        found += 1
    if not found:
        raise ValueError("it has no tensors: a part of it is missing")


def _read(file: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{form}", _bytes(file, struct.calcsize(f"<{form}")))


def _bytes(file: BinaryIO, length: int) -> bytes:
    found = file.read(length)
    if len(found) < length:
        raise ValueError("it ends too early: a part of it is missing")
    return found


_GGUF = b"GGUF"
_KIND, _TYPES = "tokenizer.ggml.model", "tokenizer.ggml.token_type"
_BOS, _EOS = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"
_ADDS_SPACE = "tokenizer.ggml.add_space_prefix"
_USER_DEFINED = 4
"""Type of tokens that stand for a text of their own, as tags do (GGUF specification)."""


def is_gguf(path: Path) -> bool:
    """Whether the file says that it is GGUF. Raise OSError as ``open`` does."""
    with path.open("rb") as file:
        return file.read(len(_GGUF)) == _GGUF


def check_gguf(path: Path) -> None:
    """Raise ValueError for a GGUF file with a vocabulary that the library reads wrongly."""
    kind = fields(path, _KIND).get(_KIND, "llama")
    if kind != "llama":
        raise ValueError(f"its vocabulary is of the kind '{kind}'; the engine llama_cpp reads it")


@cache
def chat_vocabulary(path: Path) -> Vocabulary:
    """Return what the file says of chats; nothing when it is no GGUF, or not on this host."""
    found = fields(path, TOKENS, CHAT_TEMPLATE, _BOS, _EOS)
    tokens = found.get(TOKENS, [])

    def text(key: str) -> str:
        number = found.get(key)
        return tokens[number] if isinstance(number, int) and number < len(tokens) else ""

    return Vocabulary(chat_template=found.get(CHAT_TEMPLATE), bos=text(_BOS), eos=text(_EOS))


@cache
def own_texts(path: Path) -> dict[int, bytes]:
    """Return the texts of the tokens that the library shows as nothing, by their ids."""
    found = fields(path, TOKENS, _TYPES)
    pairs = enumerate(zip(found.get(TOKENS, []), found.get(_TYPES, []), strict=False))
    return {token: text.encode() for token, (text, kind) in pairs if kind == _USER_DEFINED}


def adds_space(path: Path) -> bool:
    """Whether the model was trained on texts with a space before them, as the library assumes."""
    return bool(fields(path, _ADDS_SPACE).get(_ADDS_SPACE, True))
