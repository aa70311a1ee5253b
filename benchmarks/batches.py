"""A batch against clients that send the same lines: ``python -m benchmarks.batches``.

A scripted engine with a fixed pace answers lines of about a hundred bytes. First 32 clients send
them, with nothing beside; then a batch does. After that a batch runs beside one client that sends
requests again and again, whose time to first token is compared with that without the batch. The
memory of each process is that before the batches and its maximum meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import aiohttp
import httpx
import psutil

from benchmarks.processes import descendants
from benchmarks.targets import Endpoint, platform_with

_MODEL = "paced"
_CLIENTS = 32
_PATH = "/v1/chat/completions"


def _body(number: int, sleep_ms: int) -> dict[str, object]:
    said = json.dumps([{"sleep_ms": sleep_ms}, {"text": f"n {number}"}])
    return {"model": _MODEL, "messages": [{"role": "user", "content": said}]}


async def _send_all(endpoint: Endpoint, lines: int, sleep_ms: int) -> float:
    """Have the clients send all lines; return the lines per second."""
    numbers = iter(range(lines))
    headers = {"Authorization": f"Bearer {endpoint.key}"}

    async def client(http: aiohttp.ClientSession) -> None:
        for number in numbers:
            url = f"{endpoint.url}/chat/completions"
            async with http.post(url, json=_body(number, sleep_ms)) as answer:
                answer.raise_for_status()
                await answer.read()

    began = time.monotonic()
    async with aiohttp.ClientSession(headers=headers) as http:
        await asyncio.gather(*(client(http) for _ in range(_CLIENTS)))
    return lines / (time.monotonic() - began)


class _Batch:
    """A batch of ``lines`` lines, made through the API."""

    def __init__(self, endpoint: Endpoint, lines: int, sleep_ms: int) -> None:
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        self._http = httpx.Client(base_url=endpoint.url, headers=headers, timeout=120)
        entries = (
            {"custom_id": f"{n}", "method": "POST", "url": _PATH, "body": _body(n, sleep_ms)}
            for n in range(lines)
        )
        content = "\n".join(map(json.dumps, entries)).encode()
        form = {"purpose": "batch"}
        file = self._http.post("/files", data=form, files={"file": ("lines.jsonl", content)}).json()
        asked = {"input_file_id": file["id"], "endpoint": _PATH, "completion_window": "24h"}
        self._id = self._http.post("/batches", json=asked).json()["id"]
        self.lines = lines

    def wait(self) -> dict[str, float]:
        """Wait for its end; return the seconds of its validation, its run and its results."""
        while (batch := self._http.get(f"/batches/{self._id}").json())["status"] != "completed":
            assert batch["status"] in ("validating", "in_progress", "finalizing"), batch
            time.sleep(0.5)
        counts = {"total": self.lines, "completed": self.lines, "failed": 0}
        assert batch["request_counts"] == counts, batch
        return {
            "validation": batch["in_progress_at"] - batch["created_at"],
            "run": max(1, batch["finalizing_at"] - batch["in_progress_at"]),
            "results": batch["completed_at"] - batch["finalizing_at"],
        }


def _first_tokens(endpoint: Endpoint, count: int, sleep_ms: int) -> list[float]:
    """Return the times to first token, in ms, of requests one after the other."""
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    found = []
    with httpx.Client(base_url=endpoint.url, headers=headers, timeout=60) as http:
        for number in range(count):
            began = time.monotonic()
            body = {**_body(number, sleep_ms), "stream": True}
            with http.stream("POST", "/chat/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if '"content":"n' in line:
                        found.append(1000 * (time.monotonic() - began))
    return found


@contextmanager
def _memory(endpoint: Endpoint) -> Iterator[dict[str, tuple[float, float]]]:
    """Yield a mapping that has, at the end, the MiB of each process before and at most."""
    found: dict[str, tuple[float, float]] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            for process in descendants(endpoint.process.pid):
                with suppress(psutil.Error):
                    words = [*process.cmdline(), "", "", ""]
                    name = words[2] if words[1].endswith("manage.py") else ""
                    if name in ("web", "worker", "beat"):
                        mib = process.memory_info().rss / 2**20
                        before, most = found.get(name, (mib, mib))
                        found[name] = before, max(most, mib)
            over.wait(0.5)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser("benchmarks.batches", description=__doc__)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--sleep-ms", type=int, default=50)
    options = parser.parse_args()
    entry = {"engine": "scripted", "slots": options.slots, "context_length": 4_096}
    with platform_with({_MODEL: entry}, {}) as endpoint:
        asyncio.run(_send_all(endpoint, 200, options.sleep_ms))  # Warms up.
        of_clients = asyncio.run(_send_all(endpoint, options.lines, options.sleep_ms))
        with _memory(endpoint) as memory:
            times = _Batch(endpoint, options.lines, options.sleep_ms).wait()
        of_batch = options.lines / times["run"]
        alone = _first_tokens(endpoint, 200, options.sleep_ms)
        beside_batch = _Batch(endpoint, options.lines, options.sleep_ms)
        ended = threading.Event()
        shared: dict[str, float] = {}

        def wait() -> None:
            shared.update(beside_batch.wait())
            ended.set()

        threading.Thread(target=wait).start()
        time.sleep(times["validation"] + 2)
        beside: list[float] = []
        while not ended.is_set():
            beside += _first_tokens(endpoint, 20, options.sleep_ms)
    print(f"| {options.lines:,} lines, {options.slots} slots | lines/s | share |")
    print("|---|---|---|")
    print(f"| {_CLIENTS} clients | {of_clients:,.0f} | 100 % |")
    print(f"| batch | {of_batch:,.0f} | {of_batch / of_clients:.0%} |")
    rate = options.lines / shared["run"]
    print(f"| batch, one client beside it | {rate:,.0f} | {rate / of_clients:.0%} |")
    print(f"\nvalidation {times['validation']} s, results {times['results']} s")
    for name, (before, most) in sorted(memory.items()):
        print(f"{name}: {before:.0f} MiB before, {most:.0f} at most, {most - before:+.0f}")
    p99 = {key: statistics.quantiles(ms, n=100)[98] for key, ms in _named(alone, beside)}
    for key, ms in _named(alone, beside):
        print(f"first token {key}: median {statistics.median(ms):.0f} ms, p99 {p99[key]:.0f}")
    print(f"p99 beside a batch / alone: {p99['beside a batch'] / p99['alone']:.2f}")


def _named(alone: list[float], beside: list[float]) -> tuple[tuple[str, list[float]], ...]:
    return ("alone", alone), ("beside a batch", beside)


if __name__ == "__main__":
    main()
