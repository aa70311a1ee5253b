"""Models that are found in a folder: by what their files say, without reading them whole."""

from __future__ import annotations

import os
import random
import shutil
import struct
import tracemalloc
from pathlib import Path
from unittest.mock import patch

import gguf
import pytest

from inference_site.catalogue.catalogue import DEMO_FILE, discover
from inference_site.catalogue.engines.ctransformers import has_chat
from inference_site.catalogue.gguf_files import is_later_part, metadata, parts_of, tokenizer_facts
from inference_site.catalogue.model_files import file_below, file_error, is_weights
from inference_site.core.domain.model_spec import ModelSpec
from tests.tiny_vision import write_projector
from tests.tiny_weights import write_adapter, write_model
from worker.engines.ctransformers.launch import chat_vocabulary

WHOLE = DEMO_FILE.read_bytes()


def test_models_are_found_and_what_is_no_model_is_not(tmp_path: Path) -> None:
    write_model(tmp_path / "Tiny.gguf")
    write_adapter(tmp_path / "adapter.gguf")
    write_projector(tmp_path / "projector.gguf", 192)
    found = discover(tmp_path)
    assert [(spec.id, spec.context_length) for spec in found] == [("tiny", 2048)]


def test_files_whose_names_can_be_no_ids_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path / "Tiny.gguf")
    for name in (os.fsdecode(b"bad\xff.gguf"), f"{'m' * 201}.gguf", "a\tb.gguf"):
        shutil.copy(tmp_path / "Tiny.gguf", tmp_path / name)
    assert [spec.id for spec in discover(tmp_path)] == ["tiny"]
    assert len([line for line in caplog.messages if "200 printable characters" in line]) == 3


@pytest.mark.timeout(30)
def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """A pipe held up the thread that watches for models, and each page that lists the files."""
    write_model(tmp_path / "Tiny.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "endless.gguf").symlink_to("/dev/zero")
    assert [spec.id for spec in discover(tmp_path)] == ["tiny"]
    assert file_error(tmp_path / "pipe.gguf").endswith("is a pipe, a socket or a device")


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


def test_facts_of_a_file_that_was_replaced_are_those_of_the_new_file(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    spec = ModelSpec("m", "ctransformers", file)
    assert (tokenizer_facts(file), has_chat(spec)) == (None, False), "it is not there yet"
    for template, bos in (("{{ a }}", "<s>"), (None, "<b>")):
        writer = gguf.GGUFWriter(tmp_path / "new.gguf", "llama")
        writer.add_tokenizer_model("llama")
        writer.add_token_list([bos, "</s>"])
        writer.add_bos_token_id(0)
        if template:
            writer.add_chat_template(template)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        (tmp_path / "new.gguf").rename(file)
        facts = tokenizer_facts(file)
        assert facts is not None
        assert facts.special == {"bos": bos}
        assert has_chat(spec) == bool(template)
        assert (chat_vocabulary(file).chat_template, chat_vocabulary(file).bos) == (template, bos)


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
    with patch("inference_site.catalogue.catalogue.logger") as logger:
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


@pytest.mark.parametrize("count", ["2000000", "999999999", "1" + "0" * 180, "1001"])
def test_a_name_of_more_parts_than_there_can_be_is_that_of_a_whole_file(
    tmp_path: Path, count: str
) -> None:
    path = tmp_path / f"m-1-of-{count}.gguf"
    write_model(path)
    tracemalloc.start()
    assert [spec.file for spec in discover(tmp_path)] == [path]
    assert parts_of(path) == [path]
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert not is_later_part(path.with_name(f"m-2-of-{count}.gguf"))


@pytest.mark.parametrize(("name", "count"), [("m-001-of-1000", 1000), ("m-1-of-2", 2)])
def test_the_parts_of_a_split_file_are_known_by_its_first(name: str, count: int) -> None:
    parts = parts_of(Path(f"{name}.gguf"))
    assert (len(parts), parts[0].stem) == (count, name)
    assert [is_later_part(part) for part in parts[:2]] == [False, True]
    assert parts_of(Path("m-0-of-2.gguf")) == [Path("m-0-of-2.gguf")]
    assert parts_of(Path("m-3-of-2.gguf")) == [Path("m-3-of-2.gguf")]


def test_weights_are_known_by_name_and_beginning() -> None:
    assert is_weights("a/M.GGUF", b"GGUF\x03")
    assert is_weights("m.bin", b"lmgg")
    assert is_weights("m.ggml", b"tjgg")
    assert not is_weights("m.gguf", b"tjgg")
    assert not is_weights("m.so", b"GGUF")
    assert not is_weights("m.gguf.part", b"GGUF")
    assert not is_weights("m.bin", b"PK\x03\x04")  # A pickle of torch.
    assert not is_weights("m.bin", b"\x7fELF")
    assert not is_weights("m.gguf", b"")


def test_a_named_file_lies_in_the_folder_wherever_links_lead(tmp_path: Path) -> None:
    folder, outside = tmp_path / "models", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (folder / "blob").write_bytes(b"")
    (folder / "inside.gguf").symlink_to("blob")
    (folder / "secret.gguf").symlink_to(outside / "secret")
    (folder / "disk").symlink_to(outside)
    (folder / "loop.gguf").symlink_to("loop.gguf")
    for good in ("inside.gguf", "owner/name/not-here.GGUF", "a b.gguf"):
        assert file_below(folder, good, (".gguf",)) == folder / good
    names = ["secret.gguf", "disk/x.gguf", "../models/inside.gguf", "a/../inside.gguf", "", "."]
    names += [str(folder / "inside.gguf"), "a\0.gguf", f"{'x' * 260}.gguf", "x/" * 2000 + "a.gguf"]
    for bad in names:
        with pytest.raises(ValueError, match="not in the directory of models"):
            file_below(folder, bad, (".gguf",))
    for other in ("blob", "x.so", "x.gguf.part", "x.gguf\n", "loop.jinja"):
        with pytest.raises(ValueError, match="must end in"):
            file_below(folder, other, (".gguf",))
