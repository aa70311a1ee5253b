"""From a text to tokens, for the architectures whose tokenizers in the library do harm.

Theirs of GPT-2 and its kin recurses once for each letter of a word, and a long word overflows the
stack; that of Replit takes the third power of a text's length and ends the process for an empty
one. These give the same tokens, in a time that grows with the length of the text alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from worker.engines.ctransformers.ggml_file import GgmlFile

Tokenize = Callable[[bytes], list[int]]

_WORDS = re.compile(
    rb"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
)
SPACE = "▁".encode()
_UNKNOWN = 0
_UNKNOWN_COST = 10.0
"""More than any token of the vocabulary, as SentencePiece has it."""
_SPECIAL = {
    "dollyv2": (b"### End", b"### Instruction:", b"### Response:"),
    "starcoder": (
        *(b"<|system|>", b"<|user|>", b"<|assistant|>", b"<|end|>", b"<|end_of_turn|>"),
        *(b"<fim-prefix>", b"<fim-middle>", b"<fim-suffix>", b"<fim-pad>"),
    ),
}
_SPECIAL["gptbigcode"] = _SPECIAL["starcoder"]


def own_tokenizer(file: GgmlFile) -> Tokenize | None:
    """Return the tokenizer of this file, None where the library's is used."""
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
    """GPT-2's words, each cut into the longest tokens from its beginning on.

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
    """SentencePiece's unigrams: the cut into tokens whose scores add up to the most."""

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
