"""The memory of a model with all slots full, against the estimate before its load.

``python -m benchmarks.memory FILE …``. Each case loads the engine in a process of its own, fills
all slots with prompts as long as the context, several times, so that the prompt cache is in use,
and reads the process's share of memory (PSS).
"""

import argparse
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import django

from benchmarks.figures import add_write_option, keep

MUST = 0.15
"""Largest relative difference between estimate and measurement."""
CASES = ((4, 2048), (4, 8192), (1, 8192), (8, 512))
"""Slots and tokens of each."""
_MIB = 2**20
_MOST_ROUNDS = 12


class _Silent:
    """A sink that drops all deltas."""

    cancelled = False

    def feed(self, delta: object) -> None:
        pass


def measure_here(file: Path, slots: int, context_length: int) -> None:
    """Load a model in this process and fill it; print the estimated and the measured memory."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inference_site.settings")
    django.setup()
    import psutil

    from inference_site.catalogue.memory import ModelMemory
    from inference_site.core.domain.model_spec import ModelSpec
    from inference_site.core.domain.request import GenerationRequest
    from worker.engines.base import load_engine

    spec = ModelSpec(file.stem, "llama_cpp", file, slots=slots, context_length=context_length)
    engine = load_engine(spec)
    process = psutil.Process()
    loaded = process.memory_full_info().pss

    def fill(seed: int) -> None:
        chosen = random.Random(seed)
        prompt = tuple(chosen.choices(range(10, 1000), k=context_length - 8))
        request = GenerationRequest(
            spec.id, operation="complete", prompts=(prompt,), max_output_tokens=1
        )
        engine.run(request, _Silent())

    needs = ModelMemory(spec, file).needs
    rounds = min(_MOST_ROUNDS, 2 + needs.prompts // needs.cache)
    with ThreadPoolExecutor(slots) as pool:
        for number in range(rounds):
            list(pool.map(fill, range(number * slots, (number + 1) * slots)))
    full = process.memory_full_info().pss
    print(json.dumps({"said": needs.total, "parts": str(needs), "loaded": loaded, "full": full}))
    sys.stdout.flush()
    os._exit(0)  # llama.cpp's threads need not be waited for.


def measure(file: Path, slots: int, context_length: int) -> dict[str, float | str | int]:
    """Return a row of the table, and print it."""
    command = [sys.executable, "-m", "benchmarks.memory", "--one", str(slots), str(context_length)]
    done = subprocess.run(
        [*command, str(file)], stdout=subprocess.PIPE, text=True, check=True, timeout=1800
    )
    found = json.loads(done.stdout.splitlines()[-1])
    row = {
        "name": f"{file.stem}, {slots} × {context_length:,}",
        "said_mib": found["said"] / _MIB,
        "full_mib": found["full"] / _MIB,
        "off": found["said"] / found["full"] - 1,
    }
    print(
        f"{row['name']:28} said {row['said_mib']:7,.0f} MiB   taken {row['full_mib']:7,.0f} MiB   "
        f"{row['off']:+.0%}   ({found['parts']}; {found['loaded'] / _MIB:,.0f} MiB at the start)",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="GGUF files")
    parser.add_argument("--one", nargs=2, type=int, help=argparse.SUPPRESS)
    add_write_option(parser)
    options = parser.parse_args()
    if options.one:
        measure_here(options.files[0], *options.one)
    rows = [measure(file, *case) for file in options.files for case in CASES]
    worst = max(abs(float(row["off"])) for row in rows)
    print(f"the estimate is at most {worst:.0%} off; it must be within {MUST:.0%}")
    if options.write:
        keep("memory", {"rows": rows})
    sys.exit(0 if worst <= MUST else 1)


if __name__ == "__main__":
    main()
