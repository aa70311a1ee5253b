"""The overhead of the platform over a bare ``llm.generate()`` loop of ctransformers, in one run.

``python -m benchmarks.ctransformers``. Both have the same file, threads, samplers and prompts,
answer one request after another with as many tokens, and are loaded in turn, several times, because
the machine is never quite the same for long. The platform is asked over HTTP, and streams.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.figures import add_write_option, keep
from benchmarks.load import LoadPlan, messages, run_load
from benchmarks.processes import CACHE, end_on_sigterm
from benchmarks.targets import Endpoint, platform_with
from benchmarks.weights import random_weights
from inference_site.catalogue.catalogue import DEMO_FILE

MUST = 0.90
CONTEXT_LENGTH = 2048
SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1}
"""The defaults of ``generate``."""


class Bare:
    """The library alone: only the loop of its documentation."""

    def __init__(self, file: Path, threads: int) -> None:
        from ctransformers.llm import LLM, Config

        config = Config(context_length=CONTEXT_LENGTH, threads=threads)
        self._llm: Any = LLM(str(file), config=config)
        self._llm.is_eos_token = lambda _token: False  # As with `ignore_eos`.

    def tokens_per_s(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Answer the prompts; the time to read them counts."""
        tokens, started = 0, time.perf_counter()
        for prompt in prompts:
            for number, _token in enumerate(self._llm.generate(prompt), 1):
                if number == max_tokens:
                    break
            tokens += max_tokens
        return tokens / (time.perf_counter() - started)


def prompts_of(endpoint: Endpoint, first: int, count: int) -> list[list[int]]:
    """Return prompts of the load as tokens, which the platform's model makes of them."""
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    found = []
    with httpx.Client(headers=headers) as client:
        for number in range(first, first + count):
            body = {"model": endpoint.model, "messages": messages(number)}
            answer = client.post(f"{endpoint.url}/tokenize", json=body).raise_for_status()
            found.append(answer.json()["tokens"])
    return found


def measure(endpoint: Endpoint, bare: Bare, options: argparse.Namespace) -> tuple[float, float]:
    """Load both in turn; print and return the tokens/s of the loop and of the platform."""
    plan = LoadPlan(
        endpoint.url,
        endpoint.key,
        endpoint.model,
        streams=1,
        rounds=options.rounds,
        max_tokens=options.max_tokens,
        body=SAMPLING,
    )
    alone, through, errors = [], [], 0
    for repetition in range(options.repetitions + 1):
        first = repetition * options.rounds
        prompts = prompts_of(endpoint, first, options.rounds)
        alone.append(bare.tokens_per_s(prompts, options.max_tokens))
        loaded = asyncio.run(run_load(replace(plan, first_prompt=first)))
        through.append(loaded.tokens_per_s)
        errors += loaded.errors
    bare_speed, speed = median(alone[1:]), median(through[1:])  # The first warms both up.
    print(f"{'bare loop':12} {bare_speed:8,.0f} tokens/s")
    print(f"{'platform':12} {speed:8,.0f} tokens/s   {errors} errors")
    print(f"{'share':12} {speed / bare_speed:8.2f}            must {MUST:.2f}")
    return bare_speed, speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("demo", "130m"), default="demo")
    parser.add_argument("--rounds", type=int, default=3, help="requests of each repetition")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    add_write_option(parser)
    options = parser.parse_args()
    end_on_sigterm()
    file = DEMO_FILE
    if options.model == "130m":
        file = random_weights(CACHE / "random-130m-q8_0.gguf", DEMO_FILE)
    entry = {
        "engine": "ctransformers",
        "file": str(file),
        "slots": 1,
        "threads": options.threads,
        "context_length": CONTEXT_LENGTH,
    }
    bare = Bare(file, options.threads)
    with platform_with({options.model: entry}) as endpoint:
        bare_speed, speed = measure(endpoint, bare, options)
    if options.write:
        part = f"ctransformers/{options.model}, {options.max_tokens} tokens"
        keep(part, {"bare": bare_speed, "platform": speed, "share": speed / bare_speed})
    sys.exit(speed / bare_speed < MUST)


if __name__ == "__main__":
    main()
