"""The processes of ``manage.py serve``: started, restarted with back-off, and replaced one by one.

A process that stops (see ``process_lifecycle``) is replaced at once: it drains while the next one
starts. ``roll`` starts the next process first and stops the current one when the next is ready; a
process can ask for it.

The supervisor does not need Django. When the site is ready, ``serve`` executes its own command
again, with the supervisor pickled into an anonymous file (``hand_over``). The process keeps its id,
its children and its open files, and frees the memory of Django. ``manage.py`` then runs ``resume``
and imports only this package.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from inference_site.core.process_lifecycle import (
    NOTIFY_FD,
    REPLACES_PID,
    RestartDelay,
    State,
    signal_name,
)
from inference_site.ops.serve.services import ServiceError, made_directories, remove_at_exit

if TYPE_CHECKING:
    from inference_site.ops.serve.services import EmbeddedPostgres


_ROLL_S = 600.0
"""A new process that is not ready after this time is stopped, and the current one is kept."""
_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
STATE_FD = "SERVE_STATE_FD"
"""The environment variable with the descriptor of the pickled state, for the second run."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOP_S, _DRAIN_S = 7.0, 3.0
"""How long processes may take to end when ``serve`` stops, and how much of it they may drain."""
_WATCH_S = 0.5
"""How often the states of the processes are read; the end of one is noticed at once."""


@dataclass(frozen=True)
class Program:
    """A program to run: its name, command line, log file and inherited file descriptors.

    Two processes of a program that ``starts_alone`` cannot run at the same time, not even while
    one replaces the other.
    """

    name: str
    command: list[str]
    log: Path
    descriptors: tuple[int, ...] = ()
    starts_alone: bool = False


class Adopted:
    """A child that this process started before it executed another program.

    It has the methods of Popen that are used here.
    """

    def __init__(self, pid: int, returncode: int | None) -> None:
        self.pid, self.returncode = pid, returncode

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; return the exit status. Raise TimeoutExpired."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Process:
    """One process of a program, and the pipe into which it writes its states."""

    def __init__(self, program: Program, env: Mapping[str, str], replaces: int | None) -> None:
        self._states = b""
        self.log_start = program.log.stat().st_size if program.log.exists() else 0
        with program.log.open("ab") as log:
            self._states_fd, write_fd = os.pipe()
            os.set_blocking(self._states_fd, False)
            try:
                self.popen: subprocess.Popen[bytes] | Adopted = subprocess.Popen(
                    program.command,
                    env={**env, NOTIFY_FD: str(write_fd), REPLACES_PID: str(replaces or "")},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(*program.descriptors, write_fd),
                    start_new_session=True,  # Ctrl-C reaches only the supervisor.
                    preexec_fn=_before_exec,  # noqa: PLW1509  # Two system calls.
                )
            except OSError:
                self.close()
                raise
            finally:
                os.close(write_fd)

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.popen.poll() is None

    def __getstate__(self) -> dict[str, Any]:
        adopted = Adopted(self.popen.pid, self.popen.returncode)
        return self.__dict__ | {"popen": adopted}

    def take_state(self, state: State) -> bool:
        """Return whether the process has written this state since the last call."""
        with contextlib.suppress(OSError):  # Nothing new, or the pipe is closed.
            while self._states_fd >= 0 and (read := os.read(self._states_fd, 4096)):
                self._states = (self._states + read)[-4096:]
        states = self._states.splitlines()
        self._states = b"\n".join(line for line in states if line != state.encode()) + b"\n"
        return state.encode() in states

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.is_running:
            self.popen.send_signal(number)

    def kill(self) -> None:
        """End the process and its children now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.close()

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that must stay open when the supervisor executes its command again."""
        return [self._states_fd] if self._states_fd >= 0 else []

    def close(self) -> None:
        """Close the pipe: the process then knows that no other will replace it."""
        if self._states_fd >= 0:
            os.close(self._states_fd)
            self._states_fd = -1


