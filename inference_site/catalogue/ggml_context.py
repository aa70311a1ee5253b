"""The context of a GGML file of 2023, which its model cannot exceed."""

from __future__ import annotations

import struct
from pathlib import Path

_MAGIC = 0x67676D6C
_NAMING = ("gpt2", "starcoder", "gptbigcode", "gptj", "gptneox", "dollyv2", "mpt", "replit")
"""Architectures whose files begin with a magic number, another size, and the context."""


def ggml_context(file: Path, architecture: str) -> int | None:
    """Return the tokens of the context; None if the file does not say, or cannot be read.

    ``architecture`` is the library's name of it.
    """
    if architecture not in _NAMING:
        return None
    try:
        with file.open("rb") as opened:
            magic, _, context = struct.unpack("<Iii", opened.read(12))
    except (OSError, struct.error):
        return None
    return context if magic == _MAGIC and context > 0 else None
