"""A hub on this machine, and a folder of models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_django.fixtures import Settings

from inference_site.catalogue.catalogue import DEMO_FILE, catalogue
from tests.hub_server import Hub


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub({"tiny.Q8_0.gguf": DEMO_FILE.read_bytes()}).running() as served:
        yield served


@pytest.fixture
def models_dir(
    hub: Hub, tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The directory of models of this process, which asks the stand-in."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    settings.MODELS_DIR = tmp_path / "models"
    catalogue.cache_clear()
    yield tmp_path / "models"
    catalogue.cache_clear()
