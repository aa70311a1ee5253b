"""The stack of those who mean harm: what they hold or break costs the tests of ``e2e`` nothing."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.served_stack import ServedStack, served_stack


@pytest.fixture(scope="package")
def stack() -> Iterator[ServedStack]:
    """The whole product, running."""
    with served_stack(KEEP_ALIVE_INTERVAL="400") as running:
        yield running


@pytest.fixture(autouse=True)
def _checked(stack: ServedStack) -> Iterator[None]:
    """Fail a test in which the server sent what does not fit its schema."""
    with stack.checked():
        yield


@pytest.fixture(scope="package")
def client(stack: ServedStack) -> openai.OpenAI:
    """The official client."""
    return stack.client()


@pytest.fixture(scope="package")
def http(stack: ServedStack) -> Iterator[httpx.Client]:
    """A plain HTTP client with a valid key."""
    with stack.http() as plain:
        yield plain
