"""What a GGUF file says that the library does not pass on: its chat template and its own tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from inference_site.catalogue.gguf_header import CHAT_TEMPLATE, TOKENS, fields
from worker.engines.chat.configuration import Vocabulary

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
