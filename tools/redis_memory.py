"""Print what requests leave in Redis: ``python -m tools.redis_memory [REQUESTS] [SECONDS]``.

Starts the product, sends so many requests of each kind, waits, and prints for each sort of key how
many there are and the bytes they take.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.served_stack import ServedStack, served_stack

_LONG = "x" * 200_000
_WORDS = json.dumps([{"repeat": 100, "steps": [{"text": "word "}]}])
_MESSAGES = [{"role": "user", "content": _WORDS}]
_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "streamed chat": ("/v1/chat/completions", {"messages": _MESSAGES, "stream": True}),
    "stored response": ("/v1/responses", {"input": _WORDS}),
    "response with long instructions": ("/v1/responses", {"input": "Hi", "instructions": _LONG}),
}


def main() -> None:
    """Measure and print."""
    given = [int(argument) for argument in sys.argv[1:]]
    requests, wait_s = [*given, 200, 0][0], [*given[1:], 0][0]
    with served_stack() as stack:
        for name, (path, body) in _REQUESTS.items():
            with stack.redis() as redis:
                redis.flushall()
            time.sleep(3)  # The worker's lease is back.
            _send(stack, path, {"model": "scripted", **body}, requests)
            time.sleep(wait_s)
            _print(stack, f"{requests} times {name}, {wait_s} s later", requests)


def _send(stack: ServedStack, path: str, body: dict[str, Any], times: int) -> None:
    with stack.http() as http, ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda _: http.post(path, json=body).status_code, range(times))
        print(Counter(answers))


def _print(stack: ServedStack, title: str, requests: int) -> None:
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    with stack.redis() as redis:
        for key in redis.scan_iter(count=1000):
            sort = re.sub(r"^\{.+\}|[0-9a-f]{12,}", "ID", key.decode())
            counts[sort] += 1
            sizes[sort] += redis.memory_usage(key, samples=0) or 0
    print(f"{title}: {sum(sizes.values()) / requests:,.0f} bytes a request")
    for sort, size in sizes.most_common(6):
        print(f"  {sort}: {counts[sort]} keys, {size:,} bytes")


if __name__ == "__main__":
    main()
