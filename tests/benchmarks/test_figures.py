"""The figures of benchmarks: one file, from which both pages are written."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
import pytest

from benchmarks import compaction, dialects, figures
from benchmarks.report import Row

HERE = {"Date": "2026-11-22 10:00 UTC", "Processor": "2 cores"}


def row(target: str, ratio: float | None, errors: int = 0) -> dict[str, Any]:
    return asdict(Row("demo", 8, target, 1000, ratio, 10, 20, None, 0.1, errors))


@pytest.mark.parametrize("template", figures.PAGES)
def test_pages_are_what_the_kept_figures_make_of_them(template: str) -> None:
    page = figures.PAGES[template]
    assert page.read_text(encoding="utf-8") == figures.render(template, figures.read()), (
        "written by hand? Run python -m benchmarks.figures"
    )


def test_a_run_replaces_only_its_own_part() -> None:
    before = figures.with_run({}, "parser", {"us": 1.5}, HERE)
    after = figures.with_run(before, "disconnect", {"ms": 31}, {"Date": "later"})
    assert after["parser"] == before["parser"]
    assert after["disconnect"] == [{"machine": {"Date": "later"}, "figures": {"ms": 31}}]
    assert list(after) == ["disconnect", "parser"]


def test_the_newest_runs_of_a_part_are_kept() -> None:
    parts: figures.Parts = {}
    for number in range(figures.KEPT_RUNS + 2):
        parts = figures.with_run(parts, "parser", {"us": number}, HERE)
    kept = [run["figures"]["us"] for run in parts["parser"]]
    assert kept == list(range(figures.KEPT_RUNS + 1, 1, -1))


def test_a_new_figure_is_on_both_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "figures.json"
    kept.write_text(json.dumps(figures.read()))
    pages = {template: tmp_path / template for template in figures.PAGES}
    monkeypatch.setattr(figures, "FILE", kept)
    monkeypatch.setattr(figures, "PAGES", pages)
    figures.keep("upstream", {"streams": 4, "engine": 0.73}, HERE)
    for page in pages.values():
        assert "0.73" in page.read_text()
    assert "2026-11-22 10:00 UTC; 2 cores" in pages["RESULTS.md.j2"].read_text()


def test_a_ratio_has_the_range_of_the_kept_runs() -> None:
    parts: figures.Parts = {}
    for ratio in (0.75, 1.06, 0.87):
        rows = [row("llama_cpp", None), row("platform", ratio)]
        parts = figures.with_run(parts, "comparison/demo, 8 streams", {"rows": rows}, HERE)
    assert figures.compared(parts, "demo", 8, "platform").ratio == "87 % (75 % to 106 %)"


def test_a_part_that_was_never_measured_is_an_error() -> None:
    parts = {name: runs for name, runs in figures.read().items() if name != "parser"}
    with pytest.raises(jinja2.UndefinedError, match="parser"):
        figures.render("performance.md.j2", parts)


OPTIONAL: dict[str, dict[str, Any]] = {
    "agent_tokens/smollm2": {"mcp_tools": 40, "no tools": 5001, "Codex": 9267, "with MCP": 14467},
    "compaction": {
        "threshold": 2000,
        **compaction.figures_of(
            [compaction.Turn(3000, 60, 2, True), compaction.Turn(1000, 20, 0.5, False)]
        ),
    },
    "dialects": {
        "streams": 64,
        "rounds": 5,
        "rows": dialects.rows(
            {"chat completions": [100, 200, 300], "responses": [202], "messages": [196]}
        ),
    },
}
SAID = (
    ("SmolLM2 without tools", "9,267 with its own"),
    ("1 summaries", "50.0 % of all tokens read", "a summary 1,500 ms more"),
    ("64 streams", "responses have 101 % and messages have 98 % of the"),
)


@pytest.mark.parametrize(("part", "said"), [*zip(OPTIONAL, SAID, strict=True)], ids=list(OPTIONAL))
def test_a_part_is_in_the_text_once_it_was_measured(part: str, said: tuple[str, ...]) -> None:
    before = {name: runs for name, runs in figures.read().items() if name not in OPTIONAL}
    after = figures.with_run(before, part, OPTIONAL[part], HERE)
    pages = [figures.render("performance.md.j2", parts) for parts in (before, after)]
    without, measured = (" ".join(page.split()) for page in pages)
    assert [text in measured for text in said] == [True] * len(said)
    assert said[-1] not in without
    assert figures.render("RESULTS.md.j2", after) != figures.render("RESULTS.md.j2", before)
