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
    soon["CLIENT_SLOTS_PERCENT"] = "0"  # Tests fill all slots with work in the background.
    with served_stack(**soon, ON_CHUNK="tests.hook_functions.freeze") as running:
        yield running
