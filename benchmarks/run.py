"""Compare the platform with llama.cpp's own server and with LiteLLM, side by side.

Run from the repository's root: ``python -m benchmarks.run``. The targets run in turn, never at
once, on the same model file with the same settings, and get the same prompts.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.figures import add_write_option, keep
from benchmarks.load import LoadResult
from benchmarks.parts import settle
from benchmarks.processes import CACHE, ROOT, end_on_sigterm
from benchmarks.report import Measurement, Row, rows, table
from benchmarks.targets import TARGETS, Endpoint, ServedFile, install_litellm
from benchmarks.weights import random_weights

DEMO = ROOT / "worker" / "demo" / "demo-q8_0.gguf"
MODELS = ("demo", "130m")
# For the rounds of a load, or for the requests that run at the end of its seconds.
LOAD_TIMEOUT_S = 300
PROMPTS_PER_LOAD = 10_000


@dataclass(frozen=True, slots=True)
class Case:
    """One model file on some targets, at some numbers of streams.

    A load takes ``seconds``; where ``rounds`` is given, each stream sends so many requests instead.
    """

    name: str
    path: Path
    targets: tuple[str, ...]
    streams: tuple[int, ...]
    seconds: float = 0.0
    rounds: int | None = None
    max_tokens: int = 128


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases of the command line; LiteLLM is installed before its first case."""
    pair = tuple(name for name in ("llama_cpp", "platform") if name in options.only)
    if "demo" in options.models:
        streams = options.streams or ((1, 8) if options.quick else (1, 8, 32, 64))
        yield Case("demo", DEMO, pair, streams, options.seconds)
    if "130m" in options.models:
        path = random_weights(CACHE / "random-130m-q8_0.gguf", DEMO)
        # A round takes about 10 s: in a window of time, the last one's cut would weigh too much.
        rounds = 1 if options.quick else 3
        yield Case("130m", path, pair, (16,), rounds=rounds, max_tokens=64)
    if options.litellm and "litellm" in options.only and "demo" in options.models:
        install_litellm()
        three = tuple(name for name in TARGETS if name in options.only)
        yield Case("demo, gateway", DEMO, three, (32,), options.seconds)


def measure(case: Case, repeats: int, threads: int) -> Iterator[Measurement]:
    """Run a case: every repeat starts each target afresh, in an order that alternates."""
    served = ServedFile("demo", case.path, slots=max(case.streams), threads=threads)
    for repeat in range(repeats):
        for target in case.targets if repeat % 2 == 0 else reversed(case.targets):
            with TARGETS[target](served) as endpoint:
                warm_up(endpoint)
                settle(endpoint)
                for number, streams in enumerate(case.streams):
                    first_prompt = (1 + repeat * len(case.streams) + number) * PROMPTS_PER_LOAD
                    result = load(endpoint, case, streams, first_prompt)
                    print(f"{case.name}, {target}: {result}", file=sys.stderr)
                    yield Measurement(case.name, target, result)


def warm_up(endpoint: Endpoint) -> None:
    """Send a first request, for which the target imports, connects and allocates."""
    run_load(endpoint, ["--streams", "4", "--rounds", "2", "--max-tokens", "16"], 60)


def load(endpoint: Endpoint, case: Case, streams: int, first_prompt: int) -> LoadResult:
    """Load a target once, from a process of its own."""
    arguments = ["--streams", str(streams), "--max-tokens", str(case.max_tokens)]
    arguments += ["--first-prompt", str(first_prompt)]
    if case.rounds:
        arguments += ["--rounds", str(case.rounds)]
    else:
        arguments += ["--seconds", str(case.seconds)]
    return run_load(endpoint, arguments, case.seconds + LOAD_TIMEOUT_S)


def run_load(endpoint: Endpoint, arguments: Sequence[str], timeout_s: float) -> LoadResult:
    """Run the load generator. Raise CalledProcessError or TimeoutExpired if it fails."""
    command = [sys.executable, "-m", "benchmarks.load", "--url", endpoint.url]
    command += ["--key", endpoint.key, "--model", endpoint.model, *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=timeout_s, check=True)
    return LoadResult(**json.loads(done.stdout))


def write(case: Case, lines: Sequence[Row], options: argparse.Namespace) -> None:
    """Keep the figures of a case, a part for each number of streams."""
    for streams in case.streams:
        figures = {
            "threads": options.threads,
            "repeats": options.repeats,
            "seconds": case.seconds,
            "rounds": case.rounds,
            "max_tokens": case.max_tokens,
            "rows": [asdict(line) for line in lines if line.streams == streams],
        }
        keep(f"comparison/{case.name}, {streams} streams", figures)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def names_of(*known: str) -> Callable[[str], tuple[str, ...]]:
    """Return a reader of comma-separated names that refuses the unknown ones."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
        return names

    return read


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the platform with its alternatives.")
    parser.add_argument("--models", type=names_of(*MODELS), default=MODELS, help="demo,130m")
    targets = tuple(TARGETS)
    parser.add_argument("--only", type=names_of(*targets), default=targets, help=",".join(targets))
    parser.add_argument("--streams", type=numbers, help="of the demo model (default: 1,8,32,64)")
    parser.add_argument("--seconds", type=float, help="of one load (default: 10; quick: 3)")
    parser.add_argument("--repeats", type=int, help="of each target (default: 2; quick: 1)")
    parser.add_argument("--threads", type=int, default=1, help="inference threads (default: 1)")
    parser.add_argument("--quick", action="store_true", help="a short look, without LiteLLM")
    parser.add_argument("--no-litellm", dest="litellm", action="store_false")
    add_write_option(parser)
    options = parser.parse_args()
    options.seconds = options.seconds or (3.0 if options.quick else 10.0)
    options.repeats = options.repeats or (1 if options.quick else 2)
    options.litellm = options.litellm and not options.quick
    return options


def main() -> None:
    end_on_sigterm()
    options = parse_options()
    lines: list[Row] = []
    for case in (case for case in cases(options) if case.targets):
        of_case = rows(measure(case, options.repeats, options.threads))
        lines += of_case
        if options.write:
            write(case, of_case, options)
    print(table(lines))
    # LiteLLM's failures are in the table; they say nothing about the platform.
    sys.exit(1 if any(line.errors for line in lines if line.target != "litellm") else 0)


if __name__ == "__main__":
    main()
