"""Fixtures of the worker's tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from pytest_django.fixtures import Settings

from inference_site.ops.serve.services import RedisPlan, plan_redis, wait_for_redis
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


@pytest.fixture
def own_redis(
    tmp_path: Path, settings: Settings
) -> Iterator[tuple[subprocess.Popen[bytes], redis.Redis]]:
    """An event log server of the test's own, whose clients lose patience soon."""
    plan: RedisPlan = plan_redis(tmp_path)
    server = subprocess.Popen(plan.command, stdout=subprocess.DEVNULL)
    wait_for_redis(plan.url)
    settings.EVENT_LOG_URLS = [plan.url]
    settings.REDIS_TIMEOUT_S = 0.3
    with redis.Redis.from_url(plan.url) as client:
        yield server, client
    server.kill()
    server.wait()
