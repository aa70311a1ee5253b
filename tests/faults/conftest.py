"""One stack for the tests of this folder that need no settings of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.served_stack import ServedStack, served_stack


@pytest.fixture(scope="package")
def stack() -> Iterator[ServedStack]:
    """A stack to be ill-treated."""
    with served_stack() as running:
        yield running
