"""How much later the first token comes through a proxy: all in front of one server, in turns.

``python -m benchmarks.first_token [FILE]``; without a file it is that of ``make serve``, SmolLM2.
llama.cpp's own server is asked directly, through a bare proxy (``bare_proxy``), through LiteLLM
and through the platform, one request after the other. Two servers with the same file differ by
more than a proxy adds; here there is one. Each prompt is new.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import median

import httpx

from benchmarks.figures import add_write_option, keep
from benchmarks.gateway import platform_before
from benchmarks.load import Address, LoadPlan, complete, request_bytes
from benchmarks.processes import end_on_sigterm, free_port, running, wait_for_ok
from benchmarks.real_weights import CONTEXT, PROMPT_WORDS, SLOTS, model_file
from benchmarks.targets import (
    READY_TIMEOUT_S,
    Endpoint,
    ServedFile,
    litellm_before,
    llama_cpp,
)
from inference_site.core.host import physical_cores

_PAUSE_S = 0.15
"""After each answer: what is behind a proxy then ends."""
_WARM_UP = 4


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds to the first token of one way, and how much more than those of the server."""

    way: str
    ttft_ms: float
    added_ms: float


@contextmanager
def bare_proxy(upstream: Endpoint) -> Iterator[Endpoint]:
    """Run the bare proxy in front of a server."""
    port = free_port()
    command = [sys.executable, "-m", "daphne", "-b", "127.0.0.1", "-p", str(port)]
    command += ["-v", "0", "benchmarks.bare_proxy:application"]
    with running("bare proxy", command, {"UPSTREAM": upstream.url}) as process:
        wait_for_ok("bare proxy", f"http://127.0.0.1:{port}/v1/x", process, READY_TIMEOUT_S)
        yield Endpoint(f"http://127.0.0.1:{port}/v1", "none", upstream.model, process)


def first_token_ms(endpoint: Endpoint, number: int) -> float:
    """Stream an answer to the prompt of this number; return when its first text came."""
    plan = LoadPlan(endpoint.url, endpoint.key, endpoint.model, 1, max_tokens=8, words=PROMPT_WORDS)
    address = Address.of(plan.url)
    sample = asyncio.run(complete(address, request_bytes(plan, address, number)))
    if sample.first_token is None or sample.error:
        raise RuntimeError(f"{endpoint.url}: {sample.error or 'no token'}")
    return (sample.first_token - sample.started) * 1000


def measure(file: Path, requests: int, *, with_litellm: bool) -> list[Row]:
    """Return the medians of each way. The pairs of one turn differ less than the turns do."""
    with ExitStack() as up:
        served = ServedFile("m", file, SLOTS, physical_cores(), CONTEXT)
        direct = up.enter_context(llama_cpp(served))
        ways = {"directly": direct, "bare proxy": up.enter_context(bare_proxy(direct))}
        if with_litellm:
            ways["LiteLLM"] = up.enter_context(litellm_before(direct))
        model = httpx.get(f"{direct.url}/models").json()["data"][0]["id"]
        entry = {"model": model, "flavor": "llama_cpp", "context_length": CONTEXT}
        ways["platform"] = up.enter_context(platform_before(direct, SLOTS, {}, **entry))
        numbers, seen = count(1), {name: list[float]() for name in ways}
        for turn in range(_WARM_UP + requests):
            for name, endpoint in ways.items():
                found = first_token_ms(endpoint, next(numbers))
                if turn >= _WARM_UP:
                    seen[name].append(found)
                time.sleep(_PAUSE_S)
    rows = []
    for name, values in seen.items():
        added = [value - other for value, other in zip(values, seen["directly"], strict=True)]
        rows.append(Row(name, round(median(values), 1), round(median(added), 1)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file")
    parser.add_argument("--requests", type=int, default=40, help="requests of each way")
    parser.add_argument("--no-litellm", action="store_true")
    add_write_option(parser)
    options = parser.parse_args()
    end_on_sigterm()
    file = model_file(parser, options.file)
    rows = measure(file, options.requests, with_litellm=not options.no_litellm)
    for row in rows:
        print(row)
    if options.write:
        figures = {"file": file.stem, "requests": options.requests}
        keep("first_token", {**figures, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
