"""The cost of metrics and logs: ``python -m benchmarks.metrics``.

For each token: a tick of the meter in the worker, and a message through ``Access`` in the web
process; beside them the histogram of prometheus_client that the meter stands in for. For each
request: the meter's end, and the end of ``Access`` with its line of the log.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inference_site.settings")
os.environ.setdefault("SECRET_KEY", "only-for-this-benchmark")

import django

from benchmarks.figures import add_write_option, keep

_ROUNDS, _TOKENS, _REQUESTS = 5, 200_000, 2_000
_MESSAGE = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}


def main() -> None:
    """Print the best of some rounds for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_write_option(parser)
    options = parser.parse_args()
    django.setup()
    from prometheus_client import CollectorRegistry, Histogram

    from inference_site.core.domain.deltas import Usage
    from inference_site.core.observability.metrics import Meter

    meter = Meter("demo", 1, 0.01)
    histogram = Histogram("gap", "A gap.", ["model"], registry=CollectorRegistry()).labels("demo")
    usage = Usage(input_tokens=10, output_tokens=10)
    seconds = {
        "token: Meter.tick": _best(meter.tick, _TOKENS),
        "token: Access.send": _best_of_sends(),
        "(Histogram.observe)": _best(lambda: histogram.observe(0.01), _TOKENS),
        "run: Meter": _best(lambda: _metered(Meter, usage), _REQUESTS),
        "request: Access": _best(_accessed, _REQUESTS),
    }
    for what, cost in seconds.items():
        print(f"{what:<22} {cost * 1e6:7.2f} µs")
    if options.write:
        keep("metrics", {what: cost * 1e6 for what, cost in seconds.items()})


def _metered(meter: Any, usage: Any) -> None:
    metered = meter("demo", 1, 0.01)
    metered.tick()
    metered.tick()
    metered.end("chat.completion", "completed", "", usage)


def _accessed() -> None:
    _access(_swallow).end()


def _access(send: Callable[[dict[str, Any]], Awaitable[None]]) -> Any:
    from inference_site.gateway.access import Access

    path = "/v1/chat/completions"
    access = Access({"type": "http", "method": "POST", "path": path, "headers": []}, send)
    access.facts |= {"request_id": "req_0", "model": "demo", "route": path[1:]}
    return access


async def _swallow(message: dict[str, Any]) -> None:
    """Take a message."""


def _best_of_sends() -> float:
    access = _access(_swallow)

    async def through(send: Callable[[dict[str, Any]], Awaitable[None]]) -> float:
        started = time.perf_counter()
        for _ in range(_TOKENS):
            await send(_MESSAGE)
        return (time.perf_counter() - started) / _TOKENS

    def added() -> float:
        return asyncio.run(through(access.send)) - asyncio.run(through(_swallow))

    return min(added() for _ in range(_ROUNDS))


def _best(act: Callable[[], object], times: int) -> float:
    def once() -> float:
        started = time.perf_counter()
        for _ in range(times):
            act()
        return (time.perf_counter() - started) / times

    return min(once() for _ in range(_ROUNDS))


if __name__ == "__main__":
    main()
