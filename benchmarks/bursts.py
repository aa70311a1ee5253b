"""What many requests at one moment cost each other: ``python -m benchmarks.bursts``.

Each burst comes over connections that are opened in one moment, to a stack of its own. Times are
from the opening of the connection; those of a client that is late itself count, too, because it
shares the processors with the stack.
"""

import argparse
import asyncio
import json
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import django
import psycopg
import redis

from benchmarks.figures import add_write_option, keep
from benchmarks.load import Address, percentile
from benchmarks.open_streams import allow_files
from benchmarks.processes import end_on_sigterm
from benchmarks.targets import Endpoint, platform_with
from benchmarks.waiters import key_of_another_project

_SLOW = json.dumps([{"repeat": 10_000, "steps": [{"text": "Once "}, {"sleep_ms": 1000}]}])
_MODELS = {
    "narrow": {"engine": "scripted", "slots": 64, "context_length": 1_000_000},
    "wide": {"engine": "scripted", "slots": 1000, "context_length": 1_000_000},
    "few": {"engine": "scripted", "slots": 4, "context_length": 1_000_000},
}
_BRIEF = {"model": "few", "input": '[{"sleep_ms": 1000}, {"text": "ok"}]', "background": True}
_BEFORE = """
SELECT count(*) FILTER (WHERE crowd.claimed_at IS NULL OR crowd.claimed_at > one.created_at),
    count(*) FILTER (WHERE crowd.claimed_at BETWEEN one.created_at AND one.claimed_at),
    round(extract(epoch FROM one.claimed_at - one.created_at), 2)
FROM generations_generation crowd
JOIN generations_generation one ON one.project_id <> crowd.project_id
WHERE one.model = 'few' AND crowd.model = 'few' AND one.claimed_at IS NOT NULL
    AND one.id = (SELECT max(id) FROM generations_generation)
GROUP BY one.id
"""
_FILL = """
INSERT INTO generations_generation
SELECT filled.* FROM generations_generation one, generate_series(1, %(rows)s) number,
    LATERAL jsonb_populate_record(one, jsonb_build_object(
        'id', nextval(pg_get_serial_sequence('generations_generation', 'id')),
        'public_id', 'filling-' || number, 'status', 'queued', 'worker', '', 'claimed_at', null,
        'attempt', 0, 'service_class', %(class)s)) filled
WHERE one.id = (SELECT max(id) FROM generations_generation WHERE status = 'running')
"""
_WAITING = "SELECT count(*) FROM generations_generation WHERE model = 'few' AND status = 'queued'"
_PATIENCE_S = 240.0
_CODE = re.compile(rb'"code": ?"(\w+)"')


class Caller(asyncio.Protocol):
    """One request over a connection of its own; ``answered`` is done at the first byte."""

    def __init__(self) -> None:
        self.began_at, self.first_byte_s, self.head = time.perf_counter(), 0.0, b""
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None

    def data_received(self, data: bytes) -> None:
        if len(self.head) < 2000:
            self.head += data
        if not self.answered.done():
            self.first_byte_s = time.perf_counter() - self.began_at
            self.answered.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        for future in (self.answered, self.ended):
            if not future.done():
                future.set_result(None)

    @property
    def outcome(self) -> str:
        """The status with the code of its error, ``reset`` or ``silent``."""
        if not self.first_byte_s:
            return "reset" if self.answered.done() else "silent"
        status = self.head[9:12].decode()
        found = _CODE.search(self.head) if status != "200" else None
        return f"{status} {found[1].decode()}" if found else status


@dataclass
class Burst:
    """The callers of one burst, and what became of them."""

    callers: list[Caller] = field(default_factory=list)
    refused: int = 0

    def figures(self) -> dict[str, dict[str, float]]:
        """Return for each outcome how many there were, and when their first byte came (s)."""
        found = {}
        for outcome, count in Counter(caller.outcome for caller in self.callers).items():
            times = sorted(c.first_byte_s for c in self.callers if c.outcome == outcome)
            found[outcome] = {
                "count": count,
                "p50_s": round(percentile(times, 50), 2),
                "p99_s": round(percentile(times, 99), 2),
                "max_s": round(times[-1], 2),
            }
        if self.refused:
            found["connection refused"] = {"count": self.refused}
        return found

    def leave(self) -> None:
        """Close all connections in one moment."""
        for caller in self.callers:
            if caller.transport is not None:
                caller.transport.abort()


def request(endpoint: Endpoint, key: str, path: str, body: object = None) -> bytes:
    """Return a request that asks for the end of its connection."""
    address = Address.of(endpoint.url)
    payload = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{'GET' if body is None else 'POST'} {address.path}/{path} HTTP/1.1\r\n"
        f"Host: {address.host}:{address.port}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + payload


