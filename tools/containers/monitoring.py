"""Checks of the profile ``monitoring``: targets of Prometheus, panels of Grafana."""

from __future__ import annotations

import json
import time

from tools.containers.images import has_image
from tools.containers.stack import Failed, Stack, need

_PROFILE = ("--profile", "monitoring")
_PATIENCE_S = 90


def is_monitored(stack: Stack) -> str:
    """Prometheus reaches every process."""
    _up(stack, "prometheus")
    deadline = time.monotonic() + _PATIENCE_S
    address = "http://localhost:9090/api/v1/targets?state=active"
    while True:
        said = stack.compose("exec", "-T", "prometheus", "wget", "-qO-", address, check=False)
        targets = json.loads(said)["data"]["activeTargets"] if said.startswith("{") else []
        health = [f"{target['labels']['job']} {target['health']}" for target in targets]
        if len(health) >= 4 and all(one.endswith(" up") for one in health):
            return ", ".join(sorted(health))
        need(time.monotonic() < deadline, f"targets: {health} {said[:200] if not health else ''}")
        time.sleep(1)


def shows_dashboards(stack: Stack) -> str:
    """Grafana has the dashboards and its source of data."""
    _up(stack, "grafana")
    user = f"admin:{(stack.folder / 'deploy/secrets/grafana_password').read_text()}"
    address = f"http://{user}@localhost:3000/api/search?type=dash-db"
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        said = stack.compose("exec", "-T", "grafana", "wget", "-qO-", address, check=False)
        if said.startswith("[{"):
            return ", ".join(found["title"] for found in json.loads(said))
        time.sleep(2)
    raise Failed(f"no dashboards: {said[:300]}")


def _up(stack: Stack, service: str) -> None:
    """Start a service of the profile. Raise Skipped if there is no image of it."""
    has_image(stack, stack.compose(*_PROFILE, "config", "--images", service).split()[-1])
    stack.compose(*_PROFILE, "up", "--detach", "--no-deps", service)
