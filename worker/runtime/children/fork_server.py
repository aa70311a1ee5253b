"""The fork server: a copy of the worker from before its first thread and connection, which forks.

A child worker that is forked from it has all modules already, and shares their memory: it starts in
a tenth of the time of a new Python. Forking the worker itself would copy its threads' locks.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NoReturn

_LONGEST_ORDER = 65536
_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class ChildOrder:
    """What a forked process is to be: the child worker of a model.

    ``parent`` is the id of the worker that ordered it, at the other end of ``link``. ``may_idle``:
    it was loaded at run time, and is unloaded when it has been idle for long.
    """

    model: str
    parent: str
    metrics_port: int
    may_idle: bool
    link: socket.socket


class ForkServer:
    """The worker's side."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pids: SimpleQueue[int] = SimpleQueue()
        self._statuses: dict[int, int] = {}
        self._changed = threading.Condition()
        self._lock = threading.Lock()

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Begin to listen. ``on_loss`` is called when the server has ended."""
        threading.Thread(
            target=self._main, args=(on_loss,), name="fork server", daemon=True
        ).start()

    def fork(self, order: ChildOrder) -> int:
        """Start a child worker; return its process id. Raise OSError, or queue.Empty in vain."""
        said = json.dumps([order.model, order.parent, order.metrics_port, order.may_idle])
        with self._lock:
            socket.send_fds(self._control, [said.encode()], [order.link.fileno()])
            return self._pids.get(timeout=_PATIENCE_S)

    def has_ended(self, pid: int) -> bool:
        """Whether this process has ended, and may not be sent a signal any more."""
        return pid in self._statuses

    def wait(self, pid: int, timeout_s: float) -> int | None:
        """Return the exit status of a process, None if it has not ended within the time."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._statuses, timeout_s)
        return self._statuses.get(pid)

    def _main(self, on_loss: Callable[[], None]) -> None:
        with contextlib.suppress(OSError), self._control.makefile("r") as lines:
            for line in lines:
                pid, status = json.loads(line)
                if status is None:
                    self._statuses.pop(pid, None)  # Of a process of this number before.
                    self._pids.put(pid)
                    continue
                with self._changed:
                    self._statuses[pid] = status
                    self._changed.notify_all()
        on_loss()


def start_fork_server() -> ForkServer | ChildOrder:
    """Fork the server; return it to the worker, and to each child worker what it is to be.

    Call it before the process has threads or connections.
    """
    gc.freeze()  # A collection in a child would copy the memory that it shares.
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return ForkServer(ours)
    ours.close()
    return _Server(theirs).run()


class _Server:
    """The server's side, which has one thread."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._awake, self._wake = os.pipe()

    def run(self) -> ChildOrder:
        """Fork until the worker has ended; return in the forked processes alone."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # It ends with the worker.
            signal.signal(number, signal.SIG_IGN)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        control = self._control.fileno()
        while True:
            ready, _, _ = select.select([control, self._awake], [], [])
            if self._awake in ready:
                os.read(self._awake, 4096)
                self._reap()
            if control in ready and (order := self._obey()) is not None:
                return order

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self._tell(found[0], os.waitstatus_to_exitcode(found[1]))

    def _obey(self) -> ChildOrder | None:
        order, descriptors, _, _ = socket.recv_fds(self._control, _LONGEST_ORDER, 1)
        if not order:
            _end()
        model, parent, port, may_idle = json.loads(order)
        link = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid:
            link.close()
            self._tell(pid, None)
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        os.close(self._awake)
        os.close(self._wake)
        return ChildOrder(model, parent, port, may_idle, link)

    def _tell(self, pid: int, status: int | None) -> None:
        try:
            self._control.sendall(json.dumps([pid, status]).encode() + b"\n")
        except OSError:
            _end()


def _end() -> NoReturn:
    os._exit(0)
