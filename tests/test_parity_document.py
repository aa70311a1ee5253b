"""docs/parity.md: what it says is proved by tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS = [
    line
    for line in (ROOT / "docs" / "parity.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| there |")
]
NAMED = sorted({name for row in ROWS for name in re.findall(r"`([\w/]+\.py::\w+)`", row)})


def _is_there(name: str) -> bool:
    path, function = name.split("::")
    file = ROOT / path
    defined = rf"^(async )?def {function}\("
    return file.exists() and bool(re.search(defined, file.read_text("utf-8"), re.MULTILINE))


def _has_a_test_or_is_not_built(row: str) -> bool:
    _, there, here, test, _ = re.split(r"(?<!\\)\|", row)
    proved = "::test_" in test or ("**not built**" in here and test.strip() == "–")
    return bool(there.strip() and here.strip() and proved)


def test_every_test_that_is_named_is_there() -> None:
    assert NAMED
    assert [name for name in NAMED if not _is_there(name)] == []


def test_every_row_has_a_test_or_says_that_it_is_not_built() -> None:
    assert [row for row in ROWS if not _has_a_test_or_is_not_built(row)] == []
