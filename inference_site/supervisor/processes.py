"""Child processes that are kept running: restarted with back-off when they die."""

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
"""A child that has run for so long is restarted without a longer delay."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Program:
    """What to run, under which name, and where its output goes."""

    name: str
    command: list[str]
    log: Path


class Child:
    """One program and its current process."""

    def __init__(
        self, program: Program, env: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self.program = program
        self._env, self._say = dict(env), say
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._delay_s = _FIRST_DELAY_S
        self._restart_at: float | None = None

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start the program, its output appended to its log."""
        self._restart_at = None
        self._started_at = time.monotonic()
        with self.program.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.program.command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone.
                preexec_fn=_before_exec,  # noqa: PLW1509  # One system call.
            )

    def tend(self, now: float) -> None:
        """Notice a death, and restart when its delay is over."""
        if self._restart_at is not None:
            if now >= self._restart_at:
                self.start()
            return
        status = self._process.poll() if self._process else None
        if status is None:
            return
        if now - self._started_at > _STABLE_S:
            self._delay_s = _FIRST_DELAY_S
        self._say(
            f"{self.program.name} {_describe(status)}; restarting in {self._delay_s:g} s "
            f"(log: {self.program.log})"
        )
        self._restart_at = now + self._delay_s
        self._delay_s = min(self._delay_s * 2, _LONGEST_DELAY_S)

    def terminate(self) -> None:
        """Ask the process to end."""
        if self.pid is not None:
            assert self._process is not None
            self._process.terminate()

    def wait(self, deadline: float) -> None:
        """Wait for the end; past the deadline, force it on the process and its children."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._say(f"{self.program.name} does not stop; killing it")
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _describe(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def _before_exec() -> None:
    """Have the kernel stop this process when the supervisor is killed outright (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
