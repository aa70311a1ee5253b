"""The stack for what is asked of every operation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.served_stack import ServedStack


@pytest.fixture(scope="session")
def stack(plain_stack: ServedStack) -> ServedStack:
    """The whole product, running."""
    return plain_stack


@pytest.fixture(autouse=True)
def _checked(stack: ServedStack) -> Iterator[None]:
    """Fail a test in which the server sent what does not fit its schema."""
    with stack.checked():
        yield
