"""Kills of the worker at each point of the loop, and what must be true after them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from tests.served_stack import wait_until
from tests.tool_loop.servers import LoopSite

OVER = ("completed", "failed", "cancelled", "incomplete")
POINTS = ("before", "after", "beside", "in_tool", "in_turn", "random")
"""Before a call leaves, after it was answered, then also while the other call of its turn runs,
while it runs, in the turn after it, at any time."""


def turns(point: str, function: str, mark: str, worker: int | None) -> list[dict[str, Any]]:
    """Return turns of the model with a kill at this point; ``mark`` makes the calls unique.

    The turns kill this process themselves; without one they wait at the point to be killed.
    """
    act = "hold" if worker is None else "die"
    first: dict[str, Any] = {"mark": f"{mark} 1"}
    second: dict[str, Any] = {"mark": f"{mark} 2", "sleep": 0.3}
    if point in ("before", "after"):
        second[act] = point
    last: dict[str, Any] = {"say": "It is done."}
    if point == "beside":
        second[act] = "after"
    if worker is None and point in ("in_tool", "beside"):
        (second if point == "in_tool" else first)["hold"] = "in_tool"
    if point == "in_turn":
        last |= {"hold": mark} if worker is None else {"kill": worker}
    calls = [[function, first], [function, second]]
    if point == "beside":
        return [{"say": "Now.", "calls": calls}, last]
    return [{"say": "Now.", "calls": calls[:1]}, {"calls": calls[1:]}, last]


def held(point: str, mark: str) -> set[str]:
    """Return the marks of what waits to be killed at this point, of turns without a worker."""
    calls = {"in_turn": (), "beside": (f"{mark} 1", f"{mark} 2")}
    return set(calls.get(point, (f"{mark} 2",))) or {mark}


def effects(site: LoopSite, mark: str) -> list[int]:
    """Return how often each of the two calls has reached the server."""
    found = [0, 0]
    for call in list(site.tool.calls):
        for place in (0, 1):
            found[place] += call.get("mark") == f"{mark} {place + 1}"
    return found


def problems(site: LoopSite, response: dict[str, Any], mark: str, function: str) -> Iterator[str]:
    """Yield what is wrong with a response whose worker was killed."""
    status = response["status"]
    if status not in OVER:
        yield f"{mark}: stuck as {status}"
        return
    counted = effects(site, mark)
    if function == "count" and max(counted) > 1:
        yield f"{mark}: a call was made twice: {counted}"
    calls = [item for item in response["output"] if item["type"] == "mcp_call"]
    if status == "completed":
        if len(calls) != 2 or response["output"][-1]["type"] != "message":
            yield f"{mark}: completed with {[item['type'] for item in response['output']]}"
        for call, count in zip(calls, counted, strict=False):
            said = str(call["error"] or "")
            if call["status"] == "incomplete":
                yield f"{mark}: completed with a call that was not ended: {call}"
            if not count and "Outcome unknown" not in said:
                yield f"{mark}: a call has a result and was not made: {call}"
    rows = site.stack.sql(
        "SELECT status, result FROM tool_calls_toolcall WHERE generation_id = %s", response["id"]
    )
    if any(state == "sent" or result for state, result in rows):
        yield f"{mark}: rows {rows}"


def random_pause(chance: random.Random) -> float:
    """Return after how many seconds a kill at any time comes."""
    return chance.uniform(0.0, 1.2)


def wait_until_ended(site: LoopSite, ids: list[str], timeout_s: float) -> list[dict[str, Any]]:
    """Return the responses once all have ended, or at the end of the time as they are."""
    found: dict[str, dict[str, Any]] = {}

    def all_ended() -> bool:
        with site.stack.http() as http:
            for id_ in ids:
                if found.get(id_, {}).get("status") not in OVER:
                    found[id_] = http.get(f"/v1/responses/{id_}").json()
        return all(found[id_]["status"] in OVER for id_ in ids)

    with suppress(AssertionError):  # What is stuck is a problem of its response.
        wait_until(all_ended, timeout_s, "the ends")
    return [found[id_] for id_ in ids]
