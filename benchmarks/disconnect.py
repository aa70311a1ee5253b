"""The time until a slot is free after its client has disconnected.

``python -m benchmarks.disconnect``. One client after the other reads a few tokens of an answer that
would go on for minutes and closes its connection; then the row is looked at until it is terminal.
The reference is the same look at rows that end by themselves: what looking costs.
"""

import argparse
import json
import sys
import time

import httpx
import psycopg

from benchmarks.figures import add_write_option, keep
from benchmarks.load import percentile
from benchmarks.processes import end_on_sigterm
from benchmarks.targets import Endpoint, platform_with

MUST_MS = 500
SCRIPTED = {"engine": "scripted", "slots": 1, "context_length": 1_000_000}
_ENDLESS = [{"repeat": 10_000, "steps": [{"text": "x "}, {"sleep_ms": 20}]}]
_SHORT = [{"text": "x "}, {"text": "y"}]
_STATUS = b"SELECT status FROM generations_generation WHERE public_id = %s"


def left_after_ms(endpoint: Endpoint, database: psycopg.Connection, steps: object) -> float:
    """Return the milliseconds from closing a stream until its row is terminal."""
    body = {
        "model": endpoint.model,
        "stream": True,
        "messages": [{"role": "user", "content": json.dumps(steps)}],
    }
    with (
        httpx.Client(headers={"Authorization": f"Bearer {endpoint.key}"}, timeout=30) as client,
        client.stream("POST", f"{endpoint.url}/chat/completions", json=body) as response,
    ):
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        first = json.loads(next(lines).removeprefix("data: "))
        next(lines)
    started = time.perf_counter()
    while database.execute(_STATUS, [first["id"]]).fetchone() in (("running",), ("queued",)):
        time.sleep(0.001)
    return (time.perf_counter() - started) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    add_write_option(parser)
    options = parser.parse_args()
    end_on_sigterm()
    with (
        platform_with({"scripted": SCRIPTED}) as endpoint,
        psycopg.connect(endpoint.database_url, autocommit=True) as database,
    ):
        worst, figures = 0.0, {}
        for name, steps in (("ends by itself", _SHORT), ("client leaves", _ENDLESS)):
            waits = sorted(left_after_ms(endpoint, database, steps) for _ in range(options.times))
            worst = waits[-1]
            middle, tail = percentile(waits, 50), percentile(waits, 99)
            figures[name] = {"p50_ms": middle, "p99_ms": tail, "worst_ms": worst}
            print(f"{name:16} p50 {middle:6.1f} ms   p99 {tail:6.1f} ms   worst {worst:6.1f} ms")
    print(f"must {MUST_MS} ms")
    if options.write:
        keep("disconnect", figures)
    sys.exit(worst > MUST_MS)


if __name__ == "__main__":
    main()
