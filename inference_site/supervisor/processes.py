"""Child processes: started, restarted with back-off when they die, and replaced one by one.

A process that stops (see ``process_lifecycle``) is replaced at once: it drains while the next one
starts. ``roll`` does the same in the better order: the next one starts first, and the one before it
is stopped when that one is ready. A process can ask for it.
"""

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

from inference_site.process_lifecycle import NOTIFY_FD, REPLACES_PID, State
from inference_site.restart_delay import RestartDelay
from inference_site.supervisor.standby import OPTION

_SPARE_AFTER_S = 10.0
"""A spare is begun when the process has started and the machine has time again."""
_ROLL_S = 600.0
"""How long a new process may take to get ready before the one that it replaces is kept."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Program:
    """A program to run: its name, its command line, the file for its output, what it inherits.

    With ``has_spare`` a second process of it stands by once the first has run for a while. Two
    processes of a program that ``starts_alone`` cannot run at the same time, not even while one
    replaces the other.
    """

    name: str
    command: list[str]
    log: Path
    descriptors: tuple[int, ...] = ()
    has_spare: bool = False
    starts_alone: bool = False


class Process:
    """One process of a program, and the pipe that it writes its states into."""

    def __init__(
        self,
        program: Program,
        env: Mapping[str, str],
        replaces: int | None,
        *,
        stands_by: bool = False,
    ) -> None:
        self._notices, theirs = os.pipe()
        os.set_blocking(self._notices, False)
        self._said = b""
        self.log_start = program.log.stat().st_size if program.log.exists() else 0
        with program.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [*program.command, OPTION] if stands_by else program.command,
                env={**env, NOTIFY_FD: str(theirs), REPLACES_PID: str(replaces or "")},
                stdin=subprocess.PIPE if stands_by else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(*program.descriptors, theirs),
                start_new_session=True,  # Ctrl-C reaches only the supervisor.
                preexec_fn=_before_exec,  # noqa: PLW1509  # Two system calls.
            )
        os.close(theirs)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.popen.poll() is None

    def has_said(self, state: State) -> bool:
        """Return whether the process has written this state, and forget that it has."""
        with contextlib.suppress(OSError):  # Nothing new, or the pipe is closed.
            while self._notices >= 0 and (read := os.read(self._notices, 4096)):
                self._said = (self._said + read)[-4096:]
        said = self._said.splitlines()
        self._said = b"\n".join(line for line in said if line != state.encode()) + b"\n"
        return state.encode() in said

    def take_over(self) -> None:
        """Have a process that stands by go on."""
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.popen.stdin as stdin:
            stdin.write(b"\n")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.is_running:
            self.popen.send_signal(number)

    def kill(self) -> None:
        """End the process and its children now."""
        if self.popen.stdin is not None:
            self.popen.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.close()

    def close(self) -> None:
        """Read no more of its states."""
        if self._notices >= 0:
            os.close(self._notices)
            self._notices = -1


class Child:
    """A program and its current process, a spare, the next one, and those that drain."""

    def __init__(
        self, program: Program, env: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self.program = program
        self.environment, self._say = dict(env), say
        self._current: Process | None = None
        self._spare: Process | None = None
        self._next: Process | None = None
        self._leaving: list[Process] = []
        self._started_at = self._roll_until = 0.0
        self._delay = RestartDelay()
        self._restart_at: float | None = None
        self.exit_status: int | None = None
        """How the last process ended, after ``restart_if_dead`` has seen it."""

    @property
    def pid(self) -> int | None:
        """The process id; None while the program does not run."""
        return self._current.popen.pid if self._current and self._current.is_running else None

    def start(self) -> None:
        """Start the program, and append its output to its log. A spare takes over at once."""
        self._restart_at = None
        self._started_at = time.monotonic()
        if self._current is not None and not self._current.is_running:
            self._current.close()
        self._current = self._new()

    def stand_by(self) -> None:
        """Have a spare import everything; ``start`` then makes it the process."""
        self._spare = Process(self.program, self.environment, self.pid, stands_by=True)

    def _new(self) -> Process:
        """Return a process that begins its work: the spare, if there is one."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.is_running:
            spare.take_over()
            return spare
        if spare is not None:
            spare.kill()
        return Process(self.program, self.environment, self.pid)

    @property
    def _has_spare(self) -> bool:
        return self._spare is not None and self._spare.is_running

    def keep_spare(self, now: float) -> None:
        """Start a spare, unless there is one, once the process has run for a while."""
        has_settled = self.pid is not None and now - self._started_at > _SPARE_AFTER_S
        if self.program.has_spare and has_settled and not self._has_spare and not self.is_rolling:
            self._end_spare()
            self.stand_by()

    def roll(self, now: float) -> None:
        """Replace the process: start the next one now, and stop this one when that one is ready."""
        if self.pid is None or self.is_rolling:
            return
        if self.program.starts_alone:
            assert self._current is not None
            self._current.signal(signal.SIGTERM)  # ``restart_if_dead`` starts the next one.
            return
        self._say(f"{self.program.name}: starting the next process")
        self._next, self._roll_until = self._new(), now + _ROLL_S

    @property
    def is_rolling(self) -> bool:
        """Whether the next process gets ready."""
        return self._next is not None

    def restart_if_dead(self, now: float) -> None:
        """Replace a process that stops, or dies; see to one that is being replaced."""
        for process in [each for each in self._leaving if not each.is_running]:
            process.close()
            self._leaving.remove(process)
        if self._next is not None:
            self._look_at_next(self._next, now)
        if self._restart_at is not None:
            if now >= self._restart_at:
                self.start()
        elif self._current is not None and self._current.has_said("stopping"):
            self._say(f"{self.program.name} stops; starting the next process")
            self._leaving.append(self._current)
            if self._next is None:
                self.start()
            else:
                self._switch(self._next)
        elif self._current is not None and self._current.has_said("restart"):
            self.roll(now)
        elif self._current is not None and not self._current.is_running:
            if self._next is None:
                self._note_death(self._current, now)
            else:
                self._current.close()
                self._switch(self._next)

    def _look_at_next(self, process: Process, now: float) -> None:
        """Switch to the next process when it is ready; drop it when it cannot get so."""
        if process.has_said("ready"):
            self._say(f"{self.program.name}: the next process is ready")
            if self._current is not None:
                self._current.signal(signal.SIGTERM)
                self._leaving.append(self._current)
            self._restart_at = None
            self._switch(process)
        elif process.has_said("failed") or not process.is_running or now > self._roll_until:
            self._say(
                f"{self.program.name}: the next process did not get ready; the one before it goes "
                f"on (log: {self.program.log})"
            )
            process.close()  # None takes its place.
            process.signal(signal.SIGTERM)
            self._leaving.append(process)
            self._next = None

    def _switch(self, process: Process) -> None:
        self._current, self._next, self._started_at = process, None, time.monotonic()

    def _note_death(self, process: Process, now: float) -> None:
        self.exit_status = process.popen.returncode
        delay_s = self._delay.after(now - self._started_at)
        if self._has_spare:
            delay_s = 0.0
        self._say(
            f"{self.program.name} {_describe(process.popen.returncode)}; "
            f"restarting in {delay_s:g} s (log: {self.program.log})"
        )
        self._restart_at = now + delay_s

    def logged(self) -> str:
        """Return what the last process has written into its log."""
        with self.program.log.open("rb") as log:
            log.seek(self._current.log_start if self._current else 0)
            return log.read().decode(errors="replace")

    @property
    def _all(self) -> list[Process]:
        return [each for each in (self._current, self._next, *self._leaving) if each is not None]

    def terminate(self) -> None:
        """Have all processes of the program drain and end, and start no other; end its spare."""
        self._end_spare()
        for process in self._all:
            process.close()  # None takes its place: see ``process_lifecycle.notify``.
            process.signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """Have processes that drain end now."""
        for process in self._all:
            process.signal(signal.SIGINT)

    def _end_spare(self) -> None:
        if self._spare is not None:
            self._spare.kill()
            self._spare = None

    def wait(self, deadline: float, *, kills: bool = True) -> bool:
        """Return whether all its processes ended by the deadline; kill those that did not."""
        ended = True
        for process in self._all:
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                ended = False
                if kills:
                    self._say(f"{self.program.name} did not stop in time; killing it")
                    process.kill()
        return ended


def _describe(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def _before_exec() -> None:
    """Have SIGHUP restart the process, also under ``nohup``, which is meant for the supervisor.

    On Linux, have the kernel stop the process if the supervisor is killed.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
