"""Processor time of a request, against that of its parts without the product.

``python -m benchmarks.floor``: whole answers of one token through the platform, one at a time, in
front of a server that costs next to nothing; and, on the same machine in the same run, what its
libraries take to do nothing: Daphne to answer 200, psycopg and PostgreSQL to insert a row into a
copy of the platform's table and to update it twice, redis-py and Redis for the commands of a
request, Celery to run an empty task, aiohttp to ask the upstream. Each is done many times, and the
tenth percentile counts: what else runs on the machine makes the others dearer. Needs Linux.
"""

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

import aiohttp
import psutil
import psycopg
import redis
from celery import Celery

from benchmarks.bare_parts import BROKER, TASK
from benchmarks.figures import add_write_option, keep
from benchmarks.gateway import paced
from benchmarks.load import Address, LoadPlan, complete, messages, percentile, request_bytes
from benchmarks.paced_upstream import MODEL
from benchmarks.parts import part_of, processes_of, settle
from benchmarks.processes import end_on_sigterm, free_port, running, wait_for_ok
from benchmarks.targets import READY_TIMEOUT_S, Endpoint, platform_with

_TIMES, _WARM_UP = 200, 30
_TAIL_S = 0.03
"""For what a server does after it has answered."""
_QUEUE = "floor"
_NEW = """
INSERT INTO floor (
    public_id, kind, project_id, api_key_id, model, request_id, service_class, streamed,
    background, end_user, ignored_params, status, worker, preferred_worker, attempt, created_at,
    input_tokens, cached_tokens, output_tokens, reasoning_tokens, prefill_ms, decode_ms, cost,
    reserved_tokens, reserved_cost, is_accounted, finish_reason, error_code
) VALUES (%s, 'k', 1, 1, 'm', 'r', 0, false, false, '', '{}', 'queued', '', '', 0, now(),
    0, 0, 0, 0, 0, 0, 0, 0, 0, false, '', '')
"""
_MOVES = (
    "UPDATE floor SET status = 'running', claimed_at = now(), attempt = 1 WHERE public_id = %s",
    "UPDATE floor SET status = 'completed', finished_at = now(), output_tokens = 1 "
    "WHERE public_id = %s",
)
Parts = Mapping[str, list[int]]
"""Ids of processes, by what they are counted as."""


def parts_of(endpoint: Endpoint, *names: str) -> Parts:
    """Return the processes of these parts of a target; all of its processes without a name."""
    parts: dict[str, list[int]] = {}
    for process in processes_of(endpoint):
        with suppress(psutil.Error):
            parts.setdefault(part_of(process), []).append(process.pid)
    return {name: parts[name] for name in names or parts}


def spent_us(pids: list[int]) -> float:
    """Return the processor microseconds of processes so far, with those of their threads."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):
                total += int(task.read_text().split()[0])
    return total / 1000


def costs(do: Callable[[], object], parts: Parts) -> dict[str, float]:
    """Return the processor time of each part for one call; each gets a moment to finish."""
    seen: dict[str, list[float]] = {part: [] for part in parts}
    for number in range(_WARM_UP + _TIMES):
        before = {part: spent_us(pids) for part, pids in parts.items()}
        do()
        time.sleep(_TAIL_S)
        for part, pids in parts.items():
            if number >= _WARM_UP:
                seen[part].append(spent_us(pids) - before[part])
    return {part: round(percentile(sorted(values), 10)) for part, values in seen.items()}


def request(endpoint: Endpoint) -> Callable[[], object]:
    """Return a function that sends one request and reads its answer."""
    plan = LoadPlan(endpoint.url, endpoint.key, endpoint.model, 1, max_tokens=1, whole=True)
    address, numbers = Address.of(plan.url), count()

    def ask() -> None:
        sample = asyncio.run(complete(address, request_bytes(plan, address, next(numbers))))
        assert sample.error is None, sample.error

    return ask


def rows(connection: psycopg.Connection) -> Callable[[], object]:
    """Return a function that writes a row in three transactions, as a request does."""
    connection.execute("CREATE TABLE floor (LIKE generations_generation INCLUDING ALL)")
    numbers = count()

    def write() -> None:
        id_ = str(next(numbers))
        for statement in (_NEW, *_MOVES):
            connection.execute(statement, [id_], prepare=True)

    return write


def commands(client: redis.Redis) -> Callable[[], object]:
    """Return a function that sends Redis a request's commands one by one, of about their sizes."""
    small, large = b"x" * 500, b"x" * 1000

    def send() -> None:
        client.llen("bare:queue")
        client.set("bare:document", large, ex=60)
        client.lpush("bare:queue", small)
        client.brpop(["bare:queue"], 1)
        client.get("bare:document")
        client.xadd("bare:log", {"b": small}, maxlen=10)
        client.publish("bare", small)

    return send


