"""A pytest plugin: real PostgreSQL and Redis for the tests, started before the settings are read.

``DATABASE_URL`` and ``REDIS_URL``, when set, are used instead. When pytest-xdist spreads the tests,
each of its processes has services of its own, and the one that only hands out tests has none.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from inference_site import environment
from inference_site.supervisor.services import EmbeddedPostgres, plan_redis, wait_for_redis

_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Start what the tests of this process need."""
    hands_out = bool(early_config.known_args_namespace.numprocesses) and not _IS_WORKER
    if hands_out and environment.text("REDIS_URL"):
        raise pytest.UsageError("Processes cannot share the Redis of REDIS_URL: set JOBS=0.")
    if not hands_out:
        start()


def start() -> None:
    """Start what the environment does not name, and stop it when this process ends."""
    os.environ.setdefault("SECRET_KEY", secrets.token_urlsafe(50))
    os.environ.setdefault("HTTPS", "false")
    data_dir = Path(tempfile.mkdtemp(prefix="inference-test-"))
    data_dir.chmod(0o755)  # PostgreSQL runs as a user of its own when the tests run as root.
    os.environ["DATA_DIR"] = str(data_dir)
    atexit.register(shutil.rmtree, data_dir, ignore_errors=True)
    if not environment.text("DATABASE_URL"):
        postgres = EmbeddedPostgres(data_dir)
        os.environ["DATABASE_URL"] = postgres.start()
        atexit.register(postgres.stop)
    if not environment.text("REDIS_URL"):
        plan = plan_redis(data_dir)
        redis = subprocess.Popen(plan.command, stdout=subprocess.DEVNULL)
        atexit.register(redis.wait)
        atexit.register(redis.terminate)
        wait_for_redis(plan.url)
        os.environ["REDIS_URL"] = plan.url
