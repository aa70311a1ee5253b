"""Simultaneous requests, sent by a separate cheap process.

It has one epoll and a request that is made once. Its processor time is measured apart from
that of the server: some 60 µs for a connection, of which most is the kernel's.
"""

import multiprocessing
import os
import re
import select
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from benchmarks.load import percentile

_CODE = re.compile(rb'"code": ?"(\w+)"')
_HEAD = 2000
"""Bytes of an answer that are kept."""


@dataclass(slots=True)
class Answer:
    """The answer on one connection; ``first_byte_s`` is from its opening, 0 for nothing."""

    began_at: float
    first_byte_s: float = 0.0
    head: bytes = b""
    has_ended: bool = False

    @property
    def outcome(self) -> str:
        """The status with the code of its error, ``reset`` or ``silent``."""
        if not self.first_byte_s:
            return "reset" if self.has_ended else "silent"
        status = self.head[9:12].decode()
        found = _CODE.search(self.head) if status != "200" else None
        return f"{status} {found[1].decode()}" if found else status


@dataclass(frozen=True)
class Volley:
    """The result of one volley: outcomes with their times (s), and the cost of its client."""

    answers: Sequence[tuple[str, float]]
    client_cpu_s: float

    def counts(self) -> Counter[str]:
        """Return the number of each outcome."""
        return Counter(outcome for outcome, _ in self.answers)

    def figures(self) -> dict[str, dict[str, float]]:
        """Return for each outcome its number and the times of its first bytes (s)."""
        return {
            wanted: spread([s for outcome, s in self.answers if outcome == wanted])
            for wanted in self.counts()
        }


def spread(given: Sequence[float]) -> dict[str, float]:
    """Return the number of times (s), two percentiles of them, and the longest."""
    times = sorted(given) or [float("nan")]
    return {
        "count": len(given),
        "p50_s": round(percentile(times, 50), 2),
        "p99_s": round(percentile(times, 99), 2),
        "max_s": round(times[-1], 2),
    }


@dataclass
class _Connections:
    """The connections of one volley, in the process that sends it."""

    address: tuple[str, int]
    request: bytes
    poll: select.epoll = field(default_factory=select.epoll)
    open: dict[int, tuple[socket.socket, Answer]] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    waiting: int = 0

    def send(self, count: int) -> None:
        """Open ``count`` connections at the same time."""
        for _ in range(count):
            connection = socket.socket()
            connection.setblocking(False)
            answer = Answer(time.perf_counter())
            connection.connect_ex(self.address)
            self.open[connection.fileno()] = connection, answer
            self.answers.append(answer)
            self.poll.register(connection, select.EPOLLOUT)
        self.waiting = count

    def run(self, timeout_s: float) -> None:
        """Send and read until each has a first byte, or the time is up."""
        deadline = time.perf_counter() + timeout_s
        while self.waiting and (left_s := deadline - time.perf_counter()) > 0:
            for descriptor, events in self.poll.poll(min(left_s, 1.0), 512):
                self._on(descriptor, events)

    def _on(self, descriptor: int, events: int) -> None:
        connection, answer = self.open[descriptor]
        try:
            if events & select.EPOLLOUT:
                connection.sendall(self.request)
                self.poll.modify(descriptor, select.EPOLLIN)
                return
            data = connection.recv(65536)
        except OSError:
            data = b""
        if data and not answer.first_byte_s:
            answer.first_byte_s = time.perf_counter() - answer.began_at
            self.waiting -= 1
        if len(answer.head) < _HEAD:
            answer.head += data
        if not data:
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        connection, answer = self.open.pop(descriptor)
        answer.has_ended = True
        self.waiting -= not answer.first_byte_s
        self.poll.unregister(descriptor)
        connection.close()


def ask(address: tuple[str, int], request: bytes, timeout_s: float) -> Answer:
    """Send one request from this process; return its outcome at the first byte."""
    connections = _Connections(address, request)
    connections.send(1)
    connections.run(timeout_s)
    connections.poll.close()
    for connection, _ in connections.open.values():
        connection.close()
    return connections.answers[0]


class Sender:
    """A running volley: ``wait`` for its answers, then ``leave``."""

    def __init__(
        self, address: tuple[str, int], request: bytes, count: int, timeout_s: float
    ) -> None:
        self._pipe, pipe = multiprocessing.Pipe()
        arguments = (pipe, address, request, count, timeout_s)
        self._process = multiprocessing.Process(target=_send, args=arguments, daemon=True)
        self._process.start()

    def wait(self) -> Volley:
        """Return the outcomes when all connections have a first byte or have timed out."""
        volley = self._pipe.recv()
        assert isinstance(volley, Volley)
        return volley

    def leave(self) -> None:
        """Close all connections at the same time."""
        self._pipe.send(None)
        self._process.join()


def _send(
    pipe: Connection, address: tuple[str, int], request: bytes, count: int, timeout_s: float
) -> None:
    before = time.process_time()
    connections = _Connections(address, request)
    connections.send(count)
    connections.run(timeout_s)
    found = [(answer.outcome, answer.first_byte_s) for answer in connections.answers]
    pipe.send(Volley(found, time.process_time() - before))
    pipe.recv()
    os._exit(0)  # All connections that are open end with the process.
