"""The supervisor of ``manage.py serve``: watches, restarts, replaces and stops its processes.

It does not need Django. When the site is ready, ``serve`` executes its own command again, with the
supervisor pickled into an anonymous file (``hand_over``). The process keeps its id, its children
and its open files, and frees the memory of Django. ``manage.py`` then runs ``resume`` and imports
only this package.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from inference_site.ops.serve.services import ServiceError, made_directories, remove_at_exit

if TYPE_CHECKING:
    from inference_site.ops.serve.processes import Child
    from inference_site.ops.serve.services import EmbeddedPostgres

STATE_FD = "SERVE_STATE_FD"
"""The environment variable with the descriptor of the pickled state, for the second run."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOP_S, _DRAIN_S = 7.0, 3.0
"""How long processes may take to end when ``serve`` stops, and how much of it they may drain."""
_WATCH_S = 0.2


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
        stop, hung_up = threading.Event(), threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # See ``nohup``.
            signal.signal(
                signal.SIGHUP, lambda *_: (stop if sys.stdout.isatty() else hung_up).set()
            )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        to_roll: list[Child] = []
        while not stop.wait(_WATCH_S):
            if hung_up.is_set():
                hung_up.clear()
                to_roll = list(self.children)
            self.restart_dead()
            # One after the other, because two processes of a program take twice the memory.
            if to_roll and not any(child.is_rolling for child in self.children):
                to_roll.pop(0).roll(time.monotonic())
            if until is not None and until.is_set() and not to_roll:
                return False
        return True

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
    """Stop everything and tell the operator."""
    say("stopping")
    supervisor.stop()
    say("stopped")
