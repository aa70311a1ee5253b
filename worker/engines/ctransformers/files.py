"""Checks and vocabularies of GGML files of 2023 and of early GGUF files.

The library does not notice that a file is truncated, and a vocabulary that it does not expect ends
its process. So files are read here first. The vocabularies are also used by the tokenizers of
``vocabulary``. Source: the loaders of https://github.com/marella/ctransformers 0.2.27.
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
"""Greater numbers mean that the file is damaged."""


@dataclass(frozen=True, slots=True)
class _Format:
    """The header of an architecture's files: ``sizes`` numbers.

    The one at ``words`` is the size of the vocabulary. ``counts_again``: the vocabulary begins with
    its size. ``may_be_aligned``: files with a version align tensors at 32 bytes.
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
        """The end token; None if the vocabulary has none of the usual name."""
        return self.words.index(_END) if _END in self.words else None


def read_ggml(path: Path, architecture: str) -> GgmlFile:
    """Return the vocabulary of a file. Raise ValueError with the reason if it is damaged.

    ``architecture`` is the library's name of it (``library_name``).
    """
    form = _FORMATS[architecture]
    with path.open("rb") as file:
        (magic,) = _read(file, "I")
        if magic != _GGML and (magic not in (_GGMF, _GGJT, _GGCC) or not form.may_be_aligned):
            raise ValueError("it is no GGML file of this architecture")
        version = 0 if magic == _GGML else _read(file, "I")[0]
        sizes = _read(file, f"{form.sizes}i")
        merges = _read(file, "i")[0] if magic == _GGCC else None
        has_scores = form.has_scores and not (architecture == "falcon" and magic == _GGML)
        words, scores = _vocabulary(file, form, sizes[form.words], has_scores)
        if architecture == "falcon":
            _skip_merges(file, merges)
        is_aligned = form.may_be_aligned and magic in (_GGJT, _GGCC) and version > 0
        _check_tensors(file, path.stat().st_size, is_aligned)
    return GgmlFile(architecture, tuple(words), tuple(scores))


def _vocabulary(
    file: BinaryIO, form: _Format, count: int, has_scores: bool
) -> tuple[list[bytes], list[float]]:
    if not 0 < count < _LARGEST_VOCABULARY:
        raise ValueError(f"its vocabulary cannot have {count} tokens")
    if form.counts_again and (again := _read(file, "i")[0]) != count:
        raise ValueError(f"it has {again} tokens, but is for {count}")
    words, scores = [], []
    for number in range(count):
        (length,) = _read(file, "I")
        if length > _LONGEST_WORD:
            raise ValueError(f"its token {number} cannot have {length} bytes")
        words.append(_bytes(file, length))
        if has_scores:
            scores.append(_read(file, "f")[0])
    for number, word in enumerate(words if form.is_utf8 else ()):
        try:
            word.decode()
        except UnicodeDecodeError as exc:
            raise ValueError(f"its token {number} is not UTF-8") from exc
    return words, scores


def _skip_merges(file: BinaryIO, count: int | None) -> None:
    if count is None:
        raise ValueError("it is of an old version without merges; convert it to 'ggcc'")
    if _read(file, "i")[0] != count:
        raise ValueError("its number of merges is not what its beginning says")
    for _ in range(2 * count):
        _bytes(file, _read(file, "I")[0])


def _check_tensors(file: BinaryIO, size: int, is_aligned: bool) -> None:
    """Read all headers of tensors. Raise ValueError for a truncated file, or one without any."""
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


_KIND, _TYPES = "tokenizer.ggml.model", "tokenizer.ggml.token_type"
_BOS, _EOS = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"
_ADDS_SPACE = "tokenizer.ggml.add_space_prefix"
_USER_DEFINED = 4
"""Type of user-defined tokens, such as tags (GGUF specification)."""


def check_gguf(path: Path) -> None:
    """Raise ValueError for a GGUF file whose vocabulary the library would misread."""
    kind = fields(path, _KIND).get(_KIND, "llama")
    if kind != "llama":
        raise ValueError(f"its vocabulary is of the kind '{kind}'; the engine llama_cpp reads it")


@cache
def chat_vocabulary(path: Path) -> Vocabulary:
    """Return the file's template and tokens for chats; empty if it is no GGUF, or missing."""
    found = fields(path, TOKENS, CHAT_TEMPLATE, _BOS, _EOS)
    tokens = found.get(TOKENS, [])

    def text(key: str) -> str:
        number = found.get(key)
        return tokens[number] if isinstance(number, int) and number < len(tokens) else ""

    return Vocabulary(chat_template=found.get(CHAT_TEMPLATE), bos=text(_BOS), eos=text(_EOS))


@cache
def own_texts(path: Path) -> dict[int, bytes]:
    """Return the texts of user-defined tokens by id; the library decodes them as nothing."""
    found = fields(path, TOKENS, _TYPES)
    pairs = enumerate(zip(found.get(TOKENS, []), found.get(_TYPES, []), strict=False))
    return {token: text.encode() for token, (text, kind) in pairs if kind == _USER_DEFINED}


def adds_space(path: Path) -> bool:
    """Whether the tokenizer adds a space before a text, as the library always does."""
    return bool(fields(path, _ADDS_SPACE).get(_ADDS_SPACE, True))