@contextmanager
def bare_daphne() -> Iterator[Endpoint]:
    """Run Daphne with an application that answers immediately."""
    port = free_port()
    command = [sys.executable, "-m", "daphne", "-p", str(port), "-v", "0"]
    with running("daphne", [*command, "benchmarks.bare_parts:answer"], {}) as process:
        url = f"http://127.0.0.1:{port}/v1"
        wait_for_ok("daphne", url, process, READY_TIMEOUT_S)
        yield Endpoint(url, "none", MODEL, process)


@contextmanager
def bare_celery(broker: str) -> Iterator[Endpoint]:
    """Run a Celery worker that has an empty task."""
    command = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "benchmarks.bare_parts",
        "worker",
        "-Q",
        _QUEUE,
    ]
    command += ["-P", "threads", "-c", "8", "-l", "WARNING"]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    with running("celery", command, {BROKER: broker}) as process:
        yield Endpoint("", "", "", process)


@contextmanager
def asking(upstream: Endpoint) -> Iterator[Callable[[], object]]:
    """Yield a function that requests a stream of one token from the upstream and reads it."""
    body = {"model": MODEL, "messages": messages(1), "max_tokens": 1, "stream": True}

    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.post(f"{upstream.url}/chat/completions", json=body) as response:
            await response.read()

    with asyncio.Runner() as runner:

        async def opened() -> aiohttp.ClientSession:
            return aiohttp.ClientSession()

        session = runner.run(opened())
        yield lambda: runner.run(ask(session))
        runner.run(session.close())


def bare_costs(upstream: Endpoint, platform: Endpoint) -> dict[str, float]:
    """Return the microseconds of each bare part."""
    assert platform.data_dir is not None
    services = json.loads((platform.data_dir / "services.json").read_text())
    broker = str(services["REDIS_URL"]).replace("unix://", "redis+socket://", 1)
    sender, here = Celery("floor", broker=broker, fixups=[]), {"here": [os.getpid()]}
    with ExitStack() as stack:
        daphne = stack.enter_context(bare_daphne())
        worker = stack.enter_context(bare_celery(broker))
        connection = stack.enter_context(psycopg.connect(platform.database_url, autocommit=True))
        client = stack.enter_context(redis.Redis.from_url(services["REDIS_URL"]))
        ask = stack.enter_context(asking(upstream))
        servers = parts_of(platform, "redis")
        backend = {"server": [connection.info.backend_pid]}
        to_write = costs(rows(connection), {**here, **backend})
        to_send = costs(commands(client), {**here, **servers})
        empty = costs(lambda: sender.send_task(TASK, queue=_QUEUE), parts_of(worker))
        return {
            "daphne": sum(costs(request(daphne), parts_of(daphne)).values()),
            "psycopg": to_write["here"],
            "postgres": to_write["server"],
            "redis-py": to_send["here"],
            "redis": to_send["redis"],
            "celery": sum(empty.values()),
            "aiohttp": costs(ask, here)["here"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_write_option(parser)
    options = parser.parse_args()
    end_on_sigterm()
    with paced(100.0) as upstream:
        entry = {"engine": "openai_upstream", "base_url": upstream.url, "slots": 64}
        with platform_with({MODEL: entry}) as platform:
            settle(platform)
            processes = parts_of(platform, "web", "worker", "postgres", "redis")
            ours, bare = costs(request(platform), processes), bare_costs(upstream, platform)
    ratio = sum(ours.values()) / math.fsum(bare.values())
    found = {"times": _TIMES, "request": ours, "bare": bare, "ratio": round(ratio, 2)}
    print(json.dumps(found, indent=1))
    if options.write:
        keep("floor", found)


if __name__ == "__main__":
    main()
