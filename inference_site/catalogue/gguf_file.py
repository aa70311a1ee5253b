"""All fields of a GGUF file, also the vocabulary, which ``gguf_header`` does not read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_fields(path: Path) -> Callable[[str, Any], Any]:
    """Return a function that gives a header field of the file by its key, or a default.

    Of a file that is no GGUF, or cannot be read, every field has its default.
    """
    from gguf import GGUFReader  # Brings numpy, which web processes have no other use for.

    try:
        fields = GGUFReader(path, "r").fields
    except (OSError, ValueError):
        return lambda _key, default: default

    def value(key: str, default: Any) -> Any:
        field = fields.get(key)
        return default if field is None else field.contents()

    return value
