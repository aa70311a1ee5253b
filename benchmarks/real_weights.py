"""Real weights: the platform with defaults, llama.cpp's server with its best settings, and LiteLLM.

``python -m benchmarks.real_weights [FILE]``; without a file it is that of ``make serve``, SmolLM2.
The platform has no setting but slots and context. The reference has the number of threads that is
best for it: all cores on a quiet machine, one less where another process has a core to itself. All
targets are up at the same time, and take turns; figures are means, over two orders in which they
are started, of the medians of these turns. Ratios and differences are first taken of each turn:
within a turn the speed of a machine drifts less than between them.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from benchmarks.figures import add_write_option, keep
from benchmarks.load import LoadResult
from benchmarks.parts import memory_mib, settle
from benchmarks.processes import ROOT, end_on_sigterm
from benchmarks.report import TITLES
from benchmarks.run import run_load, warm_up
from benchmarks.targets import TARGETS, Endpoint, ServedFile
from inference_site.core.host import physical_cores
from inference_site.ops.serve.real_model import link_file, packaged_file

SMOLLM2 = ROOT / "var" / "models" / "smollm2.gguf"
SLOTS, CONTEXT = 8, 8192
STREAMS = {1: 3, 4: 1, 8: 1}
"""Numbers of streams, and how many answers each of them gets in a turn."""
PROMPT_WORDS = 80
LONG_PROMPTS = ((2000, 1), (2000, 8), (6000, 1))
"""Words of a prompt, and streams."""
LONG_ANSWER = 8
MUST = {"quiet": 0.95, "one core taken": 0.75}
ADDED_MS, BURST = 10, 1.1
"""How much later the first token of one stream may come, and the last of eight, in proportion."""
_TIMEOUT_S = 600


class Load(NamedTuple):
    """Prompts of so many words, the answers of each stream in a turn, turns, and tokens."""

    words: int
    streams: int
    answers: int
    turns: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One load of one target. Times to first token are in milliseconds, memory in MiB (PSS).

    Against the reference: ``share`` of its tokens/s, how much later the first token comes, and the
    ratio of the times of the last first token (``burst``).
    """

    machine: str
    target: str
    prompt: int
    streams: int
    tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    memory_mib: float
    errors: int
    share: float
    added_ms: float
    burst: float


@contextmanager
def taken(cores: int) -> Iterator[None]:
    """Run one busy loop for each of these cores."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(cores)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure(
    machine: str, servers: Mapping[str, ServedFile], options: argparse.Namespace
) -> Iterator[Cell]:
    """Run all loads of all targets, which run at the same time and are loaded in turn.

    The speed of a machine drifts within minutes; what is compared must be measured side by side.
    Of equal servers the one that is started first is faster, by up to a tenth: it gets other parts
    of the memory. So all are started again in the opposite order.
    """
    loads = [Load(PROMPT_WORDS, *pair, options.rounds, 96) for pair in STREAMS.items()]
    if machine == "quiet" and not options.short:
        loads += [Load(words, streams, 1, 1, LONG_ANSWER) for words, streams in LONG_PROMPTS]
    results: dict[Load, list[dict[str, list[LoadResult]]]] = {load: [] for load in loads}
    memory: dict[tuple[Load, str], float] = {}
    for order in (list(servers), list(servers)[::-1]):
        with ExitStack() as up:
            ends = {name: up.enter_context(TARGETS[name](servers[name])) for name in order}
            for endpoint in ends.values():
                warm_up(endpoint)
                settle(endpoint)
            first_prompts = count(100, 100)
            for load in loads:
                results[load].append(in_turns(load, ends, first_prompts))
                memory |= {
                    (load, name): sum(memory_mib(end).values()) for name, end in ends.items()
                }
        loads = [load for load in loads if load.words == PROMPT_WORDS]  # Long ones take minutes.
    for load, orders in results.items():
        for name in servers:
            yield cell(machine, name, load.words, orders, memory[load, name])


def in_turns(
    load: Load, ends: Mapping[str, Endpoint], first_prompts: Iterator[int]
) -> dict[str, list[LoadResult]]:
    """Run a load of each target, one after the other, as often as it has turns."""
    found: dict[str, list[LoadResult]] = {name: [] for name in ends}
    for _ in range(load.turns):
        arguments = ["--streams", str(load.streams), "--words", str(load.words)]
        arguments += ["--rounds", str(load.answers), "--first-prompt", str(next(first_prompts))]
        arguments += ["--max-tokens", str(load.tokens)]
        for name, endpoint in ends.items():
            found[name].append(run_load(endpoint, arguments, _TIMEOUT_S))
    return found


def cell(
    machine: str,
    target: str,
    words: int,
    orders: Sequence[Mapping[str, Sequence[LoadResult]]],
    memory: float,
) -> Cell:
    """Return the means, over the orders of starting, of the medians of one target's loads."""
    pairs = [list(zip(found[target], found["llama_cpp"], strict=True)) for found in orders]

    def middle(figure: Callable[[LoadResult, LoadResult], float]) -> float:
        return fmean(median(figure(one, other) for one, other in found) for found in pairs)

    found = Cell(
        machine,
        target,
        words,
        pairs[0][0][0].streams,
        middle(lambda one, _: one.tokens_per_s),
        middle(lambda one, _: one.ttft_ms_p50),
        middle(lambda one, _: one.ttft_ms_p99),
        round(memory),
        sum(one.errors for turns in pairs for one, _ in turns),
        middle(lambda one, other: one.tokens_per_s / other.tokens_per_s),
        middle(lambda one, other: one.ttft_ms_p50 - other.ttft_ms_p50),
        middle(lambda one, other: one.ttft_ms_p99 / other.ttft_ms_p99),
    )
    print(found, file=sys.stderr, flush=True)
    return found


