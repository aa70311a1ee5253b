"""The cost of a JSON schema: constrained against free generation on the same running platform.

``python -m benchmarks.constrained --streams 8``. The two are loaded in turn, several times, because
the machine is never quite the same for long; the ratio of the medians is printed.
"""

import argparse
import asyncio
from dataclasses import replace
from statistics import median

from benchmarks.figures import Figures, add_write_option, keep
from benchmarks.load import LoadPlan, LoadResult, run_load
from benchmarks.processes import end_on_sigterm
from benchmarks.targets import Endpoint, ServedFile, platform
from inference_site.catalogue.catalogue import DEMO_FILE

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 30, "maxItems": 60},
    },
    "required": ["title", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "notes", "schema": SCHEMA}}


def measure(endpoint: Endpoint, streams: int, seconds: float, rounds: int) -> Figures:
    """Load both in turn; print and return the figures."""
    free = LoadPlan(endpoint.url, endpoint.key, endpoint.model, streams, seconds=seconds)
    bound = replace(free, body={"response_format": FORMAT, "ignore_eos": False})
    results: dict[str, list[LoadResult]] = {"free": [], "JSON schema": []}
    for number in range(rounds):
        for name, plan in (("free", free), ("JSON schema", bound)):
            prompts = replace(plan, first_prompt=number * 10_000)
            results[name].append(asyncio.run(run_load(prompts)))
    speeds = {name: median(r.tokens_per_s for r in runs) for name, runs in results.items()}
    for name, runs in results.items():
        errors = sum(run.errors for run in runs)
        print(f"{name:12} {speeds[name]:8,.0f} tokens/s   {errors} errors")
    ratio = speeds["JSON schema"] / speeds["free"]
    print(f"ratio        {ratio:8.2f}   ({streams} streams)")
    return {"streams": streams, **speeds, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    add_write_option(parser)
    options = parser.parse_args()
    end_on_sigterm()
    with platform(ServedFile("demo", DEMO_FILE, slots=options.streams)) as endpoint:
        figures = measure(endpoint, options.streams, options.seconds, options.rounds)
    if options.write:
        keep("constrained", figures)


if __name__ == "__main__":
    main()
