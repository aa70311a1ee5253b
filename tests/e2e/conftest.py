"""One stack for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.served_stack import MORE_MODELS, ROOT, ServedStack, served_stack
from tests.tiny_weights import write_adapter


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStack]:
    """The whole product, running."""
    adapters = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two")):
        write_adapter(adapters / f"{name}.gguf", seed)
    models = MORE_MODELS.format(root=ROOT, adapters=adapters)
    env = {"KEEP_ALIVE_INTERVAL": "400", "CONVERSATION_LOCK_WAIT_S": "1", "IDEMPOTENCY_KEYS": "40"}
    with served_stack(models, **env) as running:
        yield running


@pytest.fixture(autouse=True)
def _checked(stack: ServedStack) -> Iterator[None]:
    """Fail a test in which the server sent what does not fit its schema."""
    yield
    found = stack.check.violations
    violations, found[:] = list(found), []
    assert violations == []


@pytest.fixture(scope="session")
def client(stack: ServedStack) -> openai.OpenAI:
    """The official client."""
    return stack.client()


@pytest.fixture(scope="session")
def http(stack: ServedStack) -> Iterator[httpx.Client]:
    """A plain HTTP client with a valid key."""
    with stack.http() as plain:
        yield plain
