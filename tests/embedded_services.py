"""A pytest plugin: real PostgreSQL and Redis for the tests, started before the settings are read.

``DATABASE_URL`` and ``REDIS_URL``, when set, are used instead.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

from inference_site import environment
from inference_site.supervisor.services import EmbeddedPostgres, plan_redis, wait_for_redis

data_dir = Path(tempfile.mkdtemp(prefix="inference-test-"))
data_dir.chmod(0o755)  # PostgreSQL runs as a user of its own when the tests run as root.


def _start() -> None:
    os.environ["DATA_DIR"] = str(data_dir)
    os.environ.setdefault("SECRET_KEY", secrets.token_urlsafe(50))
    os.environ.setdefault("HTTPS", "false")
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


_start()
