"""Start and end the processes that are measured, so that none outlives the benchmark."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "var" / "bench"
STOP_TIMEOUT_S = 20


class TargetFailed(Exception):
    """A measured process did not start, or did not answer."""


def free_port() -> int:
    """Return a loopback port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def running(
    name: str, command: Sequence[str], environment: Mapping[str, str], mark: str | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command from the repository's root, its output in ``var/bench/logs``.

    On leaving it gets SIGTERM; then whatever it left behind is killed: its descendants, and, where
    a ``mark`` unique to this run is given, the processes that carry it in their command line or
    environment (a database server leaves the tree of its parent).
    """
    log = log_file(name)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        family = descendants(process.pid)
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(f"{name} did not stop within {STOP_TIMEOUT_S} s: killed", file=sys.stderr)
            process.kill()
            process.wait()
        kill_left([*family, *(marked(mark) if mark else [])])


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def marked(mark: str) -> Iterator[psutil.Process]:
    """Find the other processes whose command line or environment contains ``mark``."""
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(mark in word for word in words):
            yield process


def kill_left(processes: Sequence[psutil.Process]) -> None:
    left = [process for process in processes if process.is_running()]
    _, alive = psutil.wait_procs(left, timeout=3)
    for process in alive:
        try:
            print(f"killed what was left: {process}", file=sys.stderr)
            process.kill()
        except psutil.NoSuchProcess:
            continue


def wait_for_ok(name: str, url: str, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Return as soon as a GET of ``url`` answers 200. Raise TargetFailed with the log's end."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310 - loopback only
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    log = log_file(name).read_text(errors="replace")[-3000:]
    raise TargetFailed(f"{name} is not ready at {url} (exit status {process.poll()}):\n{log}")


def log_file(name: str) -> Path:
    return CACHE / "logs" / f"{name}.log"


def end_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that context managers end what they started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
