"""The vocabulary of a GGML file of 2023 or of an early GGUF file: read, checked and used.

The library does not notice that a file is truncated, ends its process at a vocabulary that it does
not expect, and has wrong tokenizers. Source: the loaders of
https://github.com/marella/ctransformers 0.2.27.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from ctypes import c_int
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, BinaryIO

from llguidance import LLTokenizer, TokenizerWrapper

from inference_site.catalogue.gguf_files import TOKENS, fields
from inference_site.core.domain.errors import InvalidRequest

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
            if merges is None:
                raise ValueError("it is of an old version without merges; convert it to 'ggcc'")
            if _read(file, "i")[0] != merges:
                raise ValueError("its number of merges is not what its beginning says")
            for _ in range(2 * merges):
                _bytes(file, _read(file, "I")[0])
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
_ADDS_SPACE = "tokenizer.ggml.add_space_prefix"
_USER_DEFINED = 4
"""Type of user-defined tokens, such as tags (GGUF specification)."""


def check_gguf(path: Path) -> None:
    """Raise ValueError for a GGUF file whose vocabulary the library would misread."""
    kind = fields(path, _KIND).get(_KIND, "llama")
    if kind != "llama":
        raise ValueError(f"its vocabulary is of the kind '{kind}'; the engine llama_cpp reads it")


@cache
def own_texts(path: Path) -> dict[int, bytes]:
    """Return the texts of user-defined tokens by id; the library decodes them as nothing."""
    found = fields(path, TOKENS, _TYPES)
    pairs = enumerate(zip(found.get(TOKENS, []), found.get(_TYPES, []), strict=False))
    return {token: text.encode() for token, (text, kind) in pairs if kind == _USER_DEFINED}


def adds_space(path: Path) -> bool:
    """Whether the tokenizer adds a space before a text, as the library always does."""
    return bool(fields(path, _ADDS_SPACE).get(_ADDS_SPACE, True))


_APART = b"\x01"
_MOST_TOKENS = 3
"""Per byte: without SentencePiece's mark for a space, the vocabulary has three tokens for one."""


class Vocabulary:
    """The tokens of one model, without the library's calls that can overrun a buffer.

    ``tokenize`` and ``eos`` replace the library's own. The bytes of tokens are cached: the library
    takes several Python calls for each.
    """

    def __init__(
        self,
        llm: Any,
        own_texts: Mapping[int, bytes],
        *,
        adds_space: bool,
        tokenize: Tokenize | None = None,
        eos: int | None = None,
    ) -> None:
        self._llm, self._own_texts, self._adds_space = llm, own_texts, adds_space
        self._tokenize = tokenize
        self.size: int = llm.vocab_size
        self._not_an_end = llm.eos_token_id if eos is not None else None
        self.eos: int = llm.eos_token_id if eos is None else eos
        self.bos: int = llm.bos_token_id
        self._adds_bos = llm.model_type == "llama"
        self._pieces: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}

    def tokens(self, text: str, begins: bool = True) -> list[int]:
        """Return the tokens of a prompt; ``begins``: with the BOS token, if the model has one."""
        encoded = text.encode()
        if b"\0" in encoded:
            raise InvalidRequest("A prompt cannot hold a NUL.", "prompt")
        without = None if self._adds_space else self._without_space(encoded)
        found = without or self._found(encoded)
        return found if begins or not self._adds_bos else found[1:]

    def _without_space(self, encoded: bytes) -> list[int] | None:
        """Return the tokens without the space that the library puts before each text.

        A control character separates the space from the text; None if a token spans it.
        """
        start = 1 if self._adds_bos else 0
        found = self._found(_APART + encoded)
        if [self.bytes_of(token) for token in found[start : start + 2]] != [b" ", _APART]:
            return None
        return found[:start] + found[start + 2 :]

    def _found(self, encoded: bytes) -> list[int]:
        if self._tokenize is not None:
            return self._tokenize(encoded)
        # The library does not check the size of the buffer. It adds a space and the BOS token.
        found = (c_int * (_MOST_TOKENS * (len(encoded) + 1) + 1))()
        count = self._llm.ctransformers_llm_tokenize(encoded, self._adds_bos, found)
        return list(found[:count])

    def bytes_of(self, token: int) -> bytes:
        """Return the token's bytes; empty for control tokens."""
        if (piece := self._pieces.get(token)) is None:
            piece = self._llm.ctransformers_llm_detokenize(token) or self._own_texts.get(token, b"")
            self._pieces[token] = piece
        return piece

    def is_end(self, token: int) -> bool:
        """Whether the token ends a sequence."""
        if (ends := self._ends.get(token)) is None:
            ends = token != self._not_an_end and bool(self._llm.is_eos_token(token))
            self._ends[token] = ends = ends or token == self.eos
        return ends

    def checked(self, tokens: tuple[int, ...], param: str) -> list[int]:
        """Return these tokens. Raise InvalidRequest for an unknown id."""
        if bad := next((token for token in tokens if token >= self.size), None):
            raise InvalidRequest(f"{bad} is no token of this model.", param)
        return list(tokens)

    @cached_property
    def for_grammars(self) -> LLTokenizer:
        """The vocabulary as a tokenizer of llguidance."""
        return LLTokenizer(TokenizerWrapper(_ForGrammars(self)), n_vocab=self.size)


