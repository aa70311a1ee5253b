"""The stacks of the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.served_stack import ServedStack, served_stack

_SETTINGS = {
    "ENGINE_STALL_S": "5",
    "READER_TIMEOUT_S": "3",
    "DRAIN_TIMEOUT_S": "15",
    "CLIENT_SLOTS_PERCENT": "0",  # Tests fill all slots with work in the background.
    "ON_CHUNK": "tests.hook_functions.freeze",
}


@pytest.fixture(scope="package")
def stack() -> Iterator[ServedStack]:
    """A stack to be ill-treated."""
    with served_stack(**_SETTINGS) as running:
        yield running


@pytest.fixture(scope="package")
def scripted_stack() -> Iterator[ServedStack]:
    """The same with one model only, for tests that kill worker after worker."""
    # A request that waits for a new worker must not be cut off, on a busy host either.
    drain = {"DRAIN_TIMEOUT_S": "60"}
    with served_stack(**_SETTINGS | drain, START_MODELS="scripted") as running:
        yield running
