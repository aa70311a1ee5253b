"""Django's own checks with the settings of a deployment; `make lint` has what passes them."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys

import pytest

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
