"""Waits of other requests while many requests wait for one conversation.

``python -m benchmarks.waiters``. A client of one project asks for short answers, one after the
other: first alone, then while 200 requests of another project wait for a conversation that an
endless response holds. The ratio of the two is what the waiters cost the bystander.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import time
from typing import Any

import httpx

from benchmarks.load import percentile
from benchmarks.processes import ROOT, end_on_sigterm
from benchmarks.targets import Endpoint, platform_with

WAITERS = 200
SCRIPTED = {"engine": "scripted", "slots": 4, "context_length": 1_000_000}
_LOCK_WAIT_S = 120
_SETTLE_S = 10.0
_ENDLESS = json.dumps([{"repeat": 100_000, "steps": [{"text": "x "}, {"sleep_ms": 20}]}])


def client(endpoint: Endpoint, key: str) -> httpx.Client:
    return httpx.Client(
        base_url=endpoint.url, headers={"Authorization": f"Bearer {key}"}, timeout=60
    )


def key_of_another_project(endpoint: Endpoint) -> str:
    command = [sys.executable, "manage.py", "create_api_key", "--project", "bystander"]
    database = {"DATABASE_URL": endpoint.database_url, "DATA_DIR": str(endpoint.data_dir)}
    made = subprocess.run(
        [*command, "--name", "bystander"],
        cwd=ROOT,
        env=os.environ | database,
        check=True,
        capture_output=True,
        text=True,
    )
    return made.stdout.strip()


def answer_times_ms(http: httpx.Client, model: str, times: int) -> list[float]:
    """Return how long short chats took, in milliseconds, ascending."""
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    took = []
    for _ in range(times):
        started = time.perf_counter()
        http.post("chat/completions", json=body).raise_for_status()
        took.append((time.perf_counter() - started) * 1000)
    return sorted(took)


def wait_in_line(url: str, key: str, body: dict[str, str], waiters: int, waiting: Any) -> None:
    """Send a request on each of ``waiters`` connections; ``waiting`` counts the unanswered ones."""

    async def main() -> None:
        limits = httpx.Limits(max_connections=None)
        headers = {"Authorization": f"Bearer {key}"}

        async def wait(http: httpx.AsyncClient, number: int) -> None:
            await asyncio.sleep(number * 0.01)  # The backlog of the port is shorter than the line.
            waiting.value += 1
            try:
                await http.post(url, json=body)
            finally:
                waiting.value -= 1

        async with httpx.AsyncClient(headers=headers, limits=limits, timeout=_LOCK_WAIT_S) as http:
            waits = (wait(http, number) for number in range(waiters))
            await asyncio.gather(*waits, return_exceptions=True)

    asyncio.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=400)
    parser.add_argument("--waiters", type=int, default=WAITERS)
    options = parser.parse_args()
    end_on_sigterm()
    settings = {"CONVERSATION_LOCK_WAIT_S": str(_LOCK_WAIT_S)}
    with (
        platform_with({"scripted": SCRIPTED}, settings) as endpoint,
        client(endpoint, endpoint.key) as owner,
        client(endpoint, key_of_another_project(endpoint)) as bystander,
    ):
        conversation = owner.post("conversations", json={}).raise_for_status().json()["id"]
        held = {"model": endpoint.model, "input": _ENDLESS, "conversation": conversation}
        answer_times_ms(bystander, endpoint.model, 50)  # To warm up.
        owner.post("responses", json={**held, "background": True}).raise_for_status()
        results = [answer_times_ms(bystander, endpoint.model, options.times)]
        url, waiting = f"{endpoint.url}/responses", multiprocessing.Value("i", 0)
        arguments = (url, endpoint.key, held, options.waiters, waiting)
        line = multiprocessing.Process(target=wait_in_line, args=arguments, daemon=True)
        line.start()
        time.sleep(_SETTLE_S)
        results.append(answer_times_ms(bystander, endpoint.model, options.times))
        still_waiting = waiting.value
        line.kill()
    for name, took in zip(("alone", f"{still_waiting} waiters"), results, strict=True):
        print(f"{name:12} p50 {percentile(took, 50):6.1f} ms   p99 {percentile(took, 99):6.1f} ms")
    ratios = [percentile(results[1], p) / percentile(results[0], p) for p in (50, 99)]
    print(f"{'ratio':12} p50 {ratios[0]:6.2f}      p99 {ratios[1]:6.2f}")


if __name__ == "__main__":
    main()
