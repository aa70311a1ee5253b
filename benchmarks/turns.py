"""More models than fit: the cost when clients use all of them at the same time.

``python -m benchmarks.turns``. Scripted models that take a while to load share a few places.
Clients first ask for one model after the other, all for the same, so that each is loaded once; then
each sends the same requests in an order of its own. The ratio of the two throughputs is what the
turns cost. The longest wait of a request is printed beside what the loads and stays before it can
come to.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx

from benchmarks.processes import end_on_sigterm
from benchmarks.targets import Endpoint, platform_with

MUST = 0.7
_PATIENCE_S = 600


def ask_all(
    endpoint: Endpoint, options: argparse.Namespace, asked: Callable[[int, int], str]
) -> tuple[float, float, int]:
    """Return requests a second, the longest wait in seconds, and how many failed."""
    steps = json.dumps([{"text": "x"}, {"sleep_ms": options.answer_ms}, {"text": "y"}])

    def be_a_client(number: int) -> list[tuple[float, bool]]:
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        seen = []
        with httpx.Client(base_url=endpoint.url, headers=headers, timeout=_PATIENCE_S) as http:
            for turn in range(options.requests):
                message = {"role": "user", "content": steps}
                body = {"model": asked(number, turn), "messages": [message]}
                began = time.monotonic()
                answer = http.post("chat/completions", json=body)
                seen.append((time.monotonic() - began, answer.status_code == 200))
        return seen

    began = time.monotonic()
    with ThreadPoolExecutor(options.clients) as pool:
        found = pool.map(be_a_client, range(options.clients))
        seen = [one for each in found for one in each]
    spent_s = time.monotonic() - began
    return len(seen) / spent_s, max(s for s, _ in seen), sum(not ok for _, ok in seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=6)
    parser.add_argument("--places", type=int, default=3)
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--requests", type=int, default=24, help="of each client")
    parser.add_argument("--answer-ms", type=int, default=500)
    parser.add_argument("--load-ms", type=int, default=500)
    parser.add_argument("--stay", type=float, default=2.0, help="min_resident, in seconds")
    options = parser.parse_args()
    end_on_sigterm()
    names = [f"m{number}" for number in range(options.models)]
    entry = {"engine": "scripted", "slots": 10, "load_ms": options.load_ms}
    entry["min_resident"] = options.stay
    settings = {
        "START_MODELS": names[0],
        "LOAD_ON_DEMAND": "true",
        "LOAD_WAIT_S": str(_PATIENCE_S),
        "MAX_LOADED_MODELS": str(options.places),
    }
    share = options.requests / options.models
    order = [names[int(turn / share)] for turn in range(options.requests)]
    draw = random.Random(0)  # The same orders each time.
    orders = [draw.sample(order, len(order)) for _ in range(options.clients)]
    with platform_with(dict.fromkeys(names, entry), settings) as endpoint:
        sorted_ = ask_all(endpoint, options, lambda _, turn: order[turn])
        mixed = ask_all(endpoint, options, lambda number, turn: orders[number][turn])
    for name, (rate, longest_s, failed) in (("sorted", sorted_), ("mixed", mixed)):
        print(f"{name:8} {rate:7.1f} requests/s   longest {longest_s:5.1f} s   failed {failed}")
    ahead = options.models * (options.load_ms / 1000 + options.stay)
    print(f"loads and stays of all models: {ahead:.1f} s; ratio {mixed[0] / sorted_[0]:.2f}")
    sys.exit(mixed[2] > 0 or mixed[0] < MUST * sorted_[0])


if __name__ == "__main__":
    main()
