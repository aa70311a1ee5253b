"""The overhead of the platform in front of a server that is never the bottleneck.

``python -m benchmarks.gateway --streams 16 64 128``. The server paces each stream at 100 tokens/s,
200 tokens a request. It is asked directly, through the platform and, unless ``--no-litellm``,
through the LiteLLM proxy, in turn, on the same machine: by bursts, all streams beginning at once,
and by requests that arrive at random times, on average half as many at a time. Processor time is
that of each part's processes while the bursts run, requests included; that of a request is measured
by whole answers of one token, each client asking again at once, and that of a token without its
request by answers of 1,000 tokens.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.figures import add_write_option, keep
from benchmarks.load import LoadResult
from benchmarks.paced_upstream import MODEL
from benchmarks.parts import processor_s, settle
from benchmarks.processes import end_on_sigterm, free_port, running, wait_for_ok
from benchmarks.run import run_load
from benchmarks.targets import Endpoint, litellm_before, platform_with

TOKENS, LONG_TOKENS = 200, 1000
STREAM_S = 2.0
"""How long a stream takes at the server's pace."""
SHORTS, MOST_LONG = 1280, 256
"""How many requests of one token a load has, and at most how many long ones, in rounds of all
streams: so that a slow target takes minutes, too."""
ROOM = {"PROJECT_REDIS_BYTES": str(4 * 2**30)}
"""The setting by which the logs of all these streams fit in Redis; they are of one project."""


@dataclass(frozen=True, slots=True)
class Row:
    """One load of one target. ``cpu_us`` has the processor microseconds of each part for each
    token, ``cpu_us_request`` those for each request of one token; ``alone_us`` are those of all
    parts for a token without its request, None where that was not measured."""

    target: str
    streams: int
    tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    spread_ttft_ms_p50: float
    spread_ttft_ms_p99: float
    errors: int
    cpu_us: Mapping[str, float]
    requests_per_s: float
    cpu_us_request: Mapping[str, float]
    alone_us: float | None


