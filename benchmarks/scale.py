"""The platform's first bottleneck, as streams, processes and stored rows grow.

``python -m benchmarks.scale``: a number of chat completions stay open, each asking again at its
end, in front of a server that paces each stream; N web processes share a port, and M workers a
queue. ``--engine scripted`` takes the engine without weights, which needs a thread a stream. While
the streams run, it counts tokens that clients get, processor time of each process, commands of
Redis and transactions of PostgreSQL. Clients share the processors with what they measure.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import psutil
import psycopg
import redis

from benchmarks.figures import add_write_option, keep
from benchmarks.gateway import ROOM, paced, platform_before
from benchmarks.generation_rows import insert_ended
from benchmarks.load import Address, LoadPlan, request_bytes
from benchmarks.open_streams import allow_files
from benchmarks.parts import part_of, processes_of
from benchmarks.processes import end_on_sigterm
from benchmarks.targets import Endpoint, platform_with

MODEL = "paced"
OPENING_AT_ONCE = 32
"""Requests that wait for their first token at a time."""
_AGAIN_S = 0.2
_ENOUGH = 0.98
"""The part of the streams that must be open: some always wait for their next request."""
_ROWS = insert_ended("""
SELECT 'chatcmpl-' || md5(n::text), 'chat.completion', 1, 1, %(model)s, 'req_' || md5('r' || n), 0,
    true, false, '', '{}', 'completed', 'host:1:abcdef', 1, t, t, t, t, 120, 40, 80, 5, 60, 1900,
    0.0001, 0, 0, true, '', 'stop', ''
FROM generate_series(1, %(rows)s) n,
LATERAL (SELECT now() - interval '30 days' * (1 - n::float / %(rows)s)) times (t)
""")


@dataclass(frozen=True, slots=True)
class Row:
    """Figures while the streams were open; ``busiest`` is a process and its part of a core.

    Operations of Redis and PostgreSQL are those for a thousand tokens; requests, which end and are
    sent again, are part of them. ``cores`` are all processes' shares of a core, clients and the
    paced server included.
    """

    processes: str
    stored_rows: int
    streams: int
    opened: int
    errors: int
    tokens_per_s: float
    requests_per_s: float
    redis_ops: float
    postgres_ops: float
    busiest: str
    cores: str


@dataclass(slots=True)
class Clients:
    """All streams of one load, which continue until it is cancelled."""

    plan: LoadPlan
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(OPENING_AT_ONCE))
    numbers: Iterator[int] = field(default_factory=count)
    tokens: int = 0
    requests: int = 0
    errors: int = 0
    first_error: str = ""
    opened: set["Stream"] = field(default_factory=set)

    async def keep_open(self) -> None:
        """Keep one stream open: ask, and ask again when it has ended."""
        address = Address.of(self.plan.url)
        while True:
            try:
                await self._stream(address, request_bytes(self.plan, address, next(self.numbers)))
            except (OSError, TimeoutError) as exc:
                self._note(repr(exc))
                await asyncio.sleep(_AGAIN_S)

    async def _stream(self, address: Address, request: bytes) -> None:
        loop, stream, transport = asyncio.get_running_loop(), Stream(self), None
        try:
            async with self.gate, asyncio.timeout(120):
                transport, _ = await loop.create_connection(
                    lambda: stream, address.host, address.port
                )
                transport.write(request)
                await stream.begun
            self.requests += 1
            await stream.ended
        finally:
            self.opened.discard(stream)
            if transport:
                transport.close()

    def _note(self, error: str) -> None:
        self.errors += 1
        self.first_error = self.first_error or error


class Stream(asyncio.Protocol):
    """One answer: ``begun`` is done at its first token, ``ended`` at its end."""

    def __init__(self, clients: Clients) -> None:
        loop = asyncio.get_running_loop()
        self._clients, self._head = clients, b""
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    def data_received(self, data: bytes) -> None:
        self._clients.tokens += data.count(b'"content":"')
        if not self.begun.done():
            self._head += data
            if not self._head.startswith(b"HTTP/1.1 200"):
                self.begun.set_exception(OSError(self._head[:300]))
            elif b'"content":"' in self._head:
                self._clients.opened.add(self)
                self.begun.set_result(None)
        if b"[DONE]" in data and not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clients.opened.discard(self)
        for future in (self.begun, self.ended):
            if not future.done():
                future.set_exception(exc or OSError("the connection was closed"))
                future.exception()  # Nobody may wait for it any more.


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals so far; processor seconds by process."""

    at: float
    tokens: int
    requests: int
    redis: int
    postgres: int
    processor_s: Mapping[str, float]


class Meter:
    """Reads the totals of a running platform's parts."""

    def __init__(self, endpoint: Endpoint, upstream: Endpoint | None) -> None:
        assert endpoint.data_dir is not None
        services = json.loads((endpoint.data_dir / "services.json").read_text())
        self._redis = redis.Redis.from_url(services["REDIS_URL"])
        self._database = psycopg.connect(endpoint.database_url, autocommit=True)
        self._endpoint, self._upstream = endpoint, upstream

    def read(self, clients: Clients) -> Counts:
        info: Any = self._redis.info("stats")
        self._database.execute(b"SELECT pg_stat_clear_snapshot()")
        found = self._database.execute(
            b"SELECT xact_commit + xact_rollback FROM pg_stat_database "
            b"WHERE datname = current_database()"
        ).fetchone()
        assert found is not None
        commands = int(info["total_commands_processed"])
        return Counts(
            time.monotonic(),
            clients.tokens,
            clients.requests,
            commands,
            int(found[0]),
            dict(self._spent()),
        )

    def _spent(self) -> Iterator[tuple[str, float]]:
        numbers: dict[str, Iterator[int]] = {}
        spent: dict[str, float] = {}
        # In the order in which they were started.
        for process in sorted(processes_of(self._endpoint), key=lambda one: one.pid):
            with suppress(psutil.Error):
                times, part = process.cpu_times(), part_of(process)
                used = times.user + times.system
                if part in ("web", "worker"):
                    part = f"{part} {next(numbers.setdefault(part, count(1)))}"
                elif part == "postgres":  # Each connection has a process: together.
                    used += times.children_user + times.children_system
                spent[part] = spent.get(part, 0.0) + used
        yield from spent.items()
        yield "clients", time.process_time()
        if self._upstream:
            times = psutil.Process(self._upstream.process.pid).cpu_times()
            yield "paced server", times.user + times.system

    def close(self) -> None:
        self._redis.close()
        self._database.close()


