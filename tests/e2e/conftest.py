"""One stack for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.served_stack import ServedStack, served_stack


@pytest.fixture(scope="session")
def stack() -> Iterator[ServedStack]:
    """The whole product, running."""
    with served_stack(KEEP_ALIVE_INTERVAL="400") as running:
        yield running


@pytest.fixture
def client(stack: ServedStack) -> openai.OpenAI:
    """The official client."""
    return stack.client()


@pytest.fixture
def http(stack: ServedStack) -> Iterator[httpx.Client]:
    """A plain HTTP client with a valid key."""
    with stack.http() as plain:
        yield plain