def measure(target: str, endpoint: Endpoint, streams: int, rounds: int) -> Row:
    """Load a target with bursts, with arrivals at random times, then with short requests."""
    number, rate = 1_000_000 * streams, str(streams / 2 / STREAM_S)
    long, per_token = loaded(endpoint, streams, rounds, TOKENS, number)
    spread, _ = loaded(
        endpoint, streams, rounds, TOKENS, number + 300_000, ["--arrivals-per-s", rate]
    )
    shorts = max(2, SHORTS // streams)
    short, per_request = loaded(endpoint, streams, shorts, 1, number + 500_000, ["--whole"])
    errors = long.errors + spread.errors + short.errors
    alone_us = None
    if target != "litellm":  # It would take minutes, and its tokens cost as much as requests.
        longest, per_long = loaded(endpoint, streams, 1, LONG_TOKENS, number + 700_000)
        errors += longest.errors
        alone_us = round(sum(per_long.values()) - sum(per_request.values()) / LONG_TOKENS, 1)
    return Row(
        target,
        streams,
        long.tokens_per_s,
        long.ttft_ms_p50,
        long.ttft_ms_p99,
        spread.ttft_ms_p50,
        spread.ttft_ms_p99,
        errors,
        per_token,
        round(short.requests / short.seconds, 1),
        per_request,
        alone_us,
    )


def measured(target: str, endpoint: Endpoint, options: argparse.Namespace) -> Iterator[Row]:
    """Load a target with more and more streams, until it fails."""
    for streams in sorted(options.streams):
        rounds = max(1, min(options.rounds, MOST_LONG // streams))
        try:
            yield measure(target, endpoint, streams, rounds)
        except subprocess.SubprocessError as exc:
            print(f"{target} did not survive {streams} streams: {exc}", file=sys.stderr)
            return


def loaded(
    endpoint: Endpoint,
    streams: int,
    rounds: int,
    tokens: int,
    first_prompt: int,
    more: Sequence[str] = (),
) -> tuple[LoadResult, dict[str, float]]:
    """Run a load; return its figures and the processor microseconds for each token."""
    arguments = ["--streams", str(streams), "--rounds", str(rounds), *more]
    arguments += ["--max-tokens", str(tokens), "--first-prompt", str(first_prompt)]
    before = processor_s(endpoint)
    result = run_load(endpoint, arguments, 300)
    after = processor_s(endpoint)
    made = max(1, result.tokens)
    costs = {part: 1e6 * (spent - before.get(part, 0.0)) / made for part, spent in after.items()}
    print(f"{endpoint.model}: {result}", file=sys.stderr)
    return result, {part: round(cost, 1) for part, cost in sorted(costs.items()) if cost >= 0.05}


@contextmanager
def paced(tokens_per_s: float) -> Iterator[Endpoint]:
    """Run the paced server."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.paced_upstream", "--port", str(port)]
    command += ["--tokens-per-s", str(tokens_per_s)]
    with running("paced", command, {}) as process:
        url = f"http://127.0.0.1:{port}/v1"
        wait_for_ok("paced", f"{url}/models", process, 30)
        yield Endpoint(url, "none", MODEL, process)


def platform_before(
    upstream: Endpoint, slots: int, settings: Mapping[str, str] = ROOM, **fields: object
) -> AbstractContextManager[Endpoint]:
    """Run the platform in front of a server; the entry of the model has these ``fields`` too."""
    entry = {"engine": "openai_upstream", "base_url": upstream.url, "slots": slots}
    return platform_with({MODEL: entry | fields}, settings)


def targets(upstream: Endpoint, options: argparse.Namespace) -> Iterator[tuple[str, Endpoint]]:
    """Start one target after the other."""
    yield "direct", upstream
    with platform_before(upstream, max(options.streams)) as endpoint:
        yield "platform", endpoint
    if options.litellm:
        with ExitStack() as stack:
            try:
                endpoint = stack.enter_context(litellm_before(upstream, options.litellm_program))
            except (OSError, subprocess.SubprocessError) as exc:
                print(f"no LiteLLM here: {exc}", file=sys.stderr)
            else:
                yield "litellm", endpoint


def table(rows: list[Row]) -> str:
    direct = {row.streams: row.tokens_per_s for row in rows if row.target == "direct"}
    lines = [
        "| streams | target | tokens/s | share | TTFT p50 / p99 ms | at random times | "
        "CPU µs a token | without its request | requests/s | CPU µs a request | errors |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row.streams):
        cells = [
            str(row.streams),
            row.target,
            f"{row.tokens_per_s:,.0f}",
            f"{row.tokens_per_s / direct[row.streams]:.0%}",
            f"{row.ttft_ms_p50:,.0f} / {row.ttft_ms_p99:,.0f}",
            f"{row.spread_ttft_ms_p50:,.0f} / {row.spread_ttft_ms_p99:,.0f}",
            shown(row.cpu_us),
            alone(row),
            f"{row.requests_per_s:,.0f}",
            shown(row.cpu_us_request),
            str(row.errors),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def kept(rows: list[Row]) -> list[dict[str, str | float]]:
    """Return the rows of the table."""
    return [
        {
            **asdict(row),
            "alone_us": alone(row),
            "cpu_us": shown(row.cpu_us),
            "cpu_us_request": shown(row.cpu_us_request),
        }
        for row in rows
    ]


def alone(row: Row) -> str:
    return "" if row.alone_us is None else f"{row.alone_us:,.0f}"


def shown(costs: Mapping[str, float]) -> str:
    parts = ", ".join(f"{part} {cost:,.0f}" for part, cost in costs.items() if cost >= 0.5)
    return f"{sum(costs.values()):,.0f} ({parts})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 128, 256])
    parser.add_argument("--rounds", type=int, default=3, help="requests of each stream, at most")
    parser.add_argument("--tokens-per-s", type=float, default=100.0)
    parser.add_argument("--no-litellm", dest="litellm", action="store_false")
    parser.add_argument("--litellm-program", type=Path, help="one that is installed already")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON as well")
    add_write_option(parser)
    options = parser.parse_args()
    end_on_sigterm()
    rows: list[Row] = []
    with paced(options.tokens_per_s) as upstream:
        for target, endpoint in targets(upstream, options):
            run_load(endpoint, ["--streams", "8", "--rounds", "2", "--max-tokens", "8"], 60)
            settle(endpoint)
            rows += measured(target, endpoint, options)
    print(table(rows))
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    if options.write:
        keep("gateway", {"rounds": options.rounds, "rows": kept(rows)})


if __name__ == "__main__":
    main()
