"""Bursts of simultaneous requests and their effect on others: ``python -m benchmarks.bursts``.

Each burst comes over connections that are opened in one moment, to a stack of its own. Times are
from the opening of the connection. The client is a process with an account of its own, but it
shares the processors with the stack.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import django
import psutil
import psycopg
import redis

from benchmarks.figures import add_write_option, keep
from benchmarks.load import Address, percentile
from benchmarks.open_streams import allow_files
from benchmarks.parts import processor_s
from benchmarks.processes import end_on_sigterm, free_port, running
from benchmarks.targets import Endpoint, platform_with
from benchmarks.volley import Sender, Volley, ask, spread
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


def address_of(endpoint: Endpoint) -> tuple[str, int]:
    address = Address.of(endpoint.url)
    return address.host, address.port


def sender(endpoint: Endpoint, sent: bytes, times: int, timeout_s: float = _PATIENCE_S) -> Sender:
    """Return a sender that starts ``times`` copies of a request at the same time."""
    return Sender(address_of(endpoint), sent, times, timeout_s)


async def send(endpoint: Endpoint, sent: bytes, times: int) -> Volley:
    """Send ``times`` copies of a request; return when each has a first byte, and disconnect."""
    sending = sender(endpoint, sent, times)
    volley = await asyncio.to_thread(sending.wait)
    sending.leave()
    return volley


async def seconds_of(endpoint: Endpoint, key: str, model: str = "wide") -> float:
    """Return how long a short chat takes."""
    asked = request(endpoint, key, "chat/completions", chat(model, '[{"text":"ok"}]', stream=False))
    one = await asyncio.to_thread(ask, address_of(endpoint), asked, _PATIENCE_S)
    return one.first_byte_s if one.outcome == "200" else float("nan")


async def connects(endpoint: Endpoint, other: str) -> dict[str, object]:
    """1,500 simultaneous connections, each with a request for the list of models."""
    del other
    volley = await send(endpoint, request(endpoint, endpoint.key, "models"), 1500)
    return {"answers": volley.figures()}


async def more_than_fit(endpoint: Endpoint, other: str) -> dict[str, object]:
    """5,000 streams at once, for 64 slots and a share of 1,000; and requests of another project.

    The floor is what the same requests find at Daphne with nothing but a 503.
    """
    asked = chat("narrow", _SLOW, stream=True)
    sent = request(endpoint, endpoint.key, "chat/completions", asked)
    floor = await refusals_of_bare_server(sent, 5000)
    before = processor_s(endpoint)["web"]
    sending = sender(endpoint, sent, 5000)
    waiting, took = asyncio.create_task(asyncio.to_thread(sending.wait)), list[float]()
    while not waiting.done():
        took.append(await seconds_of(endpoint, other))
        await asyncio.sleep(0.1)
    volley = await waiting
    web_s = processor_s(endpoint)["web"] - before
    late = sender(endpoint, sent, 200, 30)
    again = await asyncio.to_thread(late.wait)
    late.leave()
    refused = spread([s for outcome, s in volley.answers if outcome.startswith(("429", "503"))])
    found: dict[str, object] = {
        "answers": volley.figures(),
        "refused": refused,
        "floor": floor,
        "refused to the floor": round(refused["p50_s"] / floor["p50_s"], 2),
        "another project": spread(took),
        "processor s": {"web": round(web_s, 2), "client": round(volley.client_cpu_s, 2)},
        "200 more": again.figures(),
    }
    return found | await left(endpoint, [sending], other)


async def refusals_of_bare_server(sent: bytes, times: int) -> dict[str, float]:
    """Return how long a bare server takes to refuse this number of simultaneous requests."""
    address = ("127.0.0.1", free_port())
    command = [sys.executable, "-m", "benchmarks.bare_server", str(address[1])]
    with running("bare_server", command, {}) as process:
        while not ask(address, sent, 1).first_byte_s:
            await asyncio.sleep(0.1)
        server = psutil.Process(process.pid)
        before = sum(server.cpu_times()[:2])
        sending = Sender(address, sent, times, _PATIENCE_S)
        volley = await asyncio.to_thread(sending.wait)
        sending.leave()
        used_s = sum(server.cpu_times()[:2]) - before
    return spread([s for _, s in volley.answers]) | {"processor_s": round(used_s, 2)}


async def leaving(endpoint: Endpoint, other: str) -> dict[str, object]:
    """1,000 running streams disconnect at the same time."""
    asked = chat("wide", _SLOW, stream=True)
    sent = request(endpoint, endpoint.key, "chat/completions", asked)
    senders, counts = list[Sender](), Counter[str]()
    for _ in range(10):
        senders.append(sender(endpoint, sent, 100))
        counts += (await asyncio.to_thread(senders[-1].wait)).counts()
    return {"answers": dict(counts)} | await left(endpoint, senders, other)


async def left(endpoint: Endpoint, senders: Sequence[Sender], other: str) -> dict[str, object]:
    """Close all connections; return how long others were delayed, and the leftovers."""
    for sending in senders:
        sending.leave()
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
    """Count the keys of generations in Redis by their kind, without logs, which expire soon."""
    assert endpoint.data_dir is not None
    services = json.loads((endpoint.data_dir / "services.json").read_text())
    with redis.Redis.from_url(services["REDIS_URL"]) as client:
        found = Counter(key.rpartition(b":")[2].decode() for key in client.scan_iter("{*}:*"))
    return {name: count for name, count in found.items() if name != "log"}


async def own_flood(endpoint: Endpoint, other: str) -> dict[str, object]:
    """300 simultaneous short requests of one project; then its next one, and one of another."""
    asked = chat("wide", '[{"text":"ok"}]', stream=False)
    sent = request(endpoint, endpoint.key, "chat/completions", asked)
    flood = asyncio.create_task(send(endpoint, sent, 300))
    await asyncio.sleep(0.3)
    took = await asyncio.gather(seconds_of(endpoint, endpoint.key), seconds_of(endpoint, other))
    answers = (await flood).figures()
    return {
        "answers": answers,
        "own next s": round(took[0], 2),
        "another project s": round(took[1], 2),
    }


async def fairness(endpoint: Endpoint, other: str) -> dict[str, object]:
    """500 requests of one project wait for 4 slots; then another project sends one."""
    for _ in range(10):
        asked = request(endpoint, endpoint.key, "responses", _BRIEF)
        await send(endpoint, asked, 50)
    await send(endpoint, request(endpoint, other, "responses", _BRIEF), 1)
    with psycopg.connect(endpoint.database_url, autocommit=True) as database:
        while (found := database.execute(_BEFORE).fetchone()) is None:
            await asyncio.sleep(0.1)
    return {"waited": found[0], "of them started before": found[1], "wait s": float(found[2])}


async def deep_queue(endpoint: Endpoint, other: str) -> dict[str, object]:
    """200 requests of a project with 4,990 of 5,000 waiting: times of a claim and of expiry."""
    del other
    held = chat("few", _SLOW, stream=True)
    holding = sender(endpoint, request(endpoint, endpoint.key, "chat/completions", held), 4)
    await asyncio.to_thread(holding.wait)
    with psycopg.connect(endpoint.database_url, autocommit=True) as database:
        database.execute(_FILL, {"rows": 4990, "class": 0})
        came = request(endpoint, endpoint.key, "responses", _BRIEF)
        volley = await send(endpoint, came, 200)
        waiting = database.execute(_WAITING).fetchone()
        claims = sorted(claim_ms(database) for _ in range(200))
        database.execute("UPDATE generations_generation SET created_at = now() - interval '1 hour'")
        began = time.perf_counter()
        while going_on(database) > 4 + 10 and time.perf_counter() - began < _PATIENCE_S:
            await asyncio.sleep(0.5)
        expired_s = time.perf_counter() - began
    holding.leave()
    assert waiting is not None
    found: dict[str, object] = {"answers": volley.figures(), "waiting": waiting[0]}
    claim = {"p50": round(percentile(claims, 50), 2), "p99": round(percentile(claims, 99), 2)}
    return found | {"claim ms": claim, "4,990 expired within s": round(expired_s, 1)}


def claim_ms(database: "psycopg.Connection[tuple[int]]") -> float:
    """Return how long a claim takes; the claim is rolled back."""
    from inference_site.runs.models import CLAIM

    given: dict[str, object] = {"model": "few", "worker": "w", "served": list[int]()}
    given |= {"is_idle": True, "may_drain": False, "below": 11}
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
_SETTINGS = {"deep_queue": {"QUEUE_LIMIT": "10000"}}


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
