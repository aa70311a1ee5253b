"""How long ``manage.py serve`` takes until a token can be served, and what each process costs then.

``python -m benchmarks.start_up``. Each start has a data folder of its own. The first of them
reads the program from the disk, the others from memory. One more start counts the imported modules.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.figures import add_write_option, keep
from benchmarks.processes import ROOT, end_on_sigterm
from benchmarks.targets import Endpoint, platform_with
from inference_site.catalogue.catalogue import DEMO_FILE

PROCESSES = ("web", "worker", "beat")


@dataclass(frozen=True, slots=True)
class Cost:
    """What a process has used when the site is ready: CPU in user and system mode, and memory."""

    cpu_s: float
    rss_mib: float


def start() -> tuple[float, dict[str, Cost]]:
    """Start the platform once; return the seconds until it is ready, and each process's cost."""
    started = time.perf_counter()
    with platform_with({"demo": {"file": str(DEMO_FILE)}}) as endpoint:
        ready_s = time.perf_counter() - started
        serve = psutil.Process(endpoint.process.pid)
        costs = {"serve": cost_of(serve)}
        for child in serve.children():
            names = [name for name in PROCESSES if name in child.cmdline()]
            costs |= {name: cost_of(child) for name in names}
        costs["doctor"] = doctor(endpoint)
    return ready_s, costs


def cost_of(process: psutil.Process) -> Cost:
    times = process.cpu_times()
    return Cost(times.user + times.system, process.memory_info().rss / 2**20)


def doctor(endpoint: Endpoint) -> Cost:
    """Run ``manage.py doctor`` to its end; its memory is the most that it had."""
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
    """Return the cheapest start of each process: the machine may do other work."""
    return {
        name: min((costs[name] for costs in starts), key=lambda cost: cost.cpu_s)
        for name in starts[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    add_write_option(parser)
    options = parser.parse_args()
    end_on_sigterm()
    seconds, starts = zip(*(start() for _ in range(options.times)), strict=True)
    first, again = seconds[0], min(seconds)
    print(f"ready after {first:.1f} s the first time, {again:.1f} s at best")
    imported, costs = modules(), least(list(starts))
    for name, cost in costs.items():
        counted = f", {imported[name]} modules" if name in imported else ""
        print(f"{name:8} {cost.cpu_s:5.2f} s CPU, {cost.rss_mib:4.0f} MiB{counted}")
    if options.write:
        processes = {
            name: {**asdict(cost), "modules": imported.get(name)} for name, cost in costs.items()
        }
        keep("start_up", {"first_s": first, "again_s": again, "processes": processes})


if __name__ == "__main__":
    main()
