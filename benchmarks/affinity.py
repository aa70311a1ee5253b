"""The gain of sending a turn to the worker that has its conversation in its cache.

``python -m benchmarks.affinity``. Two workers serve one model; conversations of the Responses API
take their turns at once, each turn after the one before. Once with ``AFFINITY_WAIT_MS`` and once
without, in turn, on the same machine. First turns are not counted: nobody has anything of them.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median, quantiles

import httpx

from benchmarks.figures import add_write_option, keep
from benchmarks.processes import CACHE, TargetFailed, end_on_sigterm, running
from benchmarks.run import DEMO
from benchmarks.targets import Endpoint, platform_with
from benchmarks.weights import random_weights

READY_TIMEOUT_S = 120
WORDS = "river stone light paper winter garden engine letter harbor window silver morning"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: time of its first text, and cached tokens of its prompt."""

    ttft_ms: float
    input_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of conversations, of turns in each, and of words in a turn."""

    conversations: int
    turns: int
    words: int


@contextmanager
def two_workers(wait_ms: int) -> Iterator[Endpoint]:
    """Run the platform with a second worker of its model."""
    path = random_weights(CACHE / "random-130m-q8_0.gguf", DEMO)
    entry = {"file": str(path), "slots": 4, "context_length": 4096, "threads": 1}
    settings = {"AFFINITY_WAIT_MS": str(wait_ms)}
    with platform_with({"130m": entry}, settings) as endpoint:
        data = endpoint.data_dir
        assert data is not None
        environment = {
            "DATA_DIR": str(data),
            "MODELS_FILE": str(data / "models.yaml"),
            "DEMO_MODEL": "false",
            "SECRET_KEY": (data / "secret_key").read_text(),
        }
        command = [sys.executable, "manage.py", "worker"]
        with running("second_worker", command, environment):
            wait_for_workers(endpoint, 2)
            yield endpoint


def wait_for_workers(endpoint: Endpoint, count: int) -> None:
    """Return once this number of workers serves the model. Raise TargetFailed."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    with client_of(endpoint) as client:
        while time.monotonic() < deadline:
            if client.get(f"/models/{endpoint.model}").json()["workers"] == count:
                return
            time.sleep(0.2)
    raise TargetFailed(f"there are not {count} workers")


def client_of(endpoint: Endpoint) -> httpx.Client:
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    return httpx.Client(base_url=endpoint.url, headers=headers, timeout=120)


def converse(endpoint: Endpoint, plan: Plan, number: int) -> list[Turn]:
    """Take all turns of one conversation; return those after the first."""
    words = random.Random(number)  # The same words each time.
    turns, previous = [], None
    with client_of(endpoint) as client:
        for _ in range(plan.turns):
            text = " ".join(words.choices(WORDS.split(), k=plan.words))
            previous, turn = take_turn(client, endpoint.model, text, previous)
            turns.append(turn)
    return turns[1:]


def take_turn(
    client: httpx.Client, model: str, text: str, previous: str | None
) -> tuple[str, Turn]:
    """Take one turn; return the id of its response and its times. Raise TargetFailed."""
    body = {"model": model, "input": text, "max_output_tokens": 16, "stream": True}
    started, first = time.perf_counter(), None
    with client.stream("POST", "/responses", json=body | {"previous_response_id": previous}) as s:
        for line in s.iter_lines():
            if first is None and line == "event: response.output_text.delta":
                first = time.perf_counter()
            if line.startswith("data: ") and '"usage":{' in line:
                response = json.loads(line.removeprefix("data: "))["response"]
                usage = response["usage"]
                cached = usage["input_tokens_details"]["cached_tokens"]
                ttft_ms = ((first or time.perf_counter()) - started) * 1000
                return response["id"], Turn(ttft_ms, usage["input_tokens"], cached)
    raise TargetFailed("a turn did not come to its end")


def measure(wait_ms: int, plan: Plan) -> list[Turn]:
    """Run all conversations side by side; return their counted turns."""
    with two_workers(wait_ms) as endpoint, ThreadPoolExecutor(plan.conversations) as pool:
        runs = [pool.submit(converse, endpoint, plan, n) for n in range(plan.conversations)]
        return [turn for run in runs for turn in run.result()]


@dataclass(frozen=True, slots=True)
class Affinity:
    """Times of the counted turns; ``cached`` is a share of the tokens of their prompts."""

    name: str
    cached: float
    read_tokens: float
    ttft_ms_p50: float
    ttft_ms_p90: float

    def line(self) -> str:
        """Return a row of the table."""
        return (
            f"| {self.name} | {self.cached:.1%} | {self.read_tokens:,.0f} |"
            f" {self.ttft_ms_p50:,.0f} | {self.ttft_ms_p90:,.0f} |"
        )


def report(name: str, turns: list[Turn]) -> Affinity:
    """Return the times of the turns."""
    cached = sum(turn.cached_tokens for turn in turns) / sum(turn.input_tokens for turn in turns)
    read = sum(turn.input_tokens - turn.cached_tokens for turn in turns) / len(turns)
    times = [turn.ttft_ms for turn in turns]
    p90 = quantiles(times, n=10)[-1]
    return Affinity(name, cached, read, median(times), p90)


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(description="Measure affinity with two workers.")
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--words", type=int, default=150)
    parser.add_argument("--wait-ms", type=int, default=200, help="AFFINITY_WAIT_MS when it is on")
    add_write_option(parser)
    options = parser.parse_args()
    plan = Plan(options.conversations, options.turns, options.words)
    print("| affinity | cached tokens | read tokens a turn | TTFT ms, p50 | p90 |")
    print("|---|---|---|---|---|")
    rows = []
    for name, wait_ms in (("off", 0), (f"{options.wait_ms} ms", options.wait_ms)):
        rows.append(report(name, measure(wait_ms, plan)))
        print(rows[-1].line(), flush=True)
    if options.write:
        keep("affinity", {**asdict(plan), "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
