"""Fixtures of the worker's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytest_django.fixtures import Settings

from tests.image_server import ImageServer


@pytest.fixture
def server() -> Iterator[ImageServer]:
    """A web server on the loopback."""
    with ImageServer().running() as running:
        yield running


@pytest.fixture
def private_network(settings: Settings) -> None:
    """Let images be fetched from the loopback."""
    settings.MEDIA_ALLOW_PRIVATE = True
