"""Processes of servers: what they get, what is kept of them, and that nothing of them stays."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from worker.model_servers import guardian
from worker.model_servers.process import Order, ServerProcess, sweep

ROOT = Path(__file__).parent.parent.parent
PYTHON = sys.executable
FORKS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    time.sleep(600)
print("up", flush=True)
"""
STAYS = FORKS + "time.sleep(600)\n"
LEAVES = FORKS + "time.sleep(0.3); os._exit(3)\n"


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    for process in of(tmp_path):
        with suppress(psutil.Error):
            process.kill()


def of(folder: Path) -> list[psutil.Process]:
    """The processes of servers that are started in this folder, by their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("OF") == str(folder):
                found.append(process)
    return found


def order(folder: Path, code: str, **more: object) -> Order:
    return Order("m", [PYTHON, "-c", code], {"OF": str(folder)}, **more)  # type: ignore[arg-type]


def wait_for(condition: Callable[[], object], timeout_s: float = 10) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_server_gets_nothing_of_the_workers_environment_but_what_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    server = ServerProcess(
        Order("m", [PYTHON, "-c", "import os; print(sorted(os.environ))"], {"HF_TOKEN": "given"}),
        tmp_path,
    )
    assert server.ended.wait(10)
    assert (server.status, server.reason) == (0, "it ended with exit status 0")
    [line] = server.tail
    assert "SECRET_KEY" not in line
    assert "PATH" in line
    assert "HF_TOKEN" in line
    assert server.log.read_text() == f"{line}\n"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ([PYTHON, "-c", "import os; os.kill(os.getpid(), 11)"], "it was ended by SIGSEGV"),
        ([PYTHON, "-c", "import os; os.kill(os.getpid(), 36)"], "it was ended by signal 36"),
        ([PYTHON, "-c", "raise SystemExit(3)"], "it ended with exit status 3"),
        (["/no/such/program"], "could not be started (No such file or directory"),
    ],
)
def test_how_a_server_has_ended_is_told(tmp_path: Path, command: list[str], reason: str) -> None:
    server = ServerProcess(Order("m", command), tmp_path)
    assert server.ended.wait(10)
    assert reason in server.reason
    assert list(tmp_path.glob("*.json")) == []


def test_a_server_that_ignores_the_request_to_end_is_killed_with_all_that_it_has_forked(
    tmp_path: Path,
) -> None:
    server = ServerProcess(order(tmp_path, STAYS, stop_s=0.5), tmp_path)
    wait_for(lambda: len(of(tmp_path)) == 3)
    server.stop()
    assert server.ended.is_set()
    assert server.reason == "it was ended by SIGKILL"
    assert of(tmp_path) == []


def test_what_a_server_has_forked_ends_with_it(tmp_path: Path) -> None:
    server = ServerProcess(order(tmp_path, LEAVES), tmp_path)
    assert server.ended.wait(10)
    assert server.status == 3
    assert of(tmp_path) == []


@pytest.mark.parametrize(
    "end",
    [
        ServerProcess.stop,
        lambda server: server.kill(is_suspect=True),
        lambda server: os.kill(psutil.Process(server.pid).ppid(), signal.SIGKILL),
    ],
    ids=["stopped", "killed, because it was silent", "its guardian was killed"],
)
def test_the_command_that_stops_a_server_elsewhere_is_run_once(
    tmp_path: Path, end: Callable[[ServerProcess], None]
) -> None:
    stop = [PYTHON, "-c", f"open({str(tmp_path / 'stopped')!r}, 'a').write('once ')"]
    server = ServerProcess(
        order(tmp_path, "import time; time.sleep(600)", stop_command=stop), tmp_path
    )
    wait_for(lambda: of(tmp_path))
    end(server)
    assert server.ended.wait(10)
    assert (tmp_path / "stopped").read_text() == "once "


def test_the_command_that_stops_a_server_elsewhere_is_not_run_when_its_client_ends_itself(
    tmp_path: Path,
) -> None:
    stop = [PYTHON, "-c", f"open({str(tmp_path / 'stopped')!r}, 'a').write('once ')"]
    server = ServerProcess(order(tmp_path, "raise SystemExit(3)", stop_command=stop), tmp_path)
    assert server.ended.wait(10)
    assert server.status == 3
    assert not (tmp_path / "stopped").exists()  # Another worker's container may have the name.


WORKER = """
import sys, time
from pathlib import Path
from worker.model_servers.process import Order, ServerProcess
folder, code = sys.argv[1:]
server = ServerProcess(Order("m", [sys.executable, "-c", code], {"OF": folder}), Path(folder))
time.sleep(600)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has started a server."""
    command = [PYTHON, "-c", WORKER, str(tmp_path), STAYS]
    process = subprocess.Popen(command, cwd=ROOT)
    wait_for(lambda: len(of(tmp_path)) == 3)
    yield process
    process.kill()
    process.wait()


def guardian_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    [guardian] = psutil.Process(process.pid).children()
    return guardian


def test_nothing_is_left_two_seconds_after_the_worker_was_killed(
    tmp_path: Path, worker: subprocess.Popen[bytes]
) -> None:
    worker.kill()
    worker.wait()
    wait_for(lambda: not of(tmp_path), 2)
    wait_for(lambda: not list(tmp_path.glob("*.json")))


def test_what_is_left_when_worker_and_guardian_are_killed_is_ended_by_the_next_worker(
    tmp_path: Path, worker: subprocess.Popen[bytes]
) -> None:
    sweep(tmp_path)
    assert len(of(tmp_path)) == 3, "the worker lives: its servers are its own"
    guardian = guardian_of(worker)
    os.kill(worker.pid, signal.SIGSTOP)  # It must not see to the end of the guardian.
    guardian.kill()
    worker.kill()
    worker.wait()
    wait_for(lambda: len(of(tmp_path)) == 2)
    sweep(tmp_path)
    wait_for(lambda: not of(tmp_path), 2)
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="The clock is set as Linux shows it.")
@pytest.mark.usefixtures("worker")
def test_a_clock_that_is_set_makes_no_worker_look_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, booted_at = time.time(), psutil.boot_time()
    for ahead_s in (3600, -3600):  # The system keeps the time since the boot.
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda s=ahead_s: booted_at + s)
        assert abs(psutil.Process().create_time() - at) > 1800
        sweep(tmp_path)
        assert len(of(tmp_path)) == 3


def test_the_worker_ends_what_is_left_when_only_the_guardian_is_killed(tmp_path: Path) -> None:
    server = ServerProcess(order(tmp_path, STAYS), tmp_path)
    wait_for(lambda: len(of(tmp_path)) == 3)
    psutil.Process(server.pid).parent().kill()  # type: ignore[union-attr]
    assert server.ended.wait(5)
    assert server.reason == "its guardian was killed"
    wait_for(lambda: not of(tmp_path), 2)


def test_a_server_that_prints_without_end_fills_no_disk(tmp_path: Path) -> None:
    code = "import sys\nfor _ in range(400): sys.stdout.write('x' * 100_000 + '\\n')"
    server = ServerProcess(order(tmp_path, code), tmp_path)
    assert server.ended.wait(30)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) <= 4 * 2**20
    assert max(map(len, server.tail)) <= 500


def test_words_of_a_command_are_split_as_a_shell_does_and_run_without_one(tmp_path: Path) -> None:
    command = shlex.split(f"{PYTHON} -c 'import sys; print(sys.argv[1:])' 'a b' $HOME;ls")
    server = ServerProcess(Order("m", command), tmp_path)
    assert server.ended.wait(10)
    assert server.tail == ["['a b', '$HOME;ls']"]


def test_full_disk_loses_lines_of_the_log_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = guardian._Log(str(tmp_path / "m.log"), 10)
    log.write(b"first line\n")
    with monkeypatch.context() as disk:
        disk.setattr(guardian, "open", Mock(side_effect=OSError(28, "full")), raising=False)
        for _ in range(2):
            log.write(b"lost line\n")
    log.write(b"last line\n")
    assert (tmp_path / "m.log").read_bytes() == b"last line\n"
    assert list(log.tail) == ["first line", "lost line", "lost line", "last line"]
    log._file.close()
