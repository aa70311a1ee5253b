"""Webhooks beside endpoints that are dead: ``python -m benchmarks.webhooks --messages 10000``.

A receiver that works is sent messages at a fixed pace, first with nothing beside. Then there are
endpoints of which half refuse connections, and half accept them and never answer, each with
``--messages`` messages that wait; and others that answer after ``--slow-s``. The delay of a message
is the time from its event to its arrival. The memory is that of beat, before and at most.
"""

from __future__ import annotations

import argparse
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson
import psycopg

from benchmarks.load import percentile
from benchmarks.parts import memory_mib
from benchmarks.processes import end_on_sigterm, free_port
from benchmarks.targets import platform_with

_ENDPOINT = """
INSERT INTO outbox_endpoint (way, address, event_types, secret, old_secret, is_enabled, failures)
VALUES ('webhook', %s, '{}', 'whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw', '', true, 0) RETURNING id
"""
_MESSAGES = """
INSERT INTO outbox_message (endpoint_id, public_id, event_type, object_id, body, created_at,
    attempts, next_at, give_up_at, error)
SELECT %(endpoint)s, 'msg_' || gen_random_uuid(), 'endpoint.test', 'object ' || n %% %(objects)s,
    jsonb_build_object('type', 'endpoint.test', 'data', jsonb_build_object(
        'at', extract(epoch FROM clock_timestamp()), 'object', n %% %(objects)s, 'n', n)
    )::text, now(), 0, now(), now() + interval '72 hours', ''
FROM generate_series(%(first)s::int, %(last)s::int) n
"""
_OBJECTS = 7
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays in milliseconds, and MiB of beat at most."""

    dead: int
    waiting: int
    p50_ms: float
    p99_ms: float
    most_ms: float
    beat_mib: float


class Receiver:
    """What a receiver was posted: the delays, and the numbers of each object in their order."""

    def __init__(self) -> None:
        self.delays_ms: list[float] = []
        self.numbers: dict[int, list[int]] = defaultdict(list)

    @contextmanager
    def running(self, after_s: float = 0) -> Iterator[str]:
        """Run it; yield its address."""
        taken = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                said = orjson.loads(self.rfile.read(int(self.headers["content-length"])))["data"]
                taken.delays_ms.append(1000 * (time.time() - said["at"]))
                taken.numbers[said["object"]].append(said["n"])
                time.sleep(after_s)
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}/"
            server.shutdown()


def deaf(stack: ExitStack) -> str:
    """Return the address of a server that accepts connections and never answers."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1_000))
    return f"http://127.0.0.1:{listener.getsockname()[1]}/"


def measure(
    database: psycopg.Connection, endpoint: int, receiver: Receiver, seconds: float, beat: Any
) -> tuple[list[float], float]:
    """Send messages at the pace for this time; return the sorted delays and the MiB at most."""
    receiver.delays_ms.clear()
    receiver.numbers.clear()
    count, most = int(seconds / _PAUSE_S), 0.0
    for n in range(count):
        given = {"endpoint": endpoint, "objects": _OBJECTS, "first": n, "last": n}
        database.execute(_MESSAGES.encode(), given)
        if n % 20 == 0:
            most = max(most, beat())
        time.sleep(_PAUSE_S)
    until = time.monotonic() + 120
    while len(receiver.delays_ms) < count and time.monotonic() < until:
        time.sleep(0.1)
    assert len(receiver.delays_ms) == count, f"{len(receiver.delays_ms)} of {count} have arrived"
    for numbers in receiver.numbers.values():
        assert numbers == sorted(numbers), "messages about one object are in order"
    return sorted(receiver.delays_ms), most


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("benchmarks.webhooks", description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--dead", type=int, nargs="+", default=[2, 20])
    parser.add_argument("--slow", type=int, default=0, help="endpoints that answer slowly")
    parser.add_argument("--slow-s", type=float, default=8)
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    end_on_sigterm()
    entry = {"engine": "scripted", "slots": 2, "context_length": 4_096}
    figures: list[Delays] = []
    with ExitStack() as stack:
        settings = {"WEBHOOKS_ALLOW_PRIVATE": "true"}
        platform = stack.enter_context(platform_with({"scripted": entry}, settings))
        url = platform.database_url
        database = stack.enter_context(psycopg.connect(url, autocommit=True))
        receiver = Receiver()

        def add(address: str) -> int:
            row = database.execute(_ENDPOINT.encode(), [address]).fetchone()
            assert row is not None
            return int(row[0])

        def wait_for(endpoint: int, last: int) -> None:
            given = {"endpoint": endpoint, "objects": 100, "first": 1, "last": last}
            database.execute(_MESSAGES.encode(), given)

        works = add(stack.enter_context(receiver.running()))

        def beat() -> float:
            return memory_mib(platform).get("beat", 0.0)

        measure(database, works, receiver, 3, beat)  # Warms up: beat imports what it posts with.
        there = 0
        for dead in (0, *options.dead):
            for n in range(there, dead):
                address = deaf(stack) if n % 2 else f"http://127.0.0.1:{free_port()}/"
                wait_for(add(address), options.messages)
            there = dead
            if dead:
                for _ in range(options.slow if dead == options.dead[-1] else 0):
                    slow = stack.enter_context(Receiver().running(options.slow_s))
                    wait_for(add(slow), options.messages)
            delays, most = measure(database, works, receiver, options.seconds, beat)
            figures.append(
                Delays(
                    dead=dead,
                    waiting=dead * options.messages,
                    p50_ms=round(percentile(delays, 50)),
                    p99_ms=round(percentile(delays, 99)),
                    most_ms=round(delays[-1]),
                    beat_mib=round(most, 1),
                )
            )
    print("| dead endpoints | messages that wait | p50, ms | p99, ms | most, ms | beat, MiB |")
    print("|---|---|---|---|---|---|")
    for one in figures:
        numbers = f"{one.p50_ms:,.0f} | {one.p99_ms:,.0f} | {one.most_ms:,.0f} | {one.beat_mib}"
        print(f"| {one.dead} | {one.waiting:,} | {numbers} |")


if __name__ == "__main__":
    main()