def chat(model: str, script: str, *, stream: bool) -> dict[str, object]:
    messages = [{"role": "user", "content": script}]
    return {"model": model, "messages": messages, "stream": stream}


async def send(endpoint: Endpoint, sent: bytes, times: int, timeout_s: float) -> Burst:
    """Send a request so many times at once; return when all have a first byte, or timed out."""
    address, burst = Address.of(endpoint.url), Burst()
    loop = asyncio.get_running_loop()

    async def call() -> None:
        caller = Caller()
        try:
            made = await loop.create_connection(lambda: caller, address.host, address.port)
        except OSError:
            burst.refused += 1
            return
        burst.callers.append(caller)
        caller.transport = made[0]
        caller.transport.write(sent)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(caller.answered), timeout_s)

    await asyncio.gather(*(call() for _ in range(times)))
    return burst


async def seconds_of(endpoint: Endpoint, key: str, model: str = "wide") -> float:
    """Return how long a short chat takes."""
    asked = request(endpoint, key, "chat/completions", chat(model, '[{"text":"ok"}]', stream=False))
    one = await send(endpoint, asked, 1, _PATIENCE_S)
    if not one.callers or one.callers[0].outcome != "200":
        return float("nan")
    return one.callers[0].first_byte_s


async def connects(endpoint: Endpoint, other: str) -> dict[str, object]:
    """1,500 connections at once, each with a request for the list of models."""
    del other
    burst = await send(endpoint, request(endpoint, endpoint.key, "models"), 1500, _PATIENCE_S)
    return {"answers": burst.figures()}


async def more_than_fit(endpoint: Endpoint, other: str) -> dict[str, object]:
    """5,000 streams at once, for 64 slots and a queue of 2,000; and somebody else's requests."""
    asked = chat("narrow", _SLOW, stream=True)
    sent = request(endpoint, endpoint.key, "chat/completions", asked)
    sending = asyncio.create_task(send(endpoint, sent, 5000, _PATIENCE_S))
    took = []
    while not sending.done():
        await asyncio.sleep(0.5)
        took.append(await seconds_of(endpoint, other))
    burst = await sending
    again = await send(endpoint, sent, 200, 30)
    bystander = {"requests": len(took), "max_s": round(max(took), 2)}
    found = {"answers": burst.figures(), "200 more": again.figures(), "another project": bystander}
    again.leave()
    return found | await left(endpoint, burst, other)


async def leaving(endpoint: Endpoint, other: str) -> dict[str, object]:
    """1,000 streams that run leave at once."""
    asked = chat("wide", _SLOW, stream=True)
    sent = request(endpoint, endpoint.key, "chat/completions", asked)
    burst = Burst()
    for _ in range(10):
        burst.callers += (await send(endpoint, sent, 100, _PATIENCE_S)).callers
    return {"answers": burst.figures()} | await left(endpoint, burst, other)


async def left(endpoint: Endpoint, burst: Burst, other: str) -> dict[str, object]:
    """Close all connections; return how long that kept others, and what was left of it."""
    burst.leave()
    began = time.perf_counter()
    next_s = await seconds_of(endpoint, other, "wide")
    with psycopg.connect(endpoint.database_url, autocommit=True) as database:
        while going_on(database) and time.perf_counter() - began < _PATIENCE_S:
            await asyncio.sleep(0.2)
        ended_s = time.perf_counter() - began
        await asyncio.sleep(10)  # What is late comes now.
        cursor = database.execute(
            "SELECT status, error_code, count(*) FROM generations_generation "
            "WHERE status NOT IN ('completed') GROUP BY 1, 2"
        )
        rows = {f"{status} {code}".strip(): count for status, code, count in cursor.fetchall()}
    found: dict[str, object] = {"rows": rows, "keys left": keys(endpoint)}
    return found | {"all ended s": round(ended_s, 2), "next request s": round(next_s, 2)}


def going_on(database: "psycopg.Connection[tuple[int]]") -> int:
    found = database.execute(
        "SELECT count(*) FROM generations_generation WHERE status IN ('queued', 'running')"
    ).fetchone()
    assert found is not None
    return found[0]


def keys(endpoint: Endpoint) -> dict[str, int]:
    """Count the keys of generations in Redis by what they are, but for logs, which expire soon."""
    assert endpoint.data_dir is not None
    services = json.loads((endpoint.data_dir / "services.json").read_text())
    with redis.Redis.from_url(services["REDIS_URL"]) as client:
        found = Counter(key.rpartition(b":")[2].decode() for key in client.scan_iter("{*}:*"))
    return {name: count for name, count in found.items() if name != "log"}


