"""The time of ``manage.py serve`` until the first token, and the cost of each process then.

``python -m benchmarks.start_up``. Each start has a data folder of its own. The first of them
reads the program from the disk, the others from memory. As soon as a site is ready it is asked ten
times, one request after the other. One more start counts the imported modules.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx
import psutil

from benchmarks.figures import add_write_option, keep
from benchmarks.processes import ROOT, end_on_sigterm
from benchmarks.targets import Endpoint, platform_with
from inference_site.catalogue.catalogue import DEMO_FILE

_TOKEN = re.compile(r'content":"[^"]')
"""Of the answer or of the reasoning before it."""
PROCESSES = ("web", "worker", "beat")


@dataclass(frozen=True, slots=True)
class Cost:
    """Use of a process when the site is ready: CPU in user and system mode, and memory."""

    cpu_s: float
    rss_mib: float


def start() -> tuple[float, list[float], dict[str, Cost]]:
    """Start the platform once.

    Return the seconds until it is ready, those until the first token of each of its first ten
    requests, and each process's cost.
    """
    started = time.perf_counter()
    with platform_with({"demo": {"file": str(DEMO_FILE)}}) as endpoint:
        ready_s = time.perf_counter() - started
        first_tokens = [until_first_token(endpoint) for _ in range(10)]
        serve = psutil.Process(endpoint.process.pid)
        costs = {"serve": cost_of(serve)}
        for child in serve.children():
            names = [name for name in PROCESSES if name in child.cmdline()]
            costs |= {name: cost_of(child) for name in names}
        costs["doctor"] = doctor(endpoint)
    return ready_s, first_tokens, costs


def until_first_token(endpoint: Endpoint) -> float:
    """Ask for a streamed answer over a new connection; return the seconds until its first token."""
    said = {"model": endpoint.model, "messages": [{"role": "user", "content": "Hi"}]}
    asked = said | {"stream": True, "max_tokens": 8}
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    with httpx.Client(base_url=endpoint.url, headers=headers, timeout=60) as http:
        started = time.perf_counter()
        with http.stream("POST", "chat/completions", json=asked) as answer:
            lines = answer.raise_for_status().iter_lines()
            next(line for line in lines if _TOKEN.search(line))
            return time.perf_counter() - started


def cost_of(process: psutil.Process) -> Cost:
    times = process.cpu_times()
    return Cost(times.user + times.system, process.memory_info().rss / 2**20)


def doctor(endpoint: Endpoint) -> Cost:
    """Run ``manage.py doctor`` to its end; return its cost, with its peak memory."""
    process = subprocess.Popen(
        [sys.executable, "manage.py", "doctor"],
        cwd=ROOT,
        env=os.environ | {"DATA_DIR": str(endpoint.data_dir), "SECRET_KEY": "benchmark"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, _, used = os.wait4(process.pid, 0)
    return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def modules() -> dict[str, int]:
    """Start the platform once more; return how many modules each process has imported."""
    settings = {"PYTHONPROFILEIMPORTTIME": "1"}
    with platform_with({"demo": {"file": str(DEMO_FILE)}}, settings) as endpoint:
        assert endpoint.data_dir is not None
        logs = endpoint.data_dir / "log"
        return {name: imports_in(logs / f"{name}.log") for name in PROCESSES}


def imports_in(log: Path) -> int:
    """Count the lines that Python writes for each module."""
    lines = log.read_text(errors="replace").splitlines()
    return sum(line.startswith("import time:") for line in lines) - 1  # The heading.


def least(starts: list[dict[str, Cost]]) -> Mapping[str, Cost]:
    """Return the cheapest start of each process, because other work of the machine adds to it."""
    return {
        name: min((costs[name] for costs in starts), key=lambda cost: cost.cpu_s)
        for name in starts[0]
    }


def shown(cost: Cost, modules: int | None) -> str:
    counted = "" if modules is None else f", {modules} modules"
    return f"{cost.cpu_s:.2f} s CPU, {cost.rss_mib:.0f} MiB{counted}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    add_write_option(parser)
    options = parser.parse_args()
    end_on_sigterm()
    seconds, tokens, starts = zip(*(start() for _ in range(options.times)), strict=True)
    first, again = seconds[0], min(seconds)
    print(f"ready after {first:.1f} s the first time, {again:.1f} s at best")
    by_place = list(zip(*tokens, strict=True))
    begun_ms, tenth_ms = (1000 * median(by_place[place]) for place in (0, 9))
    print(f"first token of the first request {begun_ms:.0f} ms, of the tenth {tenth_ms:.0f} ms")
    imported, costs = modules(), least(list(starts))
    for name, cost in costs.items():
        print(f"{name:8} {shown(cost, imported.get(name))}")
    if options.write:
        processes = {name: shown(cost, imported.get(name)) for name, cost in costs.items()}
        tokens_ms = {"first_token_ms": begun_ms, "tenth_token_ms": tenth_ms}
        keep("start_up", {"first_s": first, "again_s": again, **tokens_ms, "processes": processes})


if __name__ == "__main__":
    main()
