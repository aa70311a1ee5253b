"""``manage.py doctor`` on a site that is well, and on broken ones: tests/doctor/ has each check."""

from __future__ import annotations

import re

import pytest

from tests.deployment.conftest import Site
from tests.ports import free_port

pytestmark = pytest.mark.timeout(400)  # The first test starts a whole site.


Findings = dict[str, list[tuple[str, str]]]


def examined(site: Site, **env: str) -> tuple[int, Findings, str]:
    """The exit status, for each thing that was looked at its levels and what was found, and all
    that was said."""
    done = site.local.run("migrate", "doctor", **env)
    assert "Traceback" not in done.stderr, done.stderr
    findings: Findings = {}
    for line in done.stdout.splitlines():
        if found := re.fullmatch(r"(ok|warn|fail) +(.+?)  +(.*)", line):
            findings.setdefault(found[2], []).append((found[1], found[3]))
    return done.returncode, findings, done.stdout


def level(findings: Findings, what: str) -> str:
    return max(level for level, _ in findings[what]) if what in findings else "absent"


def test_a_site_that_is_well_has_nothing_that_fails(site: Site) -> None:
    status, findings, _ = examined(site)
    failed = {what: found for what, found in findings.items() if level(findings, what) == "fail"}
    assert failed == {}
    assert status == 0
    # Each has the scripted model, and a process of its own for the other.
    assert findings["workers"] == [("ok", f"{len(site.workers)} live")]
    assert level(findings, "model demo") == level(findings, "model scripted") == "ok"
    assert level(findings, "migrations") == level(findings, "channel layer") == "ok"
    assert level(findings, "clock of PostgreSQL") == "ok"
    assert level(findings, "maintenance") == "ok"
    releases = [found for what, found in findings.items() if what.startswith("worker ")]
    assert all(found[0][1].startswith("release 0.") for found in releases)


def test_services_that_do_not_answer_fail_with_a_fix(site: Site) -> None:
    nowhere = free_port()
    env = {
        "DATABASE_URL": f"postgresql://site:secret@127.0.0.1:{nowhere}/site",
        "DATABASE_URL_FILE": "",
        "REDIS_URL": f"redis://:secret@127.0.0.1:{nowhere}/0",
        "REDIS_URL_FILE": "",
    }
    status, findings, told = examined(site, **env)
    assert status == 1
    for what in ("PostgreSQL", "migrations", "Redis", "channel layer", "workers", "maintenance"):
        assert level(findings, what) == "fail", what
    assert "correct address, role, password or database in DATABASE_URL" in told
    assert "correct REDIS_URL" in told
    assert "secret" not in told
