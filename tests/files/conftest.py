"""A folder for the content of files."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _in_a_folder(folder: Path) -> None:
    """Have all tests of files store their content there."""
