"""Many requests at one moment, sent by a process of its own that costs little.

It has one epoll and a request that is made once; its processor time is told apart from the server's.
A connection costs it some 50 µs, of which most is the kernel's.
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
    """What came back over one connection; ``first_byte_s`` is from its opening on, 0 for nothing."""

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
    """What came of one volley: outcomes with their times (s), and what it cost its client."""

    answers: Sequence[tuple[str, float]] = ()
    client_cpu_s: float = 0.0
    sent_s: float = 0.0

    def figures(self) -> dict[str, dict[str, float]]:
        """Return for each outcome how many there were, and when their first byte came (s)."""
        return {outcome: _spread(self.times(outcome)) for outcome in self.counts()}

    def counts(self) -> Counter[str]:
        return Counter(outcome for outcome, _ in self.answers)

    def times(self, outcome: str) -> list[float]:
        return sorted(s for one, s in self.answers if one == outcome)


def _spread(times: Sequence[float]) -> dict[str, float]:
    return {
        "count": len(times),
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
                connection.send(self.request)
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


def _sender(
    pipe: Connection, address: tuple[str, int], request: bytes, count: int, timeout_s: float
) -> None:
    before = time.process_time()
    connections = _Connections(address, request)
    began = time.perf_counter()
    connections.send(count)
    sent_s = time.perf_counter() - began
    connections.run(timeout_s)
    found = [(answer.outcome, answer.first_byte_s) for answer in connections.answers]
    pipe.send(Volley(found, time.process_time() - before, sent_s))
    pipe.recv()  # The streams stay open until they are to leave: all with the end of this process.
    os._exit(0)


class Sender:
    """A volley that is on its way: ``wait`` for its answers, then ``leave``."""

    def __init__(
        self, host: str, port: int, request: bytes, count: int, timeout_s: float
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        arguments = (pipe, (host, port), request, count, timeout_s)
        self._process = context.Process(target=_sender, args=arguments, daemon=True)
        self._process.start()

    @property
    def has_answers(self) -> bool:
        return self._pipe.poll()

    def wait(self) -> Volley:
        """Return what came, when all have a first byte, or timed out."""
        volley = self._pipe.recv()
        assert isinstance(volley, Volley)
        return volley

    def leave(self) -> None:
        """Close all connections in one moment."""
        self._pipe.send(None)
        self._process.join()
