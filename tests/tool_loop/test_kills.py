"""A worker that dies in the loop makes no call twice, and leaves no response behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

from tests.served_stack import wait_until
from tests.tool_loop.kills import POINTS, effects, held, problems, turns, wait_until_ended
from tests.tool_loop.servers import (
    HELD_TURNS,
    LoopSite,
    is_summary,
    play,
    playing_in,
    release,
    start_worker,
)
from tests.tool_loop.test_loop import SAY, compacting, created, ended, kinds, roles, shown


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


CASES = [(point, function) for point in POINTS[:5] for function in ("count", "again")]
COMPACTED = ("in_turn", "after")


@pytest.fixture(scope="module")
def killed(site: LoopSite) -> Iterator[dict[str, dict[str, Any]]]:
    """The responses of all cases by their marks: one kill ends the worker of all of them.

    Each waits at its point to be killed. The next worker has to end all of them.
    """
    bodies, waiting = dict[str, dict[str, Any]](), set[str]()
    for point, function in CASES:
        mark = f"{point} {function}"
        bodies[mark] = site.request(*turns(point, function, mark, None))
        waiting |= held(point, mark)
    for point in COMPACTED:
        mark = f"compacted {point}"
        first = {"mark": f"{mark} 1", "more": 3200, "turn": 0}
        second: dict[str, Any] = {"mark": f"{mark} 2", "turn": 1}
        if point == "after":
            second["hold"] = "after"
        turn = {"calls": [["count", second]], **({"hold": mark} if point == "in_turn" else {})}
        played = ({"calls": [["count", first]]}, turn, SAY)
        bodies[mark] = compacting(site, *played, mark=mark)
        waiting |= held(point, mark)
    site.model.answers = [playing_in(7000)]
    site.model.asked.clear()
    with site.stack.http() as http:

        def is_served() -> bool:
            return bool(http.get("/v1/models/mortal").json()["workers"])

        with mortal_worker(site) as victim:
            wait_until(is_served, 120, "the worker")
            ids = {
                mark: created(site, {**body, "model": "mortal", "background": True})["id"]
                for mark, body in bodies.items()
            }
            wait_until(lambda: site.tool.held | HELD_TURNS == waiting, 45, "all at their points")
            victim.kill()
            release()
        with mortal_worker(site):
            found = wait_until_ended(site, list(ids.values()), 120)
    yield dict(zip(ids, found, strict=True))
    site.model.answers = [play]


@contextmanager
def mortal_worker(site: LoopSite) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker of its own model, whose calls may take a minute."""
    worker = start_worker(site.stack, "mortal", TOOL_TIMEOUT_S="60", DRAIN_TIMEOUT_S="1")
    try:
        yield worker
    finally:
        worker.terminate()
        worker.wait(90)


@pytest.mark.parametrize(("point", "function"), CASES)
def test_a_killed_worker_doubles_nothing(
    site: LoopSite, killed: dict[str, dict[str, Any]], point: str, function: str
) -> None:
    mark = f"{point} {function}"
    response = killed[mark]
    assert list(problems(site, response, mark, function)) == []
    assert response["status"] == "completed"
    assert kinds(response) == ["message", "mcp_call", "mcp_call", "message"]
    assert site.stack.row(response["id"])["attempt"] == 2
    assert response["usage"]["output_tokens"] == (10 if point == "beside" else 15)
    first, second = response["output"][1:3]
    made = effects(site, mark)
    if function == "again" and point == "beside":
        assert made == [2, 2]
    elif function == "count" and point != "in_turn":
        assert second["error"]["content"][0]["text"].startswith("Outcome unknown")
        assert bool(first["error"]) == (point == "beside")
        assert made == [1, int(point != "before")]
    else:
        assert second["status"] == "completed"
        assert made == [1, 2 if function == "again" and point in ("after", "in_tool") else 1]


@pytest.mark.parametrize("point", COMPACTED)
def test_a_worker_that_dies_after_a_compaction_doubles_nothing(
    site: LoopSite, killed: dict[str, dict[str, Any]], point: str
) -> None:
    """It dies in the turn that was compacted, or in a call of that turn."""
    mark = f"compacted {point}"
    response = killed[mark]
    assert list(problems(site, response, mark, "count")) == []
    assert response["status"] == "completed"
    assert kinds(response) == ["mcp_call", "compaction", "mcp_call", "message"]
    assert effects(site, mark) == [1, 1]
    assert site.stack.row(response["id"])["attempt"] == 2
    asked = [one.body for one in site.model.asked if mark in json.dumps(one.body)]
    # The turns after the restart begin with what the compaction has left.
    assert roles(asked[-1]) == ["system", "user", *("assistant", "tool") * 2]
    summaries = sum(map(is_summary, asked))
    assert summaries == (2 if point == "in_turn" else 1)


def test_a_response_in_the_foreground_ends_with_its_worker(site: LoopSite) -> None:
    worker, mark = worker_of(site), "foreground"
    with site.stack.http() as http:
        body = site.request(*turns("after", "count", mark, worker), stream=True)
        with http.stream("POST", "/v1/responses", json=body) as answer:
            text = answer.read().decode()
    assert "response.failed" in text
    assert effects(site, mark) == [1, 1]
    id_ = text.partition('"id":"')[2].partition('"')[0]
    response = ended(site, id_)
    assert list(problems(site, response, mark, "count")) == []
    assert response["output"][1]["output"] == "done 1"
    assert response["output"][2]["error"]["message"].startswith("Outcome unknown")


def test_a_worker_that_drains_gives_its_loops_to_the_next(site: LoopSite) -> None:
    worker = worker_of(site)
    call: dict[str, Any] = {"mark": "drain", "sleep": 1.5}
    id_ = created(site, site.request({"calls": [["count", call]]}, SAY, background=True))["id"]
    wait_until(lambda: any(c.get("mark") == "drain" for c in site.tool.calls), 30, "the call")
    os.kill(worker, signal.SIGTERM)
    response = ended(site, id_, 90)
    assert response["output"][0]["output"] == "done 1"
    assert kinds(response) == ["mcp_call", "message"]
    assert sum(c.get("mark") == "drain" for c in site.tool.calls) == 1
    row = site.stack.row(id_)
    assert (row["attempt"], row["spared"]) == (2, 1)


def test_a_loop_goes_on_in_an_idle_worker_while_its_own_is_busy(site: LoopSite) -> None:
    call: dict[str, Any] = {"mark": "handed over", "sleep": 1.0}
    body = site.request({"calls": [["count", call]]}, SAY, model="narrow", background=True)
    id_ = created(site, body)["id"]
    wait_until(lambda: any(c.get("mark") == "handed over" for c in site.tool.calls), 30, "the call")
    long = {"say": "word " * 100, "pause": 0.4}
    busy = created(site, site.request(long, model="narrow", background=True))["id"]
    wait_until(lambda: shown(site, busy)["status"] == "in_progress", 30, "the busy slot")
    other = start_worker(site.stack, "narrow")
    try:
        response = ended(site, id_, 60)
        assert shown(site, busy)["status"] == "in_progress"
    finally:
        other.terminate()
        other.wait(90)
    assert kinds(response) == ["mcp_call", "message"]
    assert sum(c.get("mark") == "handed over" for c in site.tool.calls) == 1
    row = site.stack.row(id_)
    assert (row["attempt"], row["spared"]) == (2, 1)
    assert row["worker"] != site.stack.row(busy)["worker"]
    with site.stack.http() as http:
        http.post(f"/v1/responses/{busy}/cancel")
