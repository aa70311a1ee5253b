"""Models that are found in a folder: by what their files say, without reading them whole."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from unittest.mock import patch

import gguf
import pytest

from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.catalogue.discovery import discover
from inference_site.catalogue.gguf_header import metadata
from tests.tiny_vision import write_projector
from tests.tiny_weights import write_adapter, write_model

WHOLE = DEMO_FILE.read_bytes()


def test_models_are_found_and_what_is_no_model_is_not(tmp_path: Path) -> None:
    write_model(tmp_path / "Tiny.gguf")
    write_adapter(tmp_path / "adapter.gguf")
    write_projector(tmp_path / "projector.gguf", 192)
    found = discover(tmp_path)
    assert [(spec.id, spec.context_length) for spec in found] == [("tiny", 2048)]


def test_the_vocabulary_is_not_read(tmp_path: Path) -> None:
    """Its tokens are cut off, and nobody notices."""
    keys = [key for key, _value in metadata(DEMO_FILE)]
    assert any(key.startswith("tokenizer.") for key in keys)
    short = WHOLE[: WHOLE.index(b"tokenizer.ggml.tokens") + 100]
    (tmp_path / "m.gguf").write_bytes(short)
    assert [spec.context_length for spec in discover(tmp_path)] == [2048]


def test_metadata_are_those_that_the_library_reads() -> None:
    fields = gguf.GGUFReader(DEMO_FILE).fields
    found = dict(metadata(DEMO_FILE))
    single = {key: value for key, value in found.items() if value is not None}
    assert single == {key: fields[key].contents() for key in single}
    assert {key for key in fields if not key.startswith("GGUF.")} == found.keys()


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(*entries: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(entries)) + b"".join(entries)


ARRAY = text(b"a") + struct.pack("<I", 9)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"PK\x03\x04", "not a GGUF file"),
        (b"GGUF", "cut short"),
        (header(version=1), "version of GGUF, 1,"),
        (header(text(b"a") + struct.pack("<I", 99)), "unknown type 99"),
        (header(struct.pack("<Q", 2**63)), "damaged"),
        (header(ARRAY + struct.pack("<IQ", 10, 2**63)), "damaged"),
        (header(ARRAY + struct.pack("<IQ", 8, 2**63)), "cut short"),
        (header(ARRAY + struct.pack("<IQ", 9, 1)), "array of the type 9"),
    ],
)
def test_what_cannot_be_read_is_told_and_left_out(
    tmp_path: Path, content: bytes, told: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=told):
        list(metadata(path))
    with patch("inference_site.catalogue.discovery.logger") as logger:
        assert discover(tmp_path) == []
    assert logger.warning.call_args.args[1] == path


def test_damage_anywhere_is_an_error_or_nothing(tmp_path: Path) -> None:
    chance, path = random.Random(5), tmp_path / "m.gguf"
    start = WHOLE[: WHOLE.index(b"tokenizer.ggml.tokens") + 500]
    for _ in range(500):
        damaged = bytearray(start)
        for _ in range(3):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            list(metadata(path))
        except ValueError:
            continue
