"""Print which files a request passes through, from socket to socket.

Run from the repository's root: ``python -m tools.request_walk``. It starts the product with
``manage.py serve`` in a temporary folder, sends one streamed chat completion and one background
response, and prints the files of the web and the worker process that ran, with their functions.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
PORT = 8931
CHAT = {"model": "demo", "stream": True, "max_tokens": 8, "messages": "Hello"}
BACKGROUND = {"model": "demo", "background": True, "max_output_tokens": 8, "input": "Hello"}
REQUESTS = (
    ("one streamed chat completion", "/v1/chat/completions", CHAT),
    ("one background response", "/v1/responses", BACKGROUND),
)
_AFTER_S = 1.5
"""Time after the answer of a request for the run of a background response and last frames."""
_IDLE_S = 6.0
"""Longer than the interval of every thread that works without a request, such as the lease's."""

Walk = list[tuple[str, list[str]]]


@contextmanager
def served(folder: Path) -> Iterator[dict[str, int]]:
    """Run the product; yield the ids of its web and worker processes."""
    environment = {
        **os.environ,
        "DATA_DIR": str(folder),
        "WALK_ROOT": str(ROOT),
        "WALK_OUT": str(folder / "walk"),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    command = [sys.executable, "manage.py", "serve", "--port", str(PORT)]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            next(line for line in process.stdout if "Console" in line)
            children = {
                child.pid: child.cmdline() for child in psutil.Process(process.pid).children()
            }
            yield {
                role: next(pid for pid, command in children.items() if role in command)
                for role in ("web", "worker")
            }
        finally:
            process.terminate()
            process.communicate()


def noted(folder: Path, pids: dict[str, int], act: Callable[[], None]) -> dict[str, Walk]:
    """Call a function; return the functions that ran meanwhile, by process and file."""
    for pid in pids.values():
        os.kill(pid, signal.SIGRTMIN)
    time.sleep(_AFTER_S / 3)
    act()
    found = {}
    for role, pid in pids.items():
        os.kill(pid, signal.SIGRTMIN)
        written = folder / f"walk.{pid}"
        while not written.exists():
            time.sleep(0.05)
        time.sleep(0.2)
        found[role] = json.loads(written.read_text())
        written.unlink()
    return found


def walk(found: Walk, idle: Walk) -> Walk:
    """Return the functions that ran for a request, without those that also run without one."""
    always = {(file, function) for file, functions in idle for function in functions}
    left = ((file, [each for each in names if (file, each) not in always]) for file, names in found)
    return [(file, names) for file, names in left if names]


def _send(folder: Path, path: str, body: dict[str, object]) -> None:
    key = (folder / "api_key").read_text()
    answer = httpx.post(
        f"http://127.0.0.1:{PORT}{path}", json=body, headers={"Authorization": f"Bearer {key}"}
    )
    answer.raise_for_status()
    time.sleep(_AFTER_S)


def main() -> None:
    """Print a walk for each of the requests."""
    with tempfile.TemporaryDirectory() as name, served(folder := Path(name)) as pids:
        for _, path, body in REQUESTS:
            _send(folder, path, body)  # What only a first request does is not of interest.
        idle = noted(folder, pids, lambda: time.sleep(_IDLE_S))
        for title, path, body in REQUESTS:
            ran = noted(folder, pids, partial(_send, folder, path, body))
            found = {role: walk(steps, idle[role]) for role, steps in ran.items()}
            files = {name for steps in found.values() for name, _ in steps}
            print(f"\n{title}: {len(files)} files")
            for role, steps in found.items():
                print(f"  {role}: {len(steps)}")
                for file, functions in steps:
                    print(f"    {file}: {', '.join(functions)}")


if __name__ == "__main__":
    main()
