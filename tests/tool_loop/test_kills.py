"""A worker that dies in the loop makes no call twice, and leaves no response behind."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.served_stack import wait_until
from tests.tool_loop.kills import POINTS, effects, problems, turns, wait_until_ended
from tests.tool_loop.servers import LoopSite, is_summary, start_worker
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


@pytest.mark.parametrize("function", ["count", "again"])
@pytest.mark.parametrize("point", POINTS[:5])
def test_a_killed_worker_doubles_nothing(site: LoopSite, point: str, function: str) -> None:
    worker, mark = worker_of(site), f"{point} {function}"
    body = site.request(*turns(point, function, mark, worker), background=True)
    id_ = created(site, body)["id"]
    if point == "in_tool":
        wait_until(lambda: effects(site, mark)[1], 30, "the call")
        os.kill(worker, signal.SIGKILL)
    [response] = wait_until_ended(site, [id_], 90)
    assert list(problems(site, response, mark, function)) == []
    assert response["status"] == "completed"
    assert kinds(response) == ["message", "mcp_call", "mcp_call", "message"]
    assert site.stack.row(id_)["attempt"] == 2
    assert response["usage"]["output_tokens"] == (10 if point == "beside" else 15)
    second = response["output"][2]
    made = effects(site, mark)
    if point == "beside":  # The first call may have been at any point when the worker died.
        assert made[0] <= 1 or function == "again"
        assert made[1] == (2 if function == "again" else 1)
    elif function == "count" and point != "in_turn":
        assert second["error"]["content"][0]["text"].startswith("Outcome unknown")
        assert made == [1, int(point != "before")]
    else:
        assert second["status"] == "completed"
        assert made == [1, 2 if function == "again" and point in ("after", "in_tool") else 1]


@pytest.mark.parametrize("point", ["in_turn", "after"])
def test_a_worker_that_dies_after_a_compaction_doubles_nothing(tight: LoopSite, point: str) -> None:
    """It dies in the turn that was compacted, or in a call of that turn."""
    site = tight
    worker, mark = worker_of(site), f"compacted {point}"
    first = {"mark": f"{mark} 1", "more": 3200, "turn": 0}
    second: dict[str, Any] = {"mark": f"{mark} 2", "turn": 1}
    if point == "after":
        second["die"] = "after"
    turn = {"calls": [["count", second]], **({"kill": worker} if point == "in_turn" else {})}
    body = compacting(site, {"calls": [["count", first]]}, turn, SAY, background=True)
    id_ = created(site, body)["id"]
    [response] = wait_until_ended(site, [id_], 90)
    assert list(problems(site, response, mark, "count")) == []
    assert response["status"] == "completed"
    assert kinds(response) == ["mcp_call", "compaction", "mcp_call", "message"]
    assert effects(site, mark) == [1, 1]
    assert site.stack.row(id_)["attempt"] == 2
    # The turns after the restart begin with what the compaction has left.
    assert roles(site.model.body) == ["system", "user", *("assistant", "tool") * 2]
    summaries = sum(is_summary(asked.body) for asked in site.model.asked)
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
