"""docs/parity.md: what it says is proved by tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROWS = [
    line
    for line in (TESTS.parent / "docs" / "parity.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| there |")
]
NAMED = sorted({name for row in ROWS for name in re.findall(r"`([\w/]+\.py::\w+)`", row)})


@pytest.mark.parametrize("name", NAMED)
def test_every_test_that_is_named_is_there(name: str) -> None:
    path, function = name.split("::")
    source = (TESTS.parent / path).read_text(encoding="utf-8")
    assert re.search(rf"^(async )?def {function}\(", source, re.MULTILINE)


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_every_row_has_a_test_or_says_that_it_is_not_built(row: str) -> None:
    _, there, here, test, _ = re.split(r"(?<!\\)\|", row)
    assert there.strip()
    assert here.strip()
    assert "::test_" in test or ("**not built**" in here and test.strip() == "–")
