"""``manage.py models`` and ``manage.py pull``; the latter against a stand-in of a hub."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from huggingface_hub import constants
from pytest_django.fixtures import Settings

from inference_site.catalogue.catalogue import DEMO_FILE, catalogue

pytestmark = pytest.mark.slow  # Each download is a process of its own.

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def fresh_catalog() -> Iterator[None]:
    catalogue.cache_clear()
    yield
    catalogue.cache_clear()


@pytest.mark.usefixtures("fresh_catalog")
def test_models_are_listed_with_the_memory_they_need(settings: Settings, tmp_path: Path) -> None:
    settings.MODELS_FILE = tmp_path / "models.yaml"
    settings.MODELS_FILE.write_text(
        f"models: {{one: {{file: {DEMO_FILE}, slots: 2}}, gone: {{file: x.gguf}}, "
        "play: {engine: scripted}}"
    )
    out = StringIO()
    call_command("models", stdout=out)
    _, one, gone, play, *_rest = out.getvalue().splitlines()
    assert one.split()[:4] == ["one", "llama_cpp", "2", "2,048"]
    assert "missing" in gone
    assert "scripted" in play
    assert "of memory is free" in out.getvalue()


def test_file_is_checked_against_the_free_memory() -> None:
    out = StringIO()
    call_command("models", str(DEMO_FILE), "--slots", "2", stdout=out)
    assert "architecture   llama" in out.getvalue()
    assert "quantisation   Q8_0" in out.getvalue()
    assert "for 2 slots of 2,048 tokens" in out.getvalue()
    with pytest.raises(CommandError, match="more than is free"):
        call_command("models", str(DEMO_FILE), "--slots", "100000000", stdout=StringIO())


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no model at all"])
def test_what_is_no_model_is_told(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(CommandError, match=r"m\.gguf: "):
        call_command("models", str(file))


class Hub:
    """Answers for one file, as a Hugging Face hub does; ``tag`` is the checksum that it tells."""

    def __init__(self, content: bytes) -> None:
        self.content, self.tag = content, hashlib.sha256(content).hexdigest()
        self.ranges: list[str] = []
        self.cut_after: int | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._begin()

            def do_GET(self) -> None:
                rest = self._begin()
                if rest and hub.cut_after is not None:
                    self.wfile.write(rest[: hub.cut_after])
                    hub.cut_after = None
                    self.close_connection = True
                else:
                    self.wfile.write(rest)

            def _begin(self) -> bytes:
                if not self.path.startswith("/org/repo/resolve/main/tiny.gguf"):
                    self.send_response(404)
                    self.send_header("X-Error-Code", "EntryNotFound")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return b""
                asked = self.headers.get("Range")
                first = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
                if asked and self.command == "GET":
                    hub.ranges.append(asked)
                rest = hub.content[first:]
                self.send_response(206 if asked else 200)
                self.send_header("ETag", f'"{hub.tag}"')
                self.send_header("X-Repo-Commit", "a" * 40)
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("Content-Length", str(len(rest)))
                if asked:
                    last = len(hub.content) - 1
                    self.send_header("Content-Range", f"bytes {first}-{last}/{last + 1}")
                self.end_headers()
                return rest

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        return Handler


@pytest.fixture
def hub() -> Iterator[Hub]:
    served = Hub(DEMO_FILE.read_bytes())
    yield served
    served.close()


def test_file_is_fetched_and_checked(hub: Hub, tmp_path: Path) -> None:
    """In a process of its own: the library reads the address of the hub when it is imported."""
    done = subprocess.run(
        [sys.executable, "manage.py", "pull", "hf:org/repo/tiny.gguf"],
        cwd=ROOT,
        env={
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "MODELS_DIR": str(tmp_path / "models"),
            "SECRET_KEY": "x",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    file = tmp_path / "models" / "org" / "repo" / "tiny.gguf"
    assert file.read_bytes() == hub.content
    assert str(file) in done.stdout
    assert "file: hf:org/repo/tiny.gguf" in done.stdout


@pytest.fixture
def models(hub: Hub, tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of models of this process, which asks the stand-in."""
    address = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    settings.MODELS_DIR = tmp_path / "models"
    return tmp_path / "models"


def test_download_that_was_cut_goes_on_where_it_ended(hub: Hub, models: Path) -> None:
    hub.cut_after = 1_000_000
    with pytest.raises(CommandError):
        call_command("pull", "hf:org/repo/tiny.gguf", stdout=StringIO())
    call_command("pull", "hf:org/repo/tiny.gguf", stdout=StringIO())
    assert hub.ranges, "nothing was resumed"
    assert (models / "org/repo/tiny.gguf").read_bytes() == hub.content


def test_damaged_file_is_removed(hub: Hub, models: Path) -> None:
    hub.tag = "0" * 64
    with pytest.raises(CommandError, match="its SHA-256 is"):
        call_command("pull", "hf:org/repo/tiny.gguf", stdout=StringIO())
    assert not (models / "org/repo/tiny.gguf").exists()


@pytest.mark.parametrize("reference", ["tiny.gguf", "hf:org/tiny.gguf", "hf:org/repo/../x.gguf"])
def test_reference_that_can_be_none_is_refused(reference: str) -> None:
    with pytest.raises(CommandError, match="Expected hf:owner/name/file"):
        call_command("pull", reference)


@pytest.mark.usefixtures("models")
def test_file_that_there_is_not_is_told() -> None:
    with pytest.raises(CommandError, match=r"org/repo/other\.gguf"):
        call_command("pull", "hf:org/repo/other.gguf", stdout=StringIO())
