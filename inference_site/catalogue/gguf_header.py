"""The beginning of a GGUF file, read no further than is asked.

The package ``gguf`` reads every token of the vocabulary first: 0.15 s for a small one, seconds for
a large one. What a file is and how long its context is comes before that.
Source: the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
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
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_LONGEST_TEXT, _LONGEST_ARRAY = 2**26, 2**40
"""Bytes: what is longer is no length."""


def metadata(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a file, in its order; an array's value is None.

    Only what is taken is read. Raise ValueError for what is no GGUF file, OSError as ``open`` does.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError("it is not a GGUF file")
        version, _tensors, count = _unpack(file, "IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"its version of GGUF, {version}, is not known")
        for _ in range(count):
            key = _text(file)
            (kind,) = _unpack(file, "I")
            yield key, _value(file, kind)


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind == _ARRAY:
        _skip_array(file)
        return None
    if kind not in _FORMATS:
        raise ValueError(f"it holds a value of the unknown type {kind}")
    return _unpack(file, _FORMATS[kind])[0]


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
