"""The guardian of one server: a small process that starts it and leaves nothing of it behind.

It runs without the platform's packages: ``python -I -S guardian.py``. Standard input brings the
order, a line of JSON, and then stays open for as long as the worker lives. The guardian ends the
server when a line ``stop`` comes, and when the input ends, because the worker has ended, however it
did. It adopts the processes that the server has forked and left (subreaper), and ends them, too.
Should the guardian itself be killed, the kernel kills the server; what that had forked is ended by
the worker, or by the next one (``worker.model_servers.process``).

Standard output gets a line of JSON when the server has started, and one when all of it has ended.
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
_ABANDONED_S = 1.0
"""The time that a server has to end after its worker has ended without a word."""
_KILL_S = 5.0
_STOP_COMMAND_S = 30.0
_TAIL_LINES, _LINE_BYTES = 20, 500
_READ_BYTES = 65_536


def main() -> None:
    """Start the server of the order, and wait."""
    order = json.loads(_first_line())
    libc = ctypes.CDLL(None)
    if sys.platform == "linux":
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    Guardian(order, libc).run()


def _first_line() -> bytes:
    """Return the order; nothing that comes after it is read."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


class Guardian:
    """One server. ``order`` has its command, environment, folder, log and times in seconds."""

    def __init__(self, order: dict[str, Any], libc: ctypes.CDLL) -> None:
        self._order, self._libc = order, libc
        self._log = _Log(order["log"], order["log_bytes"])
        self._is_stopping = False
        self._kill_at: float | None = None

    def run(self) -> None:
        """Return when no process of the server is left."""
        awake, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        try:
            server = self._started()
        except OSError as exc:
            self._tell(status=127, error=f"{exc.strerror}: {exc.filename}", tail=[])
            return
        self._tell(pid=server.pid)
        assert server.stdout is not None
        output = server.stdout.fileno()
        os.set_blocking(output, False)
        with selectors.DefaultSelector() as ready:
            for descriptor in (awake, 0, output):
                ready.register(descriptor, selectors.EVENT_READ)
            while server.poll() is None:
                for key, _ in ready.select(self._wait_s()):
                    if key.fd == output:
                        self._copy(output, ready)
                    elif key.fd == 0:
                        self._obey(server, ready)
                    elif signal.SIGTERM in os.read(awake, 4096):
                        self._stop(server, self._order["stop_s"])
                if self._kill_at is not None and time.monotonic() > self._kill_at:
                    self._kill_all(server.pid)
        self._copy(output, None)
        self._kill_all(server.pid)
        with contextlib.suppress(OSError):
            os.unlink(self._order["pid_file"])
        self._tell(status=server.returncode, tail=list(self._log.tail))

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._order["command"],
            env=self._order["env"],
            cwd=self._order["folder"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # This process has one thread.
            preexec_fn=self._die_with_me  # noqa: PLW1509
            if sys.platform == "linux"
            else None,
        )

    def _die_with_me(self) -> None:
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def _wait_s(self) -> float | None:
        return None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic()) + 0.01

    def _copy(self, output: int, ready: selectors.BaseSelector | None) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(output, _READ_BYTES):
                self._log.write(data)
                if ready is not None:
                    return
            if ready is not None:  # It has closed its output, and runs on.
                ready.unregister(output)

    def _obey(self, server: subprocess.Popen[bytes], ready: selectors.BaseSelector) -> None:
        data = os.read(0, 4096)
        if not data:
            ready.unregister(0)
        self._stop(server, self._order["stop_s"] if data else _ABANDONED_S)

    def _stop(self, server: subprocess.Popen[bytes], seconds: float) -> None:
        """Send SIGTERM to the server, and have it killed if it runs after so many seconds."""
        until = time.monotonic() + seconds
        self._kill_at = min(self._kill_at or until, until)
        if self._is_stopping:
            return
        self._is_stopping = True
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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)

    def _kill_all(self, group: int) -> None:
        """Kill what is left: the server's process group, and all that this process has adopted."""
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

    def _tell(self, **said: object) -> None:
        with contextlib.suppress(OSError):  # The worker has ended.
            os.write(1, json.dumps(said).encode() + b"\n")


class _Log:
    """The file of a server's output, and one older; each has a bounded size."""

    def __init__(self, path: str, most_bytes: int) -> None:
        self._path, self._most = path, most_bytes
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # Open for as long as it lives.
        self._begun = b""
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)

    def write(self, data: bytes) -> None:
        """Keep the data; a disk that is full loses it."""
        with contextlib.suppress(OSError):
            if self._file.tell() + len(data) > self._most:
                os.replace(self._path, f"{self._path}.1")
                self._file.close()
                self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
            self._file.write(data)
        *lines, self._begun = (self._begun + data).split(b"\n")
        self._begun = self._begun[-_LINE_BYTES:]
        for line in lines[-_TAIL_LINES:]:
            self.tail.append(line[:_LINE_BYTES].decode("utf-8", "replace"))


def _children() -> list[int]:
    """Return the processes whose parent this is, also those that it has adopted; Linux only."""
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
