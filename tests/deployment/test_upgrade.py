"""deploy/upgrade.sh, with a program in place of ``docker`` that keeps containers in a file."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.deployment.compose import ROOT

_DOCKER = """#!/bin/sh
cd "$(dirname "$0")"
case "$*" in
    "compose ps "*) cat running ;;
    "compose rm "*) : > stopped ;;
    "compose up "*)
        cat stopped >> running
        for one in $STARTED; do echo "$one" >> running; done
        exit "$STATUS" ;;
    "stop "*) echo "$@" >> log ;;
    "rm "*) echo "$@" >> log ;;
    "inspect "*) echo "$@" >> asked; cat health ;;
    "logs "*) echo "the last lines of $4" ;;
esac
"""


def upgrade(
    folder: Path, running: str, started: str, status: int, health: str = "running healthy"
) -> tuple[int, list[str], str]:
    """Run it for one service; return its status, what it stopped and removed, what it said.

    ``status`` is that of Docker Compose, and ``health`` what Docker says of the new containers.
    """
    docker = folder / "docker"
    docker.write_text(_DOCKER)
    docker.chmod(0o755)
    (folder / "log").touch()
    (folder / "stopped").touch()
    (folder / "health").write_text(f"{health}\n")
    (folder / "running").write_text("".join(f"{one}\n" for one in running.split()))
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "STARTED": started, "STATUS": str(status)}
    command = ["sh", str(ROOT / "deploy" / "upgrade.sh"), "web"]
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=False)
    return done.returncode, (folder / "log").read_text().splitlines(), done.stderr


def test_healthy_ones_take_the_place_of_the_old_ones(tmp_path: Path) -> None:
    assert upgrade(tmp_path, "a b", "c d", 0)[:2] == (0, ["stop a b", "rm a b"])


def test_a_stopped_container_of_the_old_release_is_not_started_again(tmp_path: Path) -> None:
    """Docker Compose would count it as one of the new ones."""
    (tmp_path / "stopped").write_text("b\n")
    assert upgrade(tmp_path, "a", "c", 0)[0] == 0
    assert (tmp_path / "running").read_text().split() == ["a", "c"]


@pytest.mark.parametrize(
    ("started", "compose", "health", "log"),
    [
        ("c d", 0, "running healthy\nrunning unhealthy", ["rm --force c", "rm --force d"]),
        ("c d", 0, "running healthy\nrunning starting restarted", ["rm --force c", "rm --force d"]),
        ("c d", 0, "exited starting\nrunning starting", ["rm --force c", "rm --force d"]),
        ("c", 1, "running healthy", ["rm --force c"]),
        ("", 1, "", []),
    ],
)
def test_the_old_ones_stay_when_the_new_ones_are_not_healthy(
    started: str, compose: int, health: str, log: list[str], tmp_path: Path
) -> None:
    status, did, said = upgrade(tmp_path, "a b", started, compose, health)
    assert (status, did) == (1, log)
    assert "the old ones run on" in said
    # The reason, which goes with the container.
    assert [f"the last lines of {one}" in said for one in started.split()] == [True] * len(log)


def test_only_the_new_ones_must_be_healthy(tmp_path: Path) -> None:
    """Docker Compose's own wait fails at an old one that ends again and again."""
    upgrade(tmp_path, "a", "b", 0)
    asked = [line.split()[-1] for line in (tmp_path / "asked").read_text().splitlines()]
    assert asked == ["b"]


def test_a_service_that_does_not_run_is_an_error(tmp_path: Path) -> None:
    status, did, said = upgrade(tmp_path, "", "", 0)
    assert (status, did) == (1, [])
    assert "none runs" in said
