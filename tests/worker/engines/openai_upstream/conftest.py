"""A scripted server, and engines that speak to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from inference_site.core.domain.model_spec import ModelSpec
from tests.upstream_server import UpstreamServer
from worker.engines.base import Engine, load_engine

Load = Callable[..., Engine]


@pytest.fixture
def server() -> Iterator[UpstreamServer]:
    """A server that does what it is told."""
    with UpstreamServer().running() as running:
        yield running


@pytest.fixture
def load(server: UpstreamServer) -> Iterator[Load]:
    """Load an engine for the server, with these options."""
    with ExitStack() as loaded:

        def loader(slots: int = 2, context_length: int = 2048, **options: Any) -> Engine:
            spec = ModelSpec(
                "m",
                "openai_upstream",
                slots=slots,
                context_length=context_length,
                options={"base_url": server.url, **options},
            )
            engine = load_engine(spec)
            loaded.callback(engine.close)
            return engine

        yield loader


@pytest.fixture
def engine(load: Load) -> Engine:
    """An engine for the server."""
    return load()
