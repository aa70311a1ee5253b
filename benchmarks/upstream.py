"""The overhead of the upstream engine over direct requests to llama.cpp's server, in the same run.

``python -m benchmarks.upstream --streams 4``. Both are loaded in turn, several times, because the
machine is never quite the same for long. The engine runs in a process of its own, as in a worker,
but without the platform; its processor time is that of the whole process while it answers. What a
process cannot save, taking the bytes off the socket as they come, is measured beside it.
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.figures import Figures, add_write_option, keep
from benchmarks.load import Address, LoadPlan, request_bytes, run_load
from benchmarks.processes import ROOT, end_on_sigterm
from benchmarks.targets import ServedFile, llama_cpp
from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.core.domain.deltas import Delta, Usage
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import GenerationRequest, Message, Sampling
from worker.engines.base import Engine, load_engine


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens of a load, its seconds, and the processor seconds of the process that read them."""

    tokens: int
    seconds: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_ms_per_10_tokens(self) -> float:
        return 10_000 * self.cpu_s / self.tokens


class CountingSink:
    """Discards everything but the count."""

    cancelled = False

    def __init__(self) -> None:
        self.tokens = 0

    def feed(self, delta: Delta) -> None:
        if isinstance(delta, Usage):
            self.tokens = delta.output_tokens


def ask(engine: Engine, numbers: range, max_tokens: int, counts: list[int]) -> None:
    """Ask one question after another, the same as ``benchmarks.load`` does."""
    for number in numbers:
        message = Message("user", f"{number} Tell me a story about a fox.")
        sink = CountingSink()
        engine.run(
            GenerationRequest(
                "demo",
                (message,),
                Sampling(temperature=0),
                max_output_tokens=max_tokens,
                ignore_eos=True,
            ),
            sink,
        )
        counts.append(sink.tokens)


def read(plan: LoadPlan, number: int) -> None:
    """Read one answer from the socket, and parse only its end."""
    address = Address.of(plan.url)
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(request_bytes(plan, address, number))
        while connection.recv(65_536):
            pass


def timed(plan: LoadPlan, engine: Engine | None) -> Cost:
    """Run the plan with the engine, or with bare sockets, on a thread for each stream."""
    counts: list[int] = []
    rounds = plan.rounds or 1

    def stream(number: int) -> None:
        first = plan.first_prompt + number * rounds
        if engine is not None:
            ask(engine, range(first, first + rounds), plan.max_tokens, counts)
            return
        for question in range(first, first + rounds):
            read(plan, question)
            counts.append(plan.max_tokens)

    threads = [threading.Thread(target=stream, args=(n,)) for n in range(plan.streams)]
    started, cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cpu_s = time.process_time() - cpu
    return Cost(sum(counts), time.perf_counter() - started, cpu_s)


def serve_engine(url: str) -> None:
    """Answer plans, one a line on standard input, with costs: the process that is measured."""
    spec = ModelSpec(
        "demo", "openai_upstream", slots=64, options={"base_url": url, "flavor": "llama_cpp"}
    )
    engine = load_engine(spec)
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        reader = engine if order.pop("engine") else None
        print(json.dumps(asdict(timed(LoadPlan(**order), reader))), flush=True)
    engine.close()


class Reader:
    """The measured process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, plan: LoadPlan, engine: bool) -> Cost:
        """Run the plan in the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {**asdict(plan), "engine": engine}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Cost(**json.loads(self._process.stdout.readline()))


def measure(plan: LoadPlan, reader: Reader, repetitions: int) -> Figures:
    """Load all three in turn; print and return the figures."""
    direct: list[float] = []
    engine: list[Cost] = []
    sockets: list[Cost] = []
    prompts = 0
    for _ in range(repetitions):
        for target in ("direct", "engine", "sockets"):
            asked = LoadPlan(**{**asdict(plan), "first_prompt": prompts})
            prompts += plan.streams * (plan.rounds or 1)
            if target == "direct":
                direct.append(asyncio.run(run_load(asked)).tokens_per_s)
            else:
                costs = engine if target == "engine" else sockets
                costs.append(reader.run(asked, engine=target == "engine"))
    through = median(cost.tokens_per_s for cost in engine)
    print(f"streams                        {plan.streams:8}")
    print(f"llama.cpp's server, directly   {median(direct):8,.0f} tokens/s")
    print(f"through the engine             {through:8,.0f} tokens/s")
    print(f"ratio                          {through / median(direct):8.2f}")
    cpu_ms = {}
    for name, costs in (("engine", engine), ("bare sockets", sockets)):
        cost = cpu_ms[name] = median(cost.cpu_ms_per_10_tokens for cost in costs)
        print(f"{f'processor, {name}':30} {cost:8.2f} ms for 10 tokens")
    return {"streams": plan.streams, "direct": median(direct), "through": through, **cpu_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="requests of each stream")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--serve-engine", metavar="URL", help=argparse.SUPPRESS)
    add_write_option(parser)
    options = parser.parse_args()
    end_on_sigterm()
    if options.serve_engine:
        serve_engine(options.serve_engine)
        return
    with llama_cpp(ServedFile("demo", DEMO_FILE, slots=options.streams)) as endpoint:
        command = [sys.executable, "-m", "benchmarks.upstream", "--serve-engine", endpoint.url]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
            plan = LoadPlan(
                endpoint.url,
                endpoint.key,
                endpoint.model,
                options.streams,
                rounds=options.rounds,
                max_tokens=options.max_tokens,
            )
            figures = measure(plan, Reader(process), options.repetitions)
    if options.write:
        keep("upstream", figures)


if __name__ == "__main__":
    main()