class Child:
    """A program with its current process, the next process, and those that drain."""

    def __init__(
        self, program: Program, env: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self.program = program
        self.environment, self._say = dict(env), say
        self._current: Process | None = None
        self._next: Process | None = None
        self._draining: list[Process] = []
        self._started_at = self._roll_until = 0.0
        self._delay = RestartDelay()
        self._restart_at: float | None = None
        self.exit_status: int | None = None
        """The exit status of the last process that died."""

    @property
    def pid(self) -> int | None:
        """The process id; None while the program does not run."""
        return self._current.popen.pid if self._current and self._current.is_running else None

    def start(self) -> None:
        """Start the program; its output is appended to its log. Raise OSError."""
        self._restart_at = None
        self._started_at = time.monotonic()
        if self._current is not None and not self._current.is_running:
            self._current.close()
        self._current = Process(self.program, self.environment, self.pid)

    def roll(self, now: float) -> None:
        """Replace the process: start the next one, and stop this one when the next is ready."""
        if self.pid is None or self.is_rolling:
            return
        if self.program.starts_alone:
            assert self._current is not None
            self._current.signal(signal.SIGTERM)  # ``restart_if_dead`` starts the next one.
            return
        self._say(f"{self.program.name}: starting the next process")
        try:
            self._next = Process(self.program, self.environment, self.pid)
        except OSError as exc:
            self._say(f"{self.program.name}: {exc}; the process before goes on")
        self._roll_until = now + _ROLL_S

    @property
    def is_rolling(self) -> bool:
        """Whether the next process is starting."""
        return self._next is not None

    def restart_if_dead(self, now: float) -> None:
        """Replace a process that stops or has died; continue a replacement that is in progress."""
        for process in [each for each in self._draining if not each.is_running]:
            process.close()
            self._draining.remove(process)
        if self._next is not None:
            self._check_next(self._next, now)
        if self._restart_at is not None:
            if now >= self._restart_at:
                self._start_or_retry(now)
        elif self._current is not None and self._current.take_state("stopping"):
            self._say(f"{self.program.name} stops; starting the next process")
            self._draining.append(self._current)
            if self._next is None:
                self._start_or_retry(now)
            else:
                self._switch(self._next)
        elif self._current is not None and self._current.take_state("restart"):
            self.roll(now)
        elif self._current is not None and not self._current.is_running:
            if self._next is None:
                self._schedule_restart(self._current, now)
            else:
                self._current.close()
                self._switch(self._next)

    def _start_or_retry(self, now: float) -> None:
        """Start the program; try again later where the system has no memory or no log for it."""
        try:
            self.start()
        except OSError as exc:
            delay_s = self._delay.after(0)
            self._say(f"{self.program.name}: {exc}; trying again in {delay_s:g} s")
            self._restart_at = now + delay_s

    def _check_next(self, process: Process, now: float) -> None:
        """Switch to the next process when it is ready; stop it when it fails to start."""
        if process.take_state("ready"):
            self._say(f"{self.program.name}: the next process is ready")
            if self._current is not None:
                self._current.signal(signal.SIGTERM)
                self._draining.append(self._current)
            self._restart_at = None
            self._switch(process)
        elif process.take_state("failed") or not process.is_running or now > self._roll_until:
            self._say(
                f"{self.program.name}: the next process did not get ready; the one before it goes "
                f"on (log: {self.program.log})"
            )
            process.close()
            process.signal(signal.SIGTERM)
            self._draining.append(process)
            self._next = None

    def _switch(self, process: Process) -> None:
        self._current, self._next, self._started_at = process, None, time.monotonic()

    def _schedule_restart(self, process: Process, now: float) -> None:
        self.exit_status = status = process.popen.wait()
        delay_s = self._delay.after(now - self._started_at)
        how = f"exited with status {status}"
        if status < 0:
            how = f"was killed by {signal_name(-status)}"
        self._say(
            f"{self.program.name} {how}; restarting in {delay_s:g} s (log: {self.program.log})"
        )
        self._restart_at = now + delay_s

    def logged(self) -> str:
        """Return the part of the log that the current process has written."""
        with self.program.log.open("rb") as log:
            log.seek(self._current.log_start if self._current else 0)
            return log.read().decode(errors="replace")

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that must stay open."""
        return [each for process in self._all for each in process.descriptors]

    @property
    def _all(self) -> list[Process]:
        return [each for each in (self._current, self._next, *self._draining) if each is not None]

    def terminate(self) -> None:
        """Have all processes of the program drain and end, without replacements."""
        for process in self._all:
            process.close()
            process.signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """Have processes that drain end at once."""
        for process in self._all:
            process.signal(signal.SIGINT)

    def wait(self, deadline: float, *, kills: bool = True) -> bool:
        """Return whether all processes ended by the deadline; kill the others if ``kills``."""
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


def _before_exec() -> None:
    """Have SIGHUP restart the process, also under ``nohup``, which applies to the supervisor only.

    On Linux, have the kernel stop the process if the supervisor is killed.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _next(received: SimpleQueue[int]) -> int:
    """Return the next signal. Raise Empty after ``_WATCH_S`` without one."""
    try:
        # Without this, ``get`` may find its lock free. It takes the lock, subtracts the time that
        # took from its timeout, and waits for ever if the rest is negative (Python 3.11 to 3.12).
        return received.get_nowait()
    except Empty:
        return received.get(timeout=_WATCH_S)


def say(line: str) -> None:
    """Print a line for the operator."""
    with contextlib.suppress(OSError):  # The terminal may be closed.
        sys.stdout.write(f"[serve] {line}\n")
        sys.stdout.flush()


class Supervisor:
    """The running services and processes, and the descriptors of the lock and the socket."""

    def __init__(self) -> None:
        self.postgres: EmbeddedPostgres | None = None
        self.redis: Child | None = None
        self.children: list[Child] = []
        self.descriptors: list[int] = []
        self.directories: list[Path] = []
        """Directories of sockets, which are removed when this process ends."""
        self._next_postgres_check = 0.0

    def run(self, started: threading.Event | None) -> None:
        """Watch until a stop signal; after the event is set, in a process without Django."""
        if started is None or not self.watch(started):
            self.hand_over()
            self.watch()

    def watch(self, until: threading.Event | None = None) -> bool:
        """Restart dead processes until SIGINT or SIGTERM arrives, or until the event is set.

        SIGHUP replaces web, worker and beat, one process after the other. With a terminal, SIGHUP
        means that the terminal is closed, and stops everything. Return whether a signal arrived.
        """
        # Not an Event: a handler that sets it while ``wait`` has its lock would wait for ever.
        received: SimpleQueue[int] = SimpleQueue()
        for number in (*_SIGNALS, signal.SIGCHLD):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: received.put(number))  # See ``nohup``.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        to_roll: list[Child] = []
        while True:
            with contextlib.suppress(Empty):
                arrived = _next(received)
                if arrived == signal.SIGHUP and not sys.stdout.isatty():
                    to_roll = list(self.children)
                elif arrived != signal.SIGCHLD:
                    return True
            self.restart_dead()
            # One after the other, because two processes of a program take twice the memory.
            if to_roll and not any(child.is_rolling for child in self.children):
                to_roll.pop(0).roll(time.monotonic())
            if until is not None and until.is_set() and not to_roll:
                signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # ``resume`` gets the next ones.
                if received.empty():
                    return False
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def restart_dead(self) -> None:
        """Restart each dead process whose restart delay is over."""
        now = time.monotonic()
        for child in self._all:
            child.restart_if_dead(now)
        # An embedded PostgreSQL is no child process; it is checked every second.
        if self.postgres is None or now < self._next_postgres_check:
            return
        self._next_postgres_check = now + 1
        try:
            if self.postgres.restart_if_dead():
                say("postgres had died; started again")
        except ServiceError as exc:
            self._next_postgres_check = now + 10
            say(str(exc))

    @property
    def _all(self) -> list[Child]:
        """Redis, if it is a process of this stack, and the children."""
        return [*([self.redis] if self.redis else []), *self.children]

    def stop(self) -> None:
        """Stop web, worker and beat, then Redis and PostgreSQL."""
        # A second Ctrl-C must not interrupt the shutdown.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        started = time.monotonic()
        for child in self.children:
            child.terminate()
        ended = [child.wait(started + _DRAIN_S, kills=False) for child in self.children]
        if not all(ended):
            for child in self.children:
                child.interrupt()
        for child in self.children:
            child.wait(started + _STOP_S)
        if self.redis is not None:
            self.redis.terminate()
            self.redis.wait(time.monotonic() + 2)
        if self.postgres is not None:
            self.postgres.stop()

    def hand_over(self) -> None:
        """Execute the command again, which continues in ``resume``; return only if that fails.

        For the main thread: the kernel ties child processes to the thread that started them.
        """
        if not hasattr(os, "memfd_create"):
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # They are delivered later.
        self.directories = made_directories
        state = os.memfd_create("serve", 0)
        with os.fdopen(os.dup(state), "wb") as file:
            pickle.dump(self, file)
        os.lseek(state, 0, os.SEEK_SET)
        pipes = (descriptor for child in self._all for descriptor in child.descriptors)
        for descriptor in (*self.descriptors, *pipes):
            os.set_inheritable(descriptor, True)
        sys.stdout.flush()
        command = [sys.executable, *sys.orig_argv[1:]]
        try:
            os.execve(  # noqa: S606  # The same command.
                sys.executable, command, {**os.environ, STATE_FD: str(state)}
            )
        except OSError as exc:
            say(f"cannot give memory back: {exc.strerror}")
            os.close(state)


def resume() -> None:
    """Continue with the state that ``hand_over`` pickled, until everything is stopped."""
    with os.fdopen(int(os.environ.pop(STATE_FD)), "rb") as file:
        supervisor: Supervisor = pickle.load(file)  # noqa: S301  # This process wrote it.
    remove_at_exit(supervisor.directories)
    supervisor.watch()
    stop(supervisor)


def stop(supervisor: Supervisor) -> None:
    """Stop all processes; print when it begins and ends."""
    say("stopping")
    supervisor.stop()
    say("stopped")
