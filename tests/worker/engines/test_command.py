"""Servers that the worker starts and that do not do what they should."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.catalogue.engines.command import CommandOptions
from inference_site.core.domain.errors import ModelServerUnreachable
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest, Message
from tests.sinks import RecordingSink
from tests.waiting import wait_until
from worker.engines.command import load
from worker.engines.own_server import OwnServer
from worker.model_servers.process import ServerSettings, server_settings

MODEL_SERVER = Path(__file__).parent.parent.parent / "model_server.py"
REAL = f"{sys.executable} {MODEL_SERVER} {{port}} {{api_key}} {{file}} 2 256"
GARBAGE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"garbage")
    do_POST = do_GET
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STILL_LOADING = """
import http.server, json, sys, time
SERVING_AT = time.monotonic() + 2
CHOICE = {"index": 0, "message": {"content": "Hello"}, "finish_reason": "stop"}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.answer(200, {"data": [{"id": "m"}]})
    def do_POST(self):
        if time.monotonic() < SERVING_AT: self.answer(503, {"error": {"message": "Loading model"}})
        else: self.answer(200, {"choices": [CHOICE]})
    def answer(self, status, body):
        self.send_response(status); self.send_header("Content-Type", "application/json")
        self.end_headers(); self.wfile.write(json.dumps(body).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
Loader = Callable[..., OwnServer]


@pytest.fixture
def loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loader]:
    """Loads models of a command, and ends their servers."""
    monkeypatch.setattr(server_settings, "files", tmp_path / "servers")
    loaded: list[OwnServer] = []

    def start(command: str, **options: Any) -> OwnServer:
        spec = ModelSpec("m", "command", DEMO_FILE, options={"command": command, **options})
        engine = load(spec)
        assert isinstance(engine, OwnServer)
        loaded.append(engine)
        return loaded[-1]

    yield start
    for engine in loaded:
        engine.close()


def ask(engine: OwnServer) -> str:
    sink = RecordingSink()
    engine.run(GenerationRequest("m", (Message("user", "Hello"),), max_output_tokens=8), sink)
    return sink.text


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("sleep 600", "it was not ready within 1 s"),
        ("false", "it ended with exit status 1"),
        ("/no/such/program --port {port}", "its command could not be started"),
        (f"{sys.executable} {{models_dir}}/garbage.py {{port}}", "it gave no first token"),
    ],
)
def test_a_server_that_gets_not_ready_is_a_fault_that_says_why(
    loader: Loader,
    command: str,
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "garbage.py").write_text(GARBAGE)
    monkeypatch.setattr(server_settings, "models", tmp_path)
    faults = set()
    engine = loader(command, start_timeout_s=1.0, stop_timeout_s=0.5, timeout_s=2.0)
    engine.watch(lambda: faults.add(engine.fault))
    with pytest.raises(ModelServerUnreachable):  # Another attempt may follow: nothing was sent.
        ask(engine)
    wait_until(lambda: any(fault in found for found in faults), 20)


def test_a_server_that_is_ready_before_its_model_is_gets_the_time_to_load_it(
    loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loading.py").write_text(STILL_LOADING)
    monkeypatch.setattr(server_settings, "models", tmp_path)
    engine = loader(f"{sys.executable} {{models_dir}}/loading.py {{port}}", stop_timeout_s=0.5)
    wait_until(lambda: "gives no token yet" in engine.starting or engine.fault)
    first = engine._process
    wait_until(lambda: not engine.starting or engine.fault)
    assert not engine.fault
    assert engine._process is first
    assert ask(engine) == "Hello"


@pytest.mark.slow
def test_a_server_that_is_frozen_is_killed_and_started_again(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_settings, "stall_s", 1.0)
    engine = loader(REAL, flavor="llama_cpp", timeout_s=1.0, check_every_s=0.2)
    wait_until(lambda: not engine.starting)
    first = engine._process
    assert first is not None
    os.kill(first.pid, signal.SIGSTOP)
    wait_until(first.ended.is_set, 30)
    wait_until(lambda: not engine.starting and not engine.fault)
    assert engine._process is not first
    assert ask(engine)


@pytest.mark.slow
def test_a_server_that_is_not_wanted_while_it_starts_is_ended(loader: Loader) -> None:
    engine = loader("sleep 600", stop_timeout_s=0.5)
    wait_until(lambda: engine._process is not None and engine._process.pid)
    process = engine._process
    assert process is not None
    engine.close()
    assert process.ended.is_set()


def test_each_model_has_files_of_its_own(tmp_path: Path) -> None:
    settings = ServerSettings(tmp_path)
    assert settings.file_of("qwen3-0.6b", ".log") == tmp_path / "qwen3-0.6b.log"
    ids = ["a_b", "a/b", "a:b", "ä" * 200, "ä" * 199 + "b", "../x", "m" * 200, "m" * 199]
    names = [settings.file_of(id_, ".log").name for id_ in ids]
    assert len(set(names)) == len(ids)
    assert all((tmp_path / name).parent == tmp_path for name in names)
    for name in names:
        (tmp_path / name).touch()


def test_values_of_the_environment_may_be_numbers() -> None:
    options = CommandOptions.read({"command": "vllm serve", "env": {"VLLM_SERVER_DEV_MODE": 1}})
    assert options.env == {"VLLM_SERVER_DEV_MODE": "1"}