async def own_flood(endpoint: Endpoint, other: str) -> dict[str, object]:
    """300 short requests of one project at once; then its next one, and one of another."""
    asked = chat("wide", '[{"text":"ok"}]', stream=False)
    sent = request(endpoint, endpoint.key, "chat/completions", asked)
    flood = asyncio.create_task(send(endpoint, sent, 300, _PATIENCE_S))
    await asyncio.sleep(0.3)
    took = await asyncio.gather(seconds_of(endpoint, endpoint.key), seconds_of(endpoint, other))
    answers = (await flood).figures()
    return {
        "answers": answers,
        "own next s": round(took[0], 2),
        "another project s": round(took[1], 2),
    }


async def fairness(endpoint: Endpoint, other: str) -> dict[str, object]:
    """500 requests of one project wait for 4 slots; then one of another comes."""
    for _ in range(10):
        asked = request(endpoint, endpoint.key, "responses", _BRIEF)
        await send(endpoint, asked, 50, _PATIENCE_S)
    await send(endpoint, request(endpoint, other, "responses", _BRIEF), 1, _PATIENCE_S)
    with psycopg.connect(endpoint.database_url, autocommit=True) as database:
        while (found := database.execute(_BEFORE).fetchone()) is None:
            await asyncio.sleep(0.1)
    return {"waited": found[0], "of them started before": found[1], "wait s": float(found[2])}


async def deep_queue(endpoint: Endpoint, other: str) -> dict[str, object]:
    """4,990 wait, 5,000 may: 200 come at once. What a claim takes then, and when all expire."""
    del other
    held = chat("few", _SLOW, stream=True)
    running = await send(
        endpoint, request(endpoint, endpoint.key, "chat/completions", held), 4, _PATIENCE_S
    )
    with psycopg.connect(endpoint.database_url, autocommit=True) as database:
        database.execute(_FILL, {"rows": 4990, "class": 0})
        came = request(endpoint, endpoint.key, "responses", _BRIEF)
        burst = await send(endpoint, came, 200, _PATIENCE_S)
        waiting = database.execute(_WAITING).fetchone()
        claims = sorted(claim_ms(database) for _ in range(200))
        database.execute("UPDATE generations_generation SET created_at = now() - interval '1 hour'")
        began = time.perf_counter()
        while going_on(database) > 4 + 10 and time.perf_counter() - began < _PATIENCE_S:
            await asyncio.sleep(0.5)
        expired_s = time.perf_counter() - began
    running.leave()
    assert waiting is not None
    found: dict[str, object] = {"answers": burst.figures(), "waiting": waiting[0]}
    claim = {"p50": round(percentile(claims, 50), 2), "p99": round(percentile(claims, 99), 2)}
    return found | {"claim ms": claim, "4,990 expired within s": round(expired_s, 1)}


def claim_ms(database: "psycopg.Connection[tuple[int]]") -> float:
    """Return how long a claim takes that is taken back."""
    from inference_site.generations.models import CLAIM

    given: dict[str, object] = {"model": "few", "worker": "w", "served": list[int]()}
    given |= {"is_idle": True, "may_empty": False}
    database.execute("BEGIN")
    began = time.perf_counter()
    database.execute(CLAIM.encode(), given)
    took_s = time.perf_counter() - began
    database.execute("ROLLBACK")
    return took_s * 1000


BURSTS: dict[str, Callable[[Endpoint, str], Awaitable[dict[str, object]]]] = {
    "connects": connects,
    "own_flood": own_flood,
    "more_than_fit": more_than_fit,
    "leaving": leaving,
    "fairness": fairness,
    "deep_queue": deep_queue,
}
_SETTINGS = {"deep_queue": {"QUEUE_LIMIT": "5000"}}


async def measure(endpoint: Endpoint, name: str) -> dict[str, object]:
    other = key_of_another_project(endpoint)
    for key in (endpoint.key, other):  # To warm up.
        for _ in range(20):
            await seconds_of(endpoint, key)
    return await BURSTS[name](endpoint, other)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=BURSTS, default=list(BURSTS))
    add_write_option(parser)
    options = parser.parse_args(arguments)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inference_site.settings")
    os.environ.setdefault("SECRET_KEY", "only-for-this-benchmark")
    django.setup()
    end_on_sigterm()
    allow_files(5500)
    figures = {}
    for name in options.only:
        with platform_with(_MODELS, _SETTINGS.get(name)) as endpoint:
            figures[name] = asyncio.run(measure(endpoint, name))
        print(name, json.dumps(figures[name], indent=1), flush=True)
    if options.write:
        keep("bursts", figures)


if __name__ == "__main__":
    main()
