"""A release: one version everywhere, licenses as documented, a whole source distribution."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from django.conf import settings

from tests.served_stack import ROOT
from tools import licenses, release


def test_package_changelog_and_site_share_a_version() -> None:
    assert settings.VERSION == release.version() == release.changelog_versions()[0]


def test_the_page_names_the_license_of_every_package() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    table = page.partition("| license | packages |")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    told = {package.strip(): name.strip() for name, names in rows for package in names.split(",")}
    assert told.keys() == licenses.packages()
    known = {package: licenses.license_of(package) for package in told}
    installed = {package: name for package, name in known.items() if name is not None}
    assert len(installed) > 40
    assert {package: told[package] for package in installed} == installed


def test_a_version_without_a_heading_is_no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "changelog_versions", lambda: ["0.0.1"])
    with pytest.raises(release.ReleaseError, match=re.escape(release.version())):
        release.check()


@pytest.mark.slow
def test_the_source_distribution_has_what_a_site_needs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert archive.name == f"inference_site-{release.version()}.tar.gz"
    assert {"LICENSE", "Makefile", "manage.py", "docker-compose.yml"} <= names
    assert {"requirements.lock", "worker/demo/demo-q8_0.gguf", "docs/api.md"} <= names
    assert not [name for name in names if name.startswith(("var/", ".venv/", ".git/"))]
