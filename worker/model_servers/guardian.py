"""The guardian of one model server: a small process that starts it and ends all its processes.

It runs without the platform's packages: ``python -I -S guardian.py``. Standard input has the order,
a line of JSON, and then stays open as long as the worker lives. The guardian ends the server when
it reads a line ``stop``, and when the input ends because the worker has ended in any way. It adopts
the orphaned child processes of the server (subreaper), and ends them, too. If the guardian is
killed, the kernel kills the server, and the worker, or the next one, kills its child processes
(``worker.model_servers.process``).

Standard output gets a line of JSON when the server has started, and one when all its processes have
ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ORPHANED_STOP_S = 1.0
"""How long a server may take to end after its worker has ended without a ``stop``."""
_KILL_S = 5.0
_STOP_COMMAND_S = 30.0
_TAIL_LINES, _LINE_BYTES = 20, 500
_READ_BYTES = 65_536


def main() -> None:
    """Start the server of the order, and wait until it has ended."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):  # Nothing after the line is read.
        line += byte
    order = json.loads(line)
    libc = ctypes.CDLL(None)
    if sys.platform == "linux":
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    Guardian(order, libc).run()


class Guardian:
    """One server. ``order`` has its command, environment, folder, log and time limits."""

    def __init__(self, order: dict[str, Any], libc: ctypes.CDLL) -> None:
        self._order, self._libc = order, libc
        self._log = _Log(order["log"], order["log_bytes"])
        self._is_stopping = False
        self._kill_at: float | None = None

    def run(self) -> None:
        """Start the server, and return when all its processes have ended."""
        awake, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        try:
            server = self._start()
        except OSError as exc:
            self._report(status=127, error=f"{exc.strerror}: {exc.filename}", tail=[])
            return
        self._report(pid=server.pid)
        assert server.stdout is not None
        output = server.stdout.fileno()
        os.set_blocking(output, False)
        with selectors.DefaultSelector() as ready:
            for descriptor in (awake, 0, output):
                ready.register(descriptor, selectors.EVENT_READ)
            while server.poll() is None:
                wait_s = None
                if self._kill_at is not None:
                    wait_s = max(0.0, self._kill_at - time.monotonic()) + 0.01
                for key, _ in ready.select(wait_s):
                    if key.fd == output:
                        self._copy(output, ready)
                    elif key.fd == 0:
                        command = os.read(0, 4096)
                        if not command:  # The worker has ended.
                            ready.unregister(0)
                        self._stop(server, self._order["stop_s"] if command else _ORPHANED_STOP_S)
                    elif signal.SIGTERM in os.read(awake, 4096):
                        self._stop(server, self._order["stop_s"])
                if self._kill_at is not None and time.monotonic() > self._kill_at:
                    self._kill_all(server.pid)
        self._copy(output, None)
        if server.returncode < 0 and not self._is_stopping:
            self._run_stop_command()  # What it has started elsewhere may still run.
        self._kill_all(server.pid)
        with contextlib.suppress(OSError):
            os.unlink(self._order["pid_file"])
        self._report(status=server.returncode, tail=list(self._log.tail))

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._order["command"],
            env=self._order["env"],
            cwd=self._order["folder"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # The server dies with this process, which has one thread.
            preexec_fn=(  # noqa: PLW1509
                (lambda: self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
                if sys.platform == "linux"
                else None
            ),
        )

    def _copy(self, output: int, ready: selectors.BaseSelector | None) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(output, _READ_BYTES):
                self._log.write(data)
                if ready is not None:
                    return
            if ready is not None:  # It has closed its output and still runs.
                ready.unregister(output)

    def _stop(self, server: subprocess.Popen[bytes], seconds: float) -> None:
        """Send SIGTERM to the server; kill it if it still runs after ``seconds``."""
        until = time.monotonic() + seconds
        self._kill_at = min(self._kill_at or until, until)
        if self._is_stopping:
            return
        self._is_stopping = True
        self._run_stop_command()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)

    def _run_stop_command(self) -> None:
        if stop_command := self._order["stop_command"]:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    stop_command,
                    env=self._order["env"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=_STOP_COMMAND_S,
                    check=False,
                )

    def _kill_all(self, group: int) -> None:
        """Kill the server's process group, and all processes that this process has adopted."""
        self._kill_at = None
        until = time.monotonic() + _KILL_S
        while time.monotonic() < until:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
            left = [pid for pid in _children() if pid != group]
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if not left:
                return
            time.sleep(0.02)

    def _report(self, **facts: object) -> None:
        with contextlib.suppress(OSError):  # The worker has ended.
            os.write(1, json.dumps(facts).encode() + b"\n")


class _Log:
    """The file of a server's output, and the file before it; each has a bounded size."""

    def __init__(self, path: str, max_bytes: int) -> None:
        self._path, self._max = path, max_bytes
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # Open while the server runs.
        self._incomplete = b""
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)

    def write(self, data: bytes) -> None:
        """Append the data; on a full disk it is lost."""
        with contextlib.suppress(OSError):
            if self._file.tell() + len(data) > self._max:
                with contextlib.suppress(FileNotFoundError):  # It was moved before.
                    os.replace(self._path, f"{self._path}.1")
                full, self._file = self._file, open(self._path, "ab", buffering=0)  # noqa: SIM115
                full.close()
            self._file.write(data)
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        self._incomplete = self._incomplete[-_LINE_BYTES:]
        for line in lines[-_TAIL_LINES:]:
            self.tail.append(line[:_LINE_BYTES].decode("utf-8", "replace"))


def _children() -> list[int]:
    """Return the child processes of this process, adopted ones included; Linux only."""
    found: list[int] = []
    me = os.getpid()
    if not os.path.isdir("/proc/self"):
        return found
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == me:
            found.append(int(name))
    return found


if __name__ == "__main__":
    main()