class _ForGrammars:
    """The interface that llguidance reads a tokenizer by."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos
        self.bos_token_id = vocabulary.bos
        self.tokens = [vocabulary.bytes_of(token) for token in range(vocabulary.size)]
        self.special_token_ids = [vocabulary.eos]
        self._by_bytes = {piece: token for token, piece in enumerate(self.tokens) if piece}
        self._longest = max(map(len, self._by_bytes))

    def __call__(self, text: str | bytes) -> list[int]:
        """Return tokens of exactly these bytes; the library would add a space."""
        rest = text.encode() if isinstance(text, str) else text
        tokens: list[int] = []
        while rest:
            lengths = range(min(self._longest, len(rest)), 0, -1)
            length = next((n for n in lengths if rest[:n] in self._by_bytes), 0)
            if not length:
                break
            tokens.append(self._by_bytes[rest[:length]])
            rest = rest[length:]
        return tokens


Tokenize = Callable[[bytes], list[int]]

_WORDS = re.compile(
    rb"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
)
SPACE = "▁".encode()
_UNKNOWN = 0
_UNKNOWN_COST = 10.0
"""Added to the maximal cost of the vocabulary, as in SentencePiece."""
_SPECIAL = {
    "dollyv2": (b"### End", b"### Instruction:", b"### Response:"),
    "starcoder": (
        *(b"<|system|>", b"<|user|>", b"<|assistant|>", b"<|end|>", b"<|end_of_turn|>"),
        *(b"<fim-prefix>", b"<fim-middle>", b"<fim-suffix>", b"<fim-pad>"),
    ),
}
_SPECIAL["gptbigcode"] = _SPECIAL["starcoder"]


def own_tokenizer(file: GgmlFile) -> Tokenize | None:
    """Return the tokenizer of this file; None: the library's."""
    match file.architecture:
        case "llama" | "falcon":
            return None
        case "replit":
            return Pieces(file)
        case "mpt":
            words = [word.decode().encode("latin-1", "replace") for word in file.words]
        case _:
            words = list(file.words)
    special = [
        word
        for word in _SPECIAL.get(file.architecture, ())
        if file.architecture == "dollyv2" or word in words
    ]
    return Words(words, special)


class Words:
    """GPT-2's words, each split into the longest tokens from left to right.

    Bytes that the vocabulary lacks are left out. ``special`` texts are words of their own.
    """

    def __init__(self, words: list[bytes], special: list[bytes]) -> None:
        self._tokens = {word: token for token, word in enumerate(words) if word}
        self._longest = max(map(len, self._tokens), default=1)
        alternatives = b"|".join(map(re.escape, special))
        self._special = re.compile(alternatives) if special else None

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text."""
        return [token for word in self._words(text) for token in self._cut(word)]

    def _words(self, text: bytes) -> Iterator[bytes]:
        start = 0
        for found in self._special.finditer(text) if self._special else ():
            yield from _WORDS.findall(text[start : found.start()])
            yield found.group()
            start = found.end()
        yield from _WORDS.findall(text[start:])

    def _cut(self, word: bytes) -> Iterator[int]:
        start = 0
        while start < len(word):
            for end in range(min(len(word), start + self._longest), start, -1):
                if (token := self._tokens.get(word[start:end])) is not None:
                    yield token
                    start = end
                    break
            else:
                start += 1


class Pieces:
    """SentencePiece's unigrams: the split into tokens with the highest sum of scores."""

    def __init__(self, file: GgmlFile) -> None:
        scored = enumerate(zip(file.words, file.scores, strict=True))
        self._pieces = {word: (token, -score) for token, (word, score) in scored if word}
        self._longest = max(map(len, self._pieces), default=1)
        self._unknown = max((cost for _, cost in self._pieces.values()), default=0) + _UNKNOWN_COST

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text; a byte that no piece begins with is the unknown token."""
        text = text.replace(b" ", SPACE)
        best: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # Cost, where it began, its token.
        best += [(float("inf"), 0, 0)] * len(text)
        for start in range(len(text)):
            cost = best[start][0]
            if best[start + 1][0] > cost + self._unknown:
                best[start + 1] = cost + self._unknown, start, _UNKNOWN
            for end in range(start + 1, min(len(text), start + self._longest) + 1):
                piece = self._pieces.get(text[start:end])
                if piece is not None and cost + piece[1] < best[end][0]:
                    best[end] = cost + piece[1], start, piece[0]
        tokens, end = [], len(text)
        while end > 0:
            _, end, token = best[end]
            tokens.append(token)
        return tokens[::-1]
