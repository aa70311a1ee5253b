"""``python -m tools.containers``: build and run the stack, check it, print a table.

It needs a Docker engine and Docker Compose 2.24 or newer, and some ten minutes. The stack is a copy
of the checkout with a project name, images, volumes and ports of its own; at the end it is removed.
The exit status is 1 if a check failed. With words, only checks with one of them in the name run.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tools.containers import changes, faults, images, monitoring, restoring, running
from tools.containers.stack import IMAGE, Failed, Skipped, Stack, need

Check = Callable[[Stack], str]
CHECKS: tuple[Check, ...] = (
    running.streams,
    running.doctor_is_content,
    running.pull_writes,
    running.networks_lead_out_and_not_in,
    running.redis_has_half_of_its_container,
    running.health_checks_are_cheap,
    images.builds_again_without_a_restart,
    images.threads_follow_the_quota,
    images.cuda_layers_survive_a_failed_index,
    monitoring.is_monitored,
    monitoring.shows_dashboards,
    faults.web_is_killed,
    faults.worker_is_killed,
    faults.postgres_restarts,
    faults.redis_restarts,
    faults.postgres_outlives_its_health_checks,
    changes.scales,
    changes.is_upgraded,
    changes.gpu_worker_serves_alone,
    restoring.is_restored_elsewhere,
)


def main() -> int:
    """Run the checks; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.containers")
    parser.add_argument("words", nargs="*", help="run only checks with one of these in their names")
    parser.add_argument("--port", type=int, default=18443, help="the first of four ports")
    parser.add_argument("--keep", action="store_true", help="leave the stack running")
    options = parser.parse_args()
    _say_versions()
    folder = Path(tempfile.mkdtemp(prefix="containers-"))
    stack = Stack("containers-check", folder, options.port)
    try:
        stack.prepare()
        statuses = [_run(running.starts, stack)]
        wanted = [c for c in CHECKS if not options.words or _has(c, options.words)]
        if statuses == ["ok"]:
            statuses += [_run(check, stack) for check in wanted]
    finally:
        if options.keep:
            print(f"left in {folder}, project {stack.name}")
        else:
            stack.remove()
            _remove_images()  # Docker keeps one that a container has.
    print(", ".join(f"{statuses.count(s)} {s}" for s in ("ok", "skipped", "FAILED")))
    return 1 if "FAILED" in statuses else 0


def _run(check: Check, stack: Stack) -> str:
    """Run a check and print its line of the table; return its status."""
    started, status = time.monotonic(), "ok"
    try:
        said = check(stack)
    except Skipped as exc:
        status, said = "skipped", str(exc)
    except (Failed, OSError, ValueError, KeyError) as exc:
        status, said = "FAILED", f"{type(exc).__name__}: {exc}"
    name = check.__name__.replace("_", " ")
    print(f"{status:<8} {time.monotonic() - started:5.0f} s  {name:<38} {said}", flush=True)
    return status


def _has(check: Check, words: list[str]) -> bool:
    return any(word in check.__name__ for word in words)


def _say_versions() -> None:
    """Print the versions of the engine and of Compose. Raise Failed if one is missing or old."""
    versions = []
    for command in (
        ["docker", "version", "--format", "{{.Server.Version}}"],
        ["docker", "compose", "version", "--short"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        need(done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}")
        versions.append(done.stdout.strip())
    version = tuple(int(part) for part in re.findall(r"\d+", versions[1])[:2])
    need(version >= (2, 24), f"Compose {versions[1]} is too old: the checks need 2.24.")
    print(f"Docker {versions[0]}, Compose {versions[1]}", flush=True)


def _remove_images() -> None:
    command = ["docker", "image", "rm", f"{IMAGE}-web:latest", f"{IMAGE}-worker-cpu:latest"]
    subprocess.run(command, capture_output=True, check=False)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as problem:
        sys.exit(str(problem))
