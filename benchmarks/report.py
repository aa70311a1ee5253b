"""Fold measurements into rows, and draw them as a table."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from benchmarks.load import LoadResult

REFERENCE = "llama_cpp"
TITLES = {"llama_cpp": "llama.cpp's server", "litellm": "LiteLLM", "platform": "platform"}
HEADER = (
    "model", "streams", "target", "tokens/s", "ratio",
    "TTFT p50 ms", "TTFT p99 ms", "added p50 ms", "client CPU", "errors",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measurement:
    """One load of one target."""

    case: str
    target: str
    result: LoadResult


@dataclass(frozen=True, slots=True)
class Row:
    """The medians of a target's repeats at one number of streams.

    ``ratio`` is its tokens/s over the reference's in the same case, ``added_ms`` the difference of
    their median times to first token; both are None where the reference did not run.
    ``client_share`` is the load generator's use of one processor core, 0 … 1.
    """

    case: str
    streams: int
    target: str
    tokens_per_s: float
    ratio: float | None
    ttft_ms_p50: float
    ttft_ms_p99: float
    added_ms: float | None
    client_share: float
    errors: int


def rows(measurements: Iterable[Measurement]) -> list[Row]:
    """Return one row per case, number of streams and target, the reference first."""
    order = list(TITLES)

    def key(measurement: Measurement) -> tuple[str, int, int]:
        return measurement.case, measurement.result.streams, order.index(measurement.target)

    lines: list[Row] = []
    for (case, _, target), group in groupby(sorted(measurements, key=key), key):
        lines.append(_row(case, order[target], [one.result for one in group], lines))
    return lines


def _row(case: str, target: str, results: Sequence[LoadResult], above: Sequence[Row]) -> Row:
    streams = results[0].streams
    tokens_per_s = median(one.tokens_per_s for one in results)
    ttft_ms_p50 = median(one.ttft_ms_p50 for one in results)
    # A reference whose requests all failed has no rate to compare with.
    reference = next(
        (
            row
            for row in above
            if (row.case, row.streams, row.target) == (case, streams, REFERENCE)
            and row.tokens_per_s
        ),
        None,
    )
    return Row(
        case=case,
        streams=streams,
        target=target,
        tokens_per_s=tokens_per_s,
        ratio=tokens_per_s / reference.tokens_per_s if reference else None,
        ttft_ms_p50=ttft_ms_p50,
        ttft_ms_p99=median(one.ttft_ms_p99 for one in results),
        added_ms=ttft_ms_p50 - reference.ttft_ms_p50 if reference else None,
        client_share=median(one.client_cpu_s / one.seconds for one in results),
        errors=sum(one.errors for one in results),
    )


def table(lines: Iterable[Row]) -> str:
    """Return a Markdown table with aligned columns, so that it also reads well on a terminal."""
    cells = [HEADER, *(_cells(row) for row in lines)]
    widths = [max(len(column) for column in columns) for columns in zip(*cells, strict=True)]
    ruler = ["-" * width for width in widths]
    padded = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        for line in [cells[0], ruler, *cells[1:]]
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.case,
        str(row.streams),
        TITLES[row.target],
        f"{row.tokens_per_s:,.0f}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        f"{row.ttft_ms_p50:.1f}",
        f"{row.ttft_ms_p99:.1f}",
        "" if row.added_ms is None else f"{row.added_ms:+.1f}",
        f"{row.client_share:.0%}",
        str(row.errors),
    )