def faults(rows: list[dict[str, str | int | float]]) -> Iterator[str]:
    """Print the bounds that the platform has missed."""
    for row in rows:
        if row["target"] != TITLES["platform"]:
            continue
        name = f"{row['machine']}, {row['streams']} streams of {row['prompt']} words"
        if row["errors"]:
            yield f"{name}: {row['errors']} errors"
        if row["prompt"] != PROMPT_WORDS:
            continue
        if float(row["share"]) < MUST[str(row["machine"])]:
            yield f"{name}: {row['share']:.0%} of the tokens/s"
        if row["machine"] == "quiet" and row["streams"] == 1 and float(row["added_ms"]) > ADDED_MS:
            yield f"{name}: first token {row['added_ms']:.1f} ms later"
        if row["machine"] == "quiet" and row["streams"] == 8 and float(row["burst"]) > BURST:
            yield f"{name}: the last first token after {row['burst']:.2f} × the time"


def table(rows: list[dict[str, str | int | float]]) -> str:
    lines = [
        "| machine | words | streams | target | tokens/s | share | first token, ms | MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['machine']} | {row['prompt']} | {row['streams']} | {row['target']} "
        f"| {row['tokens_per_s']:,.1f} | {row['share']:.0%} "
        f"| {row['ttft_ms_p50']:,.0f} / {row['ttft_ms_p99']:,.0f} | {row['memory_mib']:,} |"
        for row in rows
    ]
    return "\n".join(lines)


def model_file(parser: argparse.ArgumentParser, given: Path | None) -> Path:
    """Return the file that was given, else SmolLM2, linked from its package as ``serve`` does it.

    End with a message if there is none.
    """
    file = SMOLLM2 if given is None else given
    if given is None and not SMOLLM2.exists() and (packaged := packaged_file()) is not None:
        link_file(packaged, SMOLLM2)
    if not file.is_file():
        how = "`make .venv/.real-model` installs it" if given is None else "it does not exist"
        parser.error(f"no model {file}: {how}. Any other GGUF file may be given instead.")
    return file


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each target and order")
    parser.add_argument("--short", action="store_true", help="no long prompts")
    parser.add_argument("--no-litellm", dest="litellm", action="store_false")
    add_write_option(parser)
    options = parser.parse_args()
    options.file = model_file(parser, options.file)
    served = partial(ServedFile, options.file.stem, options.file, SLOTS, context_length=CONTEXT)
    cells: list[Cell] = []
    for machine, cores in (("quiet", 0), ("one core taken", 1)):
        threads = max(1, physical_cores() - cores)
        with taken(cores):
            servers = {"llama_cpp": served(threads=threads), "platform": served(threads=None)}
            if options.litellm and not cores:
                servers["litellm"] = served(threads=threads)
            cells += measure(machine, servers, options)
    rows = [asdict(one) | {"target": TITLES[one.target]} for one in cells]
    print(table(rows))
    missed = list(faults(rows))
    print("\n".join(missed) or "all bounds are kept")
    if options.write:
        keep(f"real_weights/{options.file.stem}", {"slots": SLOTS, "rows": rows})
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
