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
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.served_stack import ServedStack, wait_until
from tests.tool_loop.kills import POINTS, effects, problems, random_pause, turns, wait_until_ended
from tests.tool_loop.servers import LoopSite, loop_site, start_worker

_BESIDE = 3
"""Responses of each round beside the one with the kill."""
_DIES_S = 10.0
"""How long a round waits for the death at its point; another worker may have run it."""


class RestartedWorker:
    """A worker beside the site's own, which ``serve`` restarts ever later: this one at once."""

    def __init__(self, stack: ServedStack) -> None:
        self._stack, self._is_over, self.deaths = stack, False, 0
        self.process = start_worker(self._stack, "player")

    def _watch(self) -> None:
        while not self._is_over:
            if self.process.poll() is not None:
                self.deaths += 1
                self.process = start_worker(self._stack, "player")
            time.sleep(0.05)

    @contextmanager
    def running(self) -> Iterator[RestartedWorker]:
        """Restart it until the end."""
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield self
        finally:
            self._is_over = True
            thread.join()
            self.process.terminate()
            self.process.wait(90)

    def ready(self) -> int:
        """Return its process id once it serves the model."""
        wait_until(lambda: self._serves(self.process.pid), 120, "the worker")
        return self.process.pid

    def _serves(self, pid: int) -> bool:
        with self._stack.redis() as client:
            leases = client.mget(client.keys(f"worker:*:{pid}:*"))
        return any(lease and b'"ready"' in lease for lease in leases)


def main(kills: int) -> int:
    """Return 1 if something was done twice, or is stuck."""
    chance = random.Random(35)
    marks: dict[str, tuple[str, str]] = {}
    with loop_site(TOOL_TIMEOUT_S="5") as site, RestartedWorker(site.stack).running() as worker:
        done = 0
        with suppress(KeyboardInterrupt):
            for number in range(kills):
                _round(site, worker, number, chance, marks)
                done = number + 1
                counted = (effects(site, mark) for mark, of in marks.values() if of == "count")
                doubled = sum(max(found) > 1 for found in counted)
                print(f"{done} kills, {doubled} responses with a doubled call", flush=True)
        responses = wait_until_ended(site, list(marks), 180)
        found = [p for r in responses for p in problems(site, r, *marks[r["id"]])]
        made = Counter(count for mark, _ in marks.values() for count in effects(site, mark))
    statuses = Counter(response["status"] for response in responses)
    unknown = sum("Outcome unknown" in str(response["output"]) for response in responses)
    print(f"{done} kills, {len(responses)} responses: {dict(statuses)}, {unknown} with an unknown")
    print(f"calls by how often they reached the tool: {dict(made)}", *found, sep="\n")
    return int(bool(found))


def _round(
    site: LoopSite,
    worker: RestartedWorker,
    number: int,
    chance: random.Random,
    marks: dict[str, tuple[str, str]],
) -> None:
    point = POINTS[number % len(POINTS)]
    function = "again" if number % 4 == 3 else "count"
    deaths = worker.deaths  # Before it is ready: a call of an earlier round may kill it at once.
    pid = worker.ready()
    with site.stack.http() as http:
        for place in range(_BESIDE + 1):
            mark = f"{number}.{place}"
            played = turns(point if not place else "", function, mark, pid)
            body = site.request(*played, background=True)
            marks[http.post("/v1/responses", json=body).json()["id"]] = mark, function
    if point == "random":
        time.sleep(random_pause(chance))
    else:
        is_in_tool = point == "in_tool"
        with suppress(AssertionError):  # Another worker may have run it.
            wait_until(
                lambda: worker.deaths > deaths or (is_in_tool and effects(site, f"{number}.0")[1]),
                _DIES_S,
                "the point",
            )
    if worker.deaths == deaths:
        with suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGKILL)
    wait_until(lambda: worker.deaths > deaths, 30, "the death")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
