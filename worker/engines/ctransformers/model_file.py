"""What a GGUF file says that the library does not pass on: its chat template and its own tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from inference_site.catalogue.gguf_file import read_fields
from worker.engines.chat.configuration import Vocabulary

_GGUF = b"GGUF"
_USER_DEFINED = 4
"""Type of tokens that stand for a text of their own, as tags do (GGUF specification)."""


def is_gguf(path: Path) -> bool:
    """Whether the file says that it is GGUF. Raise OSError as ``open`` does."""
    with path.open("rb") as file:
        return file.read(len(_GGUF)) == _GGUF


def check_gguf(path: Path) -> None:
    """Raise ValueError for a GGUF file with a vocabulary that the library reads wrongly."""
    kind = read_fields(path)("tokenizer.ggml.model", "llama")
    if kind != "llama":
        raise ValueError(f"its vocabulary is of the kind '{kind}'; the engine llama_cpp reads it")


@cache
def chat_vocabulary(path: Path) -> Vocabulary:
    """Return what the file says of chats; nothing when it is no GGUF, or not on this host."""
    field = read_fields(path)
    tokens = field("tokenizer.ggml.tokens", [])

    def text(key: str) -> str:
        number = field(key, None)
        return tokens[number] if isinstance(number, int) and number < len(tokens) else ""

    return Vocabulary(
        chat_template=field("tokenizer.chat_template", None),
        bos=text("tokenizer.ggml.bos_token_id"),
        eos=text("tokenizer.ggml.eos_token_id"),
    )


@cache
def own_texts(path: Path) -> dict[int, bytes]:
    """Return the texts of the tokens that the library shows as nothing, by their ids."""
    field = read_fields(path)
    tokens, types = field("tokenizer.ggml.tokens", []), field("tokenizer.ggml.token_type", [])
    pairs = enumerate(zip(tokens, types, strict=False))
    return {token: text.encode() for token, (text, kind) in pairs if kind == _USER_DEFINED}


def adds_space(path: Path) -> bool:
    """Whether the model was trained on texts with a space before them, as the library assumes."""
    return bool(read_fields(path)("tokenizer.ggml.add_space_prefix", True))
