"""Django's own checks with the settings of a deployment; `make lint` has what passes them."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from pytest_django.fixtures import Settings

from inference_site.catalogue.catalogue import catalogue
from tests.served_stack import ROOT

PRODUCTION = {
    "HTTPS": "true",
    "DEBUG": "false",
    "ALLOWED_HOSTS": "inference.example",
    "CSRF_TRUSTED_ORIGINS": "https://inference.example",
}


def check(**env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"],
        cwd=ROOT,
        env={**os.environ, **PRODUCTION, "SECRET_KEY": secrets.token_urlsafe(50), **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_setting_that_opens_the_site_is_told() -> None:
    done = check(DEBUG="true", SECRET_KEY="short")
    assert done.returncode == 1
    assert "security.W018" in done.stderr
    assert "security.W009" in done.stderr


@pytest.mark.parametrize(
    ("secret_key", "entry", "told"),
    [("", "", "SECRET_KEY"), ("set", "models: {m: {fil: x}}", "models.yaml:1: models.m.fil")],
)
def test_web_does_not_start_without_its_settings(
    settings: Settings, tmp_path: Path, secret_key: str, entry: str, told: str
) -> None:
    (tmp_path / "models.yaml").write_text(entry)
    settings.SECRET_KEY = secret_key
    settings.MODELS_FILE = tmp_path / "models.yaml" if entry else None
    catalogue.cache_clear()
    with pytest.raises(CommandError, match=told):
        call_command("web", skip_checks=True)
    catalogue.cache_clear()
