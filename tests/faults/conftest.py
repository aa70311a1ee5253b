"""The stack of the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.served_stack import ServedStack, served_stack


@pytest.fixture(scope="package")
def stack() -> Iterator[ServedStack]:
    """A stack to be ill-treated."""
    soon = {"ENGINE_STALL_S": "5", "READER_TIMEOUT_S": "3"}
    soon["DRAIN_TIMEOUT_S"] = "15"
    with served_stack(**soon, ON_CHUNK="tests.hook_functions.freeze") as running:
        yield running
