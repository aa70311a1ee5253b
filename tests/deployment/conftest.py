"""One site for all tests of this folder, run as docker-compose.yml says."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deployment.collector import Collector
from tests.deployment.local_site import Container, LocalSite
from tests.served_stack import MODELS, ROOT


@dataclass
class Site:
    """The site, a key, and its processes by service. Tests that stop one start another."""

    local: LocalSite
    collector: Collector
    key: str
    webs: list[Container]
    workers: list[Container]
    beat: Container


@pytest.fixture(scope="package")
def site() -> Iterator[Site]:
    """Migrate, then beat, two workers and two web processes."""
    collector = Collector()
    directory = Path(tempfile.mkdtemp(prefix="compose-"))
    directory.chmod(0o755)  # PostgreSQL runs as a user of its own when the tests run as root.
    for name in ("data", "models"):
        (directory / name).mkdir()
    (directory / "models" / "models.yaml").write_text(MODELS.format(root=ROOT))
    local = LocalSite(
        directory,
        MODELS_FILE=str(directory / "models" / "models.yaml"),
        DEMO_MODEL="false",
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_BSP_SCHEDULE_DELAY="200",
    )
    try:
        local.start_services()
        migrated = local.run("migrate")
        assert migrated.returncode == 0, migrated.stderr
        key = local.run("migrate", "create_api_key", "--project", "first", "--name", "test")
        (beat,), workers, webs = (
            local.start("beat"),
            local.start("worker", 2),
            local.start("web", 2),
        )
        local.wait_for([beat, *workers, *webs])
        yield Site(local, collector, key.stdout.strip(), webs, workers, beat)
    finally:
        local.close()
        collector.close()
