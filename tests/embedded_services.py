"""A pytest plugin: real PostgreSQL and Redis for the tests, started before the settings are read.

``DATABASE_URL`` and ``REDIS_URL``, when set, are used instead. When pytest-xdist spreads the tests,
each of its processes has services of its own, and the one that only hands out tests has none.

With ``--without-services`` nothing is started and only quick tests that need no service run: left
out are the folders that run the whole product, tests that ask for the database or a site, tests
that are marked ``redis`` or ``slow``, and tests whose module imports the clients of Redis. Any
other test that needs a service fails, because there is none at the addresses that the settings get.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path

import hypothesis
import pytest
from django.conf import settings

from inference_site.core import environment
from inference_site.core.process_lifecycle import collect_rarely, freeze_imported_objects
from inference_site.ops.serve.services import EmbeddedPostgres, plan_redis, wait_for_redis
from tests import migrated_postgres

collect_rarely()
hypothesis.settings.register_profile("fuzz", max_examples=10_000, deadline=None)
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
_IS_MIGRATED = pytest.StashKey[bool]()
_WHOLE_PRODUCT = {
    *("e2e", "hostile", "contract", "faults", "deployment", "browser", "first_hour", "real"),
}
_SERVICES = {"db", "transactional_db", "stack", "site"}
"""Fixtures that are services: the database, or a site that runs."""
_NOWHERE = {"DATABASE_URL": "postgresql://127.0.0.1:9/none", "REDIS_URL": "redis://127.0.0.1:9"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer the run without services."""
    parser.addoption(
        "--without-services",
        action="store_true",
        help="start no PostgreSQL and no Redis; run only quick tests that need neither",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Start what the tests of this process need."""
    options = early_config.known_args_namespace
    hands_out = bool(options.numprocesses) and not _IS_WORKER
    hypothesis.settings.register_profile(
        "few",
        max_examples=20,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("few")
    if options.without_services:
        prepare_settings()
        os.environ.update(_NOWHERE)
    elif hands_out and environment.text("REDIS_URL"):
        raise pytest.UsageError("Processes cannot share the Redis of REDIS_URL: set JOBS=0.")
    elif hands_out:
        migrated_postgres.share()
    else:
        early_config.stash[_IS_MIGRATED] = start()


def pytest_configure(config: pytest.Config) -> None:
    """Have the database of the tests made from the migrated one, where there is one."""
    if config.stash.get(_IS_MIGRATED, False):
        default = settings.DATABASES["default"]
        default.setdefault("TEST", {})["TEMPLATE"] = migrated_postgres.DATABASE


def pytest_collection_finish() -> None:
    """Exempt what was imported from garbage collection: it stays until the end."""
    freeze_imported_objects()
    collect_rarely()  # Collections took a hundredth of the time of all tests.


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the tests of the whole product when there are no services."""
    left_out = config.getoption("--without-services") and collection_path.name in _WHOLE_PRODUCT
    return True if left_out else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a service when there is none."""
    if config.getoption("--without-services"):
        left_out = [item for item in items if _is_left_out(item)]
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)


def _is_left_out(item: pytest.Item) -> bool:
    asked = getattr(item, "fixturenames", ())
    marked = any(item.get_closest_marker(name) for name in ("django_db", "redis", "slow"))
    return marked or not _SERVICES.isdisjoint(asked) or _imports_redis(item)


def _imports_redis(item: pytest.Item) -> bool:
    module = getattr(item, "module", None)
    clients = "inference_site.core.storage.redis"
    return any(
        getattr(value, "__module__", getattr(value, "__name__", "")) == clients
        for value in vars(module).values()
    )


def prepare_settings() -> Path:
    """Set what the settings demand; return the data directory, which goes with this process."""
    os.environ.setdefault("SECRET_KEY", secrets.token_urlsafe(50))
    os.environ.setdefault("HTTPS", "false")
    os.environ.pop("STATIC_ROOT", None)
    data_dir = Path(tempfile.mkdtemp(prefix="inference-test-"))
    data_dir.chmod(0o755)  # PostgreSQL runs as a user of its own when the tests run as root.
    os.environ["DATA_DIR"] = str(data_dir)
    atexit.register(shutil.rmtree, data_dir, ignore_errors=True)
    trust_no_authority(data_dir)
    return data_dir


def trust_no_authority(data_dir: Path) -> None:
    """Name an empty directory of certificates.

    Every new client of httpx reads the authorities that it trusts: 80 ms for those of the world, of
    which no test needs one.
    """
    authorities = data_dir / "authorities"
    authorities.mkdir()
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = str(authorities)


def start() -> bool:
    """Start what the environment does not name, and stop it when this process ends.

    Return whether PostgreSQL has a database that is migrated.
    """
    data_dir, is_migrated = prepare_settings(), False
    if not environment.text("DATABASE_URL"):
        is_migrated = migrated_postgres.copy_to(data_dir)
        postgres = EmbeddedPostgres(data_dir)
        os.environ["DATABASE_URL"] = url = postgres.start()
        # It waits for no disk: what the tests store need not outlive them.
        migrated_postgres.set_all(
            url, fsync="off", full_page_writes="off", synchronous_commit="off"
        )
        atexit.register(postgres.stop)
    if not environment.text("REDIS_URL"):
        plan = plan_redis(data_dir)
        redis = subprocess.Popen(plan.command, stdout=subprocess.DEVNULL)
        atexit.register(redis.wait)
        atexit.register(redis.terminate)
        wait_for_redis(plan.url)
        os.environ["REDIS_URL"] = plan.url
    return is_migrated
