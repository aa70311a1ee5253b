"""docs/engines-seen.md, and the file of what was seen, from which it is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.served_stack import ROOT

FILE = Path(__file__).parent / "seen.json"
PAGE = ROOT / "docs" / "engines-seen.md"
TITLES = {
    "llama_cpp": "`llama_cpp`, the wheel",
    "llama_cpp-build": "`llama_cpp`, `LLAMA_SERVER`",
    "flavor-llama_cpp": "`command`, flavor `llama_cpp`, the wheel",
    "flavor-llama_cpp-build": "`command`, flavor `llama_cpp`, `llama-server`",
    "vllm": "`command`, flavor `vllm`",
    "transformers": "`command`, flavor `openai`: `transformers serve`",
}
_HEAD = """# What was seen of real servers

`make engines` runs each server that can be had behind the whole product, and asks it what
[the tables of engines](engines.md#flavors) promise, with the official client. This page is written
by `python -m tests.real_servers --write`. ✓: seen. –: nothing promises it for this server; the
product refuses it, or names it in `x-unsupported-params`. ✗: promised, and not so; the reason is
below.

"""

Seen = dict[str, dict[str, Any]]
"""By server: its version, the date, the model, the rows, and what it should have borne out."""


def read() -> Seen:
    """Return what earlier runs have seen."""
    found: Seen = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return found


def keep(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Put these servers' results in place of their earlier ones, and write the page."""
    merged = {**read(), **found}
    seen: Seen = {name: dict(merged[name]) for name in TITLES if name in merged}
    FILE.write_text(json.dumps(seen, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(seen), encoding="utf-8")


def page(seen: Seen) -> str:
    """Return the page."""
    return _HEAD + "\n".join(_servers(seen) + _table(seen) + _differences(seen)) + "\n"


def _servers(seen: Seen) -> list[str]:
    lines = ["| | server | model | date |", "|---|---|---|---|"]
    for at, (name, of) in enumerate(seen.items(), 1):
        cells = (f"{at}: {TITLES[name]}", of["version"], of["model"], of["date"])
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _table(seen: Seen) -> list[str]:
    rows = list(dict.fromkeys(row for of in seen.values() for row in of["rows"]))
    lines = [
        f"| | {' | '.join(map(str, range(1, len(seen) + 1)))} |",
        "|---" * (len(seen) + 1) + "|",
    ]
    for row in rows:
        cells = (_cell(of, row) for of in seen.values())
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return [*lines, ""]


def _cell(of: Mapping[str, Any], row: str) -> str:
    said = str(of["rows"].get(row, ""))[:1]
    return "–" if said == "✗" and row not in of["promised"] else said


def _differences(seen: Seen) -> list[str]:
    lines = ["## Where they differ", ""]
    for at, of in enumerate(seen.values(), 1):
        lines += [f"- {at}, {row}: {said}" for row, said in differences(of)]
    return lines if len(lines) > 2 else [*lines, "Nowhere."]


def differences(of: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows that are not as the tables of docs/engines.md have them, with the reason."""
    found: dict[str, str] = {"it starts": "✓", **of["rows"]}
    promised = ((row, found.get(row, "")) for row in ("it starts", *of["promised"]))
    wrong = [(row, said) for row, said in promised if said[:1] in ("✗", "–")]
    return [(row, said[2:] or "promised, but refused") for row, said in wrong]
