"""Child processes that are restarted with back-off when they die, or replaced by a spare."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from inference_site.restart_delay import RestartDelay
from inference_site.supervisor.standby import OPTION

_SPARE_AFTER_S = 10.0
"""A spare is begun when the process has started and the machine has time again."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Program:
    """A program to run: its name, its command line, the file for its output, what it inherits.

    With ``has_spare`` a second process of it stands by once the first has run for a while.
    """

    name: str
    command: list[str]
    log: Path
    descriptors: tuple[int, ...] = ()
    has_spare: bool = False


class Child:
    """A program, its current process, and its spare."""

    def __init__(
        self, program: Program, env: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self.program = program
        self._env, self._say = dict(env), say
        self._process: subprocess.Popen[bytes] | None = None
        self._spare: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._delay = RestartDelay()
        self._restart_at: float | None = None
        self._log_start = 0
        self.exit_status: int | None = None
        """How the last process ended, after ``restart_if_dead`` has seen it."""

    @property
    def pid(self) -> int | None:
        """The process id; None while the program does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start the program, and append its output to its log. A spare takes over at once."""
        self._restart_at = None
        self._started_at = time.monotonic()
        self._log_start = self.program.log.stat().st_size if self.program.log.exists() else 0
        if not self._promote_spare():
            self._process = self._started(self.program.command, subprocess.DEVNULL)

    def stand_by(self) -> None:
        """Have a spare import everything; ``start`` then makes it the process."""
        self._spare = self._started([*self.program.command, OPTION], subprocess.PIPE)

    def _promote_spare(self) -> bool:
        """Have the spare take over, if there is one that lives; return whether there is."""
        if not self._has_spare:
            self._end_spare()
            return False
        assert self._spare is not None
        assert self._spare.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._spare.stdin as stdin:
            stdin.write(b"\n")
        self._process, self._spare = self._spare, None
        return True

    @property
    def _has_spare(self) -> bool:
        return self._spare is not None and self._spare.poll() is None

    def _started(self, command: list[str], stdin: int) -> subprocess.Popen[bytes]:
        with self.program.log.open("ab") as log:
            return subprocess.Popen(
                command,
                env=self._env,
                stdin=stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=self.program.descriptors,
                start_new_session=True,  # Ctrl-C reaches only the supervisor.
                preexec_fn=_before_exec,  # noqa: PLW1509  # One system call.
            )

    def keep_spare(self, now: float) -> None:
        """Start a spare, unless there is one, once the process has run for a while."""
        has_settled = self.pid is not None and now - self._started_at > _SPARE_AFTER_S
        if self.program.has_spare and has_settled and not self._has_spare:
            self._end_spare()
            self.stand_by()

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
        delay_s = self._delay.after(now - self._started_at)
        if self._has_spare:
            delay_s = 0.0
        self._say(
            f"{self.program.name} {_describe(status)}; restarting in {delay_s:g} s "
            f"(log: {self.program.log})"
        )
        self._restart_at = now + delay_s

    def logged(self) -> str:
        """Return what the last process has written into its log."""
        with self.program.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def terminate(self) -> None:
        """Send SIGTERM to the process, and end its spare, which does nothing yet."""
        self._end_spare()
        if self.pid is not None:
            assert self._process is not None
            self._process.terminate()

    def _end_spare(self) -> None:
        if self._spare is None:
            return
        assert self._spare.stdin is not None
        self._spare.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._spare.pid, signal.SIGKILL)
        self._spare.wait()
        self._spare = None

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
