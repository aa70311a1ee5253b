"""The figures of every benchmark, in one committed file, and the pages rendered from it.

``python -m benchmarks.figures`` rewrites ``benchmarks/RESULTS.md`` and ``docs/performance.md``
from ``figures.json``; a benchmark with ``--write`` first replaces its own part of that file.
A part is the newest runs of one benchmark, the last first, each with its machine and date.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.machine import describe_machine
from benchmarks.processes import ROOT
from benchmarks.report import Row, table

FILE = Path(__file__).parent / "figures.json"
TEMPLATES = Path(__file__).parent / "templates"
PAGES = {
    "RESULTS.md.j2": ROOT / "benchmarks" / "RESULTS.md",
    "performance.md.j2": ROOT / "docs" / "performance.md",
}
KEPT_RUNS = 5

# Figures are JSON: text, numbers, lists and objects, whatever the benchmark measures.
Figures = Mapping[str, Any]
Parts = dict[str, list[dict[str, Any]]]


def add_write_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--write", action="store_true", help="keep the figures and rewrite the pages"
    )


def keep(part: str, figures: Figures, machine: Mapping[str, str] | None = None) -> None:
    """Insert a run as the newest of its part, and write the pages. ``machine`` is this machine."""
    parts = with_run(read(), part, figures, machine or describe_machine())
    FILE.write_text(json.dumps(parts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write_pages(parts)


def with_run(parts: Parts, part: str, figures: Figures, machine: Mapping[str, str]) -> Parts:
    """Return the parts with this run added."""
    runs = [{"machine": dict(machine), "figures": dict(figures)}, *parts.get(part, [])]
    return dict(sorted({**parts, part: runs[:KEPT_RUNS]}.items()))


def read() -> Parts:
    parts: Parts = json.loads(FILE.read_text(encoding="utf-8"))
    return parts


def write_pages(parts: Parts) -> None:
    for template, page in PAGES.items():
        page.write_text(render(template, parts), encoding="utf-8")


def render(template: str, parts: Parts) -> str:
    """Return a page. Raise jinja2.UndefinedError for a figure that was never measured."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  # The pages are Markdown of this repository's own figures.
    )
    environment.filters["n"] = lambda value, digits=0: f"{value:,.{digits}f}"
    environment.filters["percent"] = lambda value, digits=0: f"{value * 100:.{digits}f} %"
    last = {name: runs[0]["figures"] for name, runs in parts.items()}
    return environment.get_template(template).render(
        parts=parts,
        last=last,
        table=lambda: table(comparison_rows(parts)),
        compared=lambda case, streams, target="platform": compared(parts, case, streams, target),
        measured=lambda part: parts[part][0]["machine"],
        named=lambda part: {row["name"]: row for row in last[part]["rows"]},
    )


def comparison_rows(parts: Parts) -> list[Row]:
    """Return the rows of the comparison from the latest runs."""
    last = [runs[0] for name, runs in parts.items() if name.startswith("comparison/")]
    rows = [Row(**row) for run in last for row in run["figures"]["rows"]]
    return sorted(rows, key=lambda row: (row.case, row.streams))


class Compared:
    """A figure of one target at one number of streams: the last, and the range of the kept runs."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self.last = rows[0]

    def show(self, attribute: str, form: Callable[[Any], str]) -> str:
        """Return the last figure, then the lowest and the highest if they differ."""
        values = [getattr(row, attribute) for row in self._rows]
        low, high = form(min(values)), form(max(values))
        return form(values[0]) + (f" ({low} to {high})" if low != high else "")

    @property
    def ratio(self) -> str:
        return self.show("ratio", lambda value: f"{value:.0%}".replace("%", " %"))

    @property
    def added_ms(self) -> str:
        return self.show("added_ms", lambda value: f"{value:.1f} ms")


def compared(parts: Parts, case: str, streams: int, target: str) -> Compared:
    """Return the figures of a target in a case, of all kept runs."""
    runs = parts[f"comparison/{case}, {streams} streams"]
    rows = [Row(**row) for run in runs for row in run["figures"]["rows"]]
    return Compared([row for row in rows if row.target == target])


if __name__ == "__main__":
    write_pages(read())
