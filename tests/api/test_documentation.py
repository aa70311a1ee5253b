"""The OpenAPI document is built once, by a command, and stored."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest
from django.core.management import call_command

from inference_site.gateway.api import documentation


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the document, and a process that has not read it."""
    monkeypatch.setattr(documentation, "_FOLDER", tmp_path)
    documentation.document.cache_clear()
    return tmp_path


def test_the_command_stores_the_document_that_web_processes_read(folder: Path) -> None:
    (folder / "openapi-of-an-old-source.json").write_text("{}")
    printed = io.StringIO()
    call_command("openapi", stdout=printed)
    with patch.object(subprocess, "run", side_effect=AssertionError):
        assert json.loads(documentation.document()) == json.loads(printed.getvalue())
    assert len(list(folder.iterdir())) == 1


def test_a_web_process_that_finds_no_document_runs_the_command() -> None:
    built = subprocess.CompletedProcess[bytes]([], 0, b"{}")
    with patch.object(subprocess, "run", return_value=built):
        assert documentation.document() == b"{}"
    documentation.document.cache_clear()


def test_a_document_that_cannot_be_stored_is_printed(folder: Path) -> None:
    folder.rmdir()
    folder.touch()
    printed = io.StringIO()
    call_command("openapi", stdout=printed)
    assert json.loads(printed.getvalue())["openapi"]