async def measure(
    endpoint: Endpoint,
    upstream: Endpoint | None,
    layout: str,
    stored: int,
    options: argparse.Namespace,
) -> list[Row]:
    """Open more and more streams, and measure at each number."""
    plan = LoadPlan(endpoint.url, endpoint.key, endpoint.model, 0, max_tokens=options.tokens)
    clients, meter, tasks = Clients(plan), Meter(endpoint, upstream), list[asyncio.Task[None]]()
    rows = []
    for streams in options.streams:
        tasks += [asyncio.create_task(clients.keep_open()) for _ in range(streams - len(tasks))]
        deadline = time.monotonic() + options.timeout_s
        while len(clients.opened) < _ENOUGH * streams and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        errors, before = clients.errors, meter.read(clients)
        await asyncio.sleep(options.seconds)
        opened, after = len(clients.opened), meter.read(clients)
        known = (layout, stored, streams, opened, clients.errors - errors)
        rows.append(row(known, before, after))
        print(rows[-1], clients.first_error, file=sys.stderr, flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    meter.close()
    return rows


def row(known: tuple[str, int, int, int, int], before: Counts, after: Counts) -> Row:
    """Return the differences of two samples."""
    seconds, tokens = after.at - before.at, max(1, after.tokens - before.tokens)
    shares = {
        part: (spent - before.processor_s.get(part, 0.0)) / seconds
        for part, spent in after.processor_s.items()
    }
    ours = {
        part: share for part, share in shares.items() if part not in ("clients", "paced server")
    }
    busiest = max(ours, key=lambda part: ours[part])
    return Row(
        *known,
        round(tokens / seconds, 1),
        round((after.requests - before.requests) / seconds, 1),
        round(1000 * (after.redis - before.redis) / tokens, 1),
        round(1000 * (after.postgres - before.postgres) / tokens, 1),
        f"{busiest} {ours[busiest]:.0%}".replace("%", " %"),
        ", ".join(f"{part} {share:.2f}" for part, share in shares.items() if share >= 0.005),
    )


def site(
    layout: str, options: argparse.Namespace, upstream: Endpoint | None
) -> AbstractContextManager[Endpoint]:
    """Run the platform with ``layout``: ``2x2`` is two web processes and two workers."""
    webs, workers = layout.split("x")
    slots = -(-max(options.streams) // int(workers)) + 8
    counts = {"WEB_PROCESSES": webs, "WORKER_PROCESSES": workers}
    if upstream:
        return platform_before(upstream, slots, ROOM | counts)
    steps: list[object] = [{"text": "Once "}, {"sleep_ms": 1000 / options.tokens_per_s}]
    script = [{"repeat": 1_000_000, "steps": steps}]
    entry = {"engine": "scripted", "slots": slots, "script": script}
    return platform_with({MODEL: entry}, ROOM | counts)


def fill(endpoint: Endpoint, stored: int) -> None:
    """Insert ended generations, as the product would have stored them."""
    if stored:
        with psycopg.connect(endpoint.database_url, autocommit=True) as database:
            psycopg.ClientCursor(database).execute(_ROWS, {"rows": stored, "model": MODEL})
            database.execute(b"VACUUM ANALYZE generations_generation")


def run(options: argparse.Namespace, upstream: Endpoint | None) -> list[Row]:
    """Measure each layout without rows, then the first with the requested number of rows."""
    rows = []
    cases = [(layout, 0) for layout in options.processes]
    cases += [(options.processes[0], stored) for stored in options.rows]
    for layout, stored in cases:
        with site(layout, options, upstream) as endpoint:
            fill(endpoint, stored)
            rows += asyncio.run(measure(endpoint, upstream, layout, stored, options))
    return rows


def table(rows: Sequence[Row]) -> str:
    names = list(asdict(rows[0]))
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    lines += [f"| {' | '.join(str(value) for value in asdict(line).values())} |" for line in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--processes", nargs="+", default=["1x1", "2x2"], help="webs x workers")
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000_000], help="stored before")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--tokens-per-s", type=float, default=1.0, help="of a stream")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long it is looked at")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="to open the streams")
    parser.add_argument("--engine", choices=("paced", "scripted"), default="paced")
    add_write_option(parser)
    options = parser.parse_args()
    options.streams.sort()
    end_on_sigterm()
    allow_files(2 * max(options.streams))
    if options.engine == "paced":
        with paced(options.tokens_per_s) as upstream:
            rows = run(options, upstream)
    else:
        rows = run(options, None)
    print(table(rows))
    if options.write:
        wanted = ("tokens_per_s", "tokens", "timeout_s")
        asked = {name: getattr(options, name) for name in wanted}
        cores = os.cpu_count() or 1
        keep("scale", {"cores": cores, **asked, "rows": [asdict(line) for line in rows]})


if __name__ == "__main__":
    main()
