"""Child processes that are restarted with back-off when they die."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 30.0
_STABLE_S = 30.0
"""After a child has run for this time it is restarted at once, and the delays begin anew."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Program:
    """A program to run: its name, its command line, the file for its output, what it inherits."""

    name: str
    command: list[str]
    log: Path
    descriptors: tuple[int, ...] = ()


class Child:
    """A program and its current process."""

    def __init__(
        self, program: Program, env: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self.program = program
        self._env, self._say = dict(env), say
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._delay_s = _FIRST_DELAY_S
        self._restart_at: float | None = None
        self._log_start = 0
        self.exit_status: int | None = None
        """How the last process ended, after ``restart_if_dead`` has seen it."""

    @property
    def pid(self) -> int | None:
        """The process id; None while the program does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start the program, and append its output to its log."""
        self._restart_at = None
        self._started_at = time.monotonic()
        with self.program.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self.program.command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=self.program.descriptors,
                start_new_session=True,  # Ctrl-C reaches only the supervisor.
                preexec_fn=_before_exec,  # noqa: PLW1509  # One system call.
            )

    def restart_if_dead(self, now: float) -> None:
        """Report a dead process, and restart it when its delay is over."""
        if self._restart_at is not None:
            if now >= self._restart_at:
                self.start()
            return
        status = self._process.poll() if self._process else None
        if status is None:
            return
        self.exit_status = status
        delay_s = 0.0 if now - self._started_at > _STABLE_S else self._delay_s
        self._say(
            f"{self.program.name} {_describe(status)}; restarting in {delay_s:g} s "
            f"(log: {self.program.log})"
        )
        self._restart_at = now + delay_s
        self._delay_s = min(max(delay_s * 2, _FIRST_DELAY_S), _LONGEST_DELAY_S)

    def logged(self) -> str:
        """Return what the last process has written into its log."""
        with self.program.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        if self.pid is not None:
            assert self._process is not None
            self._process.terminate()

    def wait(self, deadline: float) -> None:
        """Wait for the process to end; at the deadline, kill it and its children."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._say(f"{self.program.name} did not stop in time; killing it")
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _describe(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def _before_exec() -> None:
    """Have the kernel stop this process if the supervisor is killed (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
