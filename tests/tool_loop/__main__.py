"""``python -m tests.tool_loop [KILLS]``: kill the worker in the loop again and again.

Each round runs four responses in the background and kills the worker once: at a point of one of
them, or at any time. After the last round no call may have been made twice, and no response may be
stuck.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress

import httpx
import psutil

from tests.served_stack import wait_until
from tests.tool_loop.kills import POINTS, problems, random_pause, turns, wait_until_ended
from tests.tool_loop.servers import LoopSite, loop_site

_BESIDE = 3
"""Responses of each round beside the one with the kill."""


def main(kills: int) -> int:
    """Return 1 if something was done twice, or is stuck."""
    chance = random.Random(35)
    marks: dict[str, tuple[str, str]] = {}
    with loop_site(TOOL_TIMEOUT_S="5") as site:
        for number in range(kills):
            _round(site, number, chance, marks)
            print(f"\r{number + 1} kills", end="", flush=True)
        responses = wait_until_ended(site, list(marks), 120)
        found = [p for r in responses for p in problems(site, r, *marks[r["id"]])]
    statuses = Counter(response["status"] for response in responses)
    print(f"\n{kills} kills, {len(responses)} responses: {dict(statuses)}", *found, sep="\n")
    return int(bool(found))


def _round(
    site: LoopSite, number: int, chance: random.Random, marks: dict[str, tuple[str, str]]
) -> None:
    point = POINTS[number % len(POINTS)]
    function = "again" if number % 4 == 3 else "count"
    worker = worker_of(site)
    with site.stack.http() as http:
        for place in range(_BESIDE + 1):
            mark = f"{number}.{place}"
            played = turns(point if not place else "", function, mark, worker)
            body = site.request(*played, background=True)
            marks[http.post("/v1/responses", json=body).json()["id"]] = mark, function
    if point == "in_tool":
        mark = f"{number}.0 2"
        wait_until(lambda: any(c["mark"] == mark for c in site.tool.calls), 30, "the call")
        os.kill(worker, signal.SIGKILL)
    elif point == "random":
        time.sleep(random_pause(chance))
        os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not _lives(worker), 30, f"the death at the point {point}")


def _lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def worker_of(site: LoopSite) -> int:
    """Return the id of the worker's process once it serves."""
    found: list[int] = []

    def ready() -> bool:
        with suppress(httpx.HTTPError, AssertionError):  # It is being started again.
            found[:] = [site.stack.pid_of("worker")]
            return httpx.get(f"{site.stack.url}/health/ready", timeout=60).status_code == 200
        return False

    wait_until(ready, 120, "ready")
    return found[0]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
