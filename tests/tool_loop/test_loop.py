"""A response calls tools of the site and goes on with their results, until the model is done."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.served_stack import wait_until
from tests.tool_loop.servers import LoopSite, is_summary

SAY = {"say": "All done."}


def created(site: LoopSite, body: dict[str, Any]) -> dict[str, Any]:
    """Return the response to this request."""
    with site.stack.http() as http:
        answer = http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def compacting(
    site: LoopSite, *turns: dict[str, Any], mark: str = "word", **fields: Any
) -> dict[str, Any]:
    """Return the body of a request with a history, that is compacted when it is too long.

    The history, and so what is asked for its summary, has the mark.
    """
    history = [
        {"role": "user", "content": f"{mark} {'word ' * 700}"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": json.dumps(turns)},
    ]
    late = [{"type": "compaction", "compact_threshold": 1_000_000}]
    return {**site.request(**fields), "input": history, "context_management": late}


def roles(body: dict[str, Any]) -> list[str]:
    """Return the roles of the messages that the model got."""
    return [message["role"] for message in body["messages"]]


def shown(site: LoopSite, response_id: str) -> dict[str, Any]:
    """Return the response as it is now."""
    with site.stack.http() as http:
        found: dict[str, Any] = http.get(f"/v1/responses/{response_id}").json()
        return found


def ended(site: LoopSite, response_id: str, timeout_s: float = 60) -> dict[str, Any]:
    """Return a response once it has ended."""
    over = ("completed", "failed", "cancelled", "incomplete")
    wait_until(lambda: shown(site, response_id)["status"] in over, timeout_s, "the end")
    return shown(site, response_id)


def kinds(response: dict[str, Any]) -> list[str]:
    """Return the types of the items of the output."""
    return [item["type"] for item in response["output"]]


def test_results_go_to_the_model_until_it_answers(site: LoopSite) -> None:
    calls = [["count", {"n": 1}], ["count", {"n": 2}]]
    body = site.request({"say": "Let me see.", "calls": calls}, {"calls": [["again", {}]]}, SAY)
    with site.stack.checked():
        response = created(site, body)
    assert kinds(response) == ["message", "mcp_call", "mcp_call", "mcp_call", "message"]
    assert [item.get("output") for item in response["output"][1:4]] == ["done 1"] * 3
    assert response["status"] == "completed"
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (21, 15)
    row = site.stack.row(response["id"])
    assert (row["input_tokens"], row["output_tokens"], row["attempt"]) == (21, 15, 1)
    last = site.model.body["messages"]
    assert [m["role"] for m in last] == [
        "user",
        *("assistant", "tool", "tool"),
        "assistant",
        "tool",
    ]
    rows = site.stack.sql(
        "SELECT number, status, attempt, result FROM tool_calls_toolcall "
        "WHERE generation_id = %s ORDER BY number",
        response["id"],
    )
    assert rows == [(0, "done", 1, None), (1, "done", 1, None), (2, "done", 1, None)]
    assert shown(site, response["id"])["output"] == response["output"]


def test_each_event_comes_as_it_happens_and_the_replay_is_the_same(site: LoopSite) -> None:
    calls = [["count", {"sleep": 0.4}], ["count", {}]]
    body = site.request({"calls": calls}, SAY, stream=True)
    arrived: list[tuple[float, str]] = []
    with site.stack.checked(), site.stack.http() as http:
        with http.stream("POST", "/v1/responses", json=body) as answer:
            live = [line for line in answer.iter_lines() if _note(arrived, line)]
        events = [
            json.loads(line.removeprefix("data: ")) for line in live if line != "data: [DONE]"
        ]
        response = events[-1]["response"]
        again = http.get(f"/v1/responses/{response['id']}", params={"stream": "true"}).text
    assert [line for line in again.splitlines() if line.startswith("data: ")] == live
    call = [
        *("output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta"),
        *("mcp_call_arguments.done", "mcp_call.completed", "output_item.done"),
    ]
    found = [event["type"].removeprefix("response.") for event in events]
    assert found[:14] == ["created", "in_progress", *call, *call]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    times = {type_: at for at, type_ in reversed(arrived)}
    waited_s = times["response.mcp_call.completed"] - times["response.mcp_call_arguments.done"]
    assert waited_s > 0.3
    # The database makes the same stream once the log has expired.
    with site.stack.redis() as client:
        client.delete(f"{{{response['id']}}}:log")
    with site.stack.http() as http:
        again = http.get(f"/v1/responses/{response['id']}", params={"stream": "true"}).text
    replayed = [line for line in again.splitlines() if line.startswith("data: {")]
    assert [json.loads(line.removeprefix("data: ")) for line in replayed] == events


def _note(arrived: list[tuple[float, str]], line: str) -> bool:
    if line.startswith("event: "):
        arrived.append((time.monotonic(), line.removeprefix("event: ")))
    return line.startswith("data: ")


def test_the_official_client_reads_the_stream(site: LoopSite) -> None:
    body = site.request({"calls": [["count", {}]]}, SAY)
    with site.stack.client().responses.stream(**body) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["mcp_call", "message"]
    assert final.output_text.strip() == "All done."


def test_calls_above_the_limit_are_ignored(site: LoopSite) -> None:
    calls = [["count", {"n": n}] for n in range(3)]
    before = sum(site.tool.effects.values())
    response = created(site, site.request({"calls": calls}, SAY, max_tool_calls=2))
    assert kinds(response) == ["mcp_call", "mcp_call", "message"]
    assert sum(site.tool.effects.values()) == before + 2
    assert "tools" not in site.model.body
    endless = created(site, site.request({"calls": [["again", {}]]}))
    assert endless["status"] == "completed"
    assert kinds(endless) == ["mcp_call"] * 6


def test_a_call_of_the_client_ends_the_response_after_the_calls_of_the_site(site: LoopSite) -> None:
    own = {"type": "function", "name": "ask", "parameters": {"type": "object"}}
    body = site.request({"calls": [["count", {}], ["ask", {}]]}, SAY)
    first = created(site, {**body, "tools": [*body["tools"], own]})
    assert kinds(first) == ["mcp_call", "function_call"]
    assert first["output"][0]["output"] == "done 1"
    answer = {"type": "function_call_output", "call_id": first["output"][1]["call_id"]}
    second = created(
        site,
        {
            **body,
            "tools": [*body["tools"], own],
            "previous_response_id": first["id"],
            "input": [{**answer, "output": "Yes."}],
        },
    )
    assert kinds(second) == ["message"]
    results = [m["content"] for m in site.model.body["messages"] if m["role"] == "tool"]
    assert results == ["done 1", "Yes."]


def test_the_slot_is_free_while_a_tool_runs(site: LoopSite) -> None:
    slow = site.request({"calls": [["count", {"sleep": 1.5}]]}, SAY, model="narrow")
    id_ = created(site, {**slow, "background": True})["id"]
    wait_until(lambda: any(call.get("sleep") == 1.5 for call in site.tool.calls), 10, "the call")
    quick = created(site, site.request(SAY, model="narrow"))
    assert quick["status"] == "completed"
    assert shown(site, id_)["status"] == "in_progress"
    assert ended(site, id_)["status"] == "completed"


def test_a_model_is_unloaded_when_the_runs_that_call_tools_have_ended(site: LoopSite) -> None:
    turn = {"calls": [["count", {"sleep": 0.5, "mark": "unloaded"}]]}
    body = site.request(turn, SAY, model="narrow")
    with ThreadPoolExecutor(1) as pool, site.stack.http() as http:

        def workers() -> int:
            return int(http.get("/v1/models/narrow").json()["workers"])

        response = pool.submit(created, site, body)
        wait_until(lambda: any(c.get("mark") == "unloaded" for c in site.tool.calls), 10, "it")
        http.post("/v1/models/unload", json={"model": "narrow"}).raise_for_status()
        assert response.result(20)["status"] == "completed"
        wait_until(lambda: workers() == 0, 10, "the end of the model")
        http.post("/v1/models/load", json={"model": "narrow"}).raise_for_status()
        wait_until(lambda: workers() == 1, 20, "the model")


def test_many_loops_share_one_slot(site: LoopSite) -> None:
    turn = {"calls": [["count", {}]]}
    found: list[dict[str, Any]] = []
    body = site.request(turn, turn, SAY, model="narrow")
    threads = [threading.Thread(target=lambda: found.append(created(site, body))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [kinds(response) for response in found] == [["mcp_call", "mcp_call", "message"]] * 8


def test_results_and_times_are_bounded_and_errors_go_to_the_model(site: LoopSite) -> None:
    calls = [
        ["count", {"huge": 100_000_000}],
        ["count", {"sleep": 60}],
        ["count", {"deaf": True}],
        ["count", "[1]"],
    ]
    response = created(site, site.request({"calls": calls}, SAY))
    assert response["status"] == "completed"
    huge, slow, deaf, wrong = response["output"][:4]
    assert len(huge["output"]) < 4200
    assert huge["output"].endswith("[Cut off: the result has 100000000 characters.]")
    assert slow["error"]["content"][0]["text"] == "Outcome unknown: the call took longer than 2 s."
    assert deaf["error"] == slow["error"]
    assert wrong["error"]["content"][0]["text"] == "The arguments are no JSON object."
    statuses = site.stack.sql(
        "SELECT status FROM tool_calls_toolcall WHERE generation_id = %s ORDER BY number",
        response["id"],
    )
    assert statuses == [("done",), ("unknown",), ("unknown",), ("done",)]


def test_calls_of_one_turn_run_at_the_same_time_and_a_cancel_stops_all(site: LoopSite) -> None:
    calls = [["count", {"n": n, "sleep": 1.9}] for n in range(4)]
    id_ = created(site, {**site.request({"calls": calls}, SAY), "background": True})["id"]
    rows = "SELECT status FROM tool_calls_toolcall WHERE generation_id = %s"
    wait_until(lambda: site.stack.sql(rows, id_) == [("sent",)] * 4, 10, "all calls are sent")
    with site.stack.http() as http:
        assert http.post(f"/v1/responses/{id_}/cancel").json()["status"] == "cancelled"
    assert site.stack.sql(rows, id_) == [("unknown",)] * 4
    assert {item["status"] for item in shown(site, id_)["output"]} == {"incomplete"}


def test_results_are_in_the_order_of_the_calls_whichever_ends_first(site: LoopSite) -> None:
    calls = [["count", {"n": n, "sleep": 0.6 - n / 5}] for n in range(4)]
    response = created(site, site.request({"calls": calls}, SAY))
    items = response["output"][:4]
    assert [json.loads(item["arguments"])["n"] for item in items] == [0, 1, 2, 3]
    assert [item["output"] for item in items] == ["done 1"] * 4
    made = [message for message in site.model.body["messages"] if message["role"] == "tool"]
    given = [call["id"] for call in site.model.body["messages"][1]["tool_calls"]]
    assert [message["tool_call_id"] for message in made] == given


def test_a_cancel_or_deletion_ends_the_response_while_a_tool_runs(site: LoopSite) -> None:
    for act in ("cancel", "delete"):
        body = site.request({"calls": [["count", {"sleep": 1.9, "act": act}]]}, SAY)
        id_ = created(site, {**body, "background": True})["id"]
        wait_until(lambda a=act: any(c.get("act") == a for c in site.tool.calls), 10, "the call")
        started = time.monotonic()
        with site.stack.http() as http:
            if act == "cancel":
                answer = http.post(f"/v1/responses/{id_}/cancel").json()
                assert answer["status"] == "cancelled"
                assert answer["output"][0]["status"] == "incomplete"
            else:
                assert http.delete(f"/v1/responses/{id_}").json()["deleted"]
        assert time.monotonic() - started < 1.5
        assert site.stack.row(id_)["status"] == "cancelled"
        [(status, result)] = site.stack.sql(
            "SELECT status, result FROM tool_calls_toolcall WHERE generation_id = %s", id_
        )
        assert (status, result) == ("unknown", None)


def test_results_that_fill_the_context_are_compacted_again_and_again(tight: LoopSite) -> None:
    site = tight
    calls = [[["count", {"more": 3200, "turn": number}]] for number in range(3)]
    body = compacting(site, *({"calls": made} for made in calls), SAY)
    with site.stack.checked():
        response = created(site, body)
        assert kinds(response) == [*("mcp_call", "compaction") * 3, "message"]
        assert response["output"][-1]["content"][0]["text"].strip() == "All done."
        assert [len(item["output"]) for item in response["output"][:-1:2]] == [3206] * 3
        # Each prompt has the question, the newest results and a summary of the rest.
        assert roles(site.model.body) == ["system", "user", "assistant", "tool"]
        summaries = [asked.body for asked in site.model.asked if is_summary(asked.body)]
        assert len(summaries) == 3
        assert "SUMMARY" in summaries[1]["messages"][1]["content"]
        usage = response["usage"]
        assert (usage["input_tokens"], usage["output_tokens"]) == (7 * 7, 4 * 5 + 3)
        rows = site.stack.sql(
            "SELECT number, attempt FROM tool_calls_toolcall WHERE generation_id = %s "
            "ORDER BY number",
            response["id"],
        )
        assert rows == [(0, 1), (1, 1), (2, 1)]
        assert shown(site, response["id"])["output"] == response["output"]
        # The next response begins with the newest compaction and what came after it.
        following = {**site.request(SAY), "previous_response_id": response["id"]}
        created(site, following)
    assert roles(site.model.body) == ["system", "user", "assistant", "tool", "assistant", "user"]
    without = {name: value for name, value in body.items() if name != "context_management"}
    with site.stack.http() as http:
        refused = http.post("/v1/responses", json=without)
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def deferred(name: str, **fields: Any) -> dict[str, Any]:
    """Return a function that the model is not shown at first."""
    made = {"type": "function", "name": name, "parameters": {"type": "object"}, **fields}
    return {**made, "defer_loading": True}


CRM = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers",
    "tools": [deferred("find"), {**deferred("count"), "defer_loading": False}],
}
WEATHER = deferred("weather", description="Of a place")
SEARCHING = [{"type": "tool_search"}, CRM, WEATHER, deferred("mail")]


def functions_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return the functions that the model was shown, by name."""
    return {one["function"]["name"]: one["function"] for one in body.get("tools", ())}


def test_the_model_loads_deferred_tools_in_the_middle_of_a_response(site: LoopSite) -> None:
    site.model.asked.clear()
    search = {"calls": [["tool_search", {"paths": ["crm", "weather", "bank"]}]]}
    again = {"calls": [["tool_search", {"paths": ["crm"]}]]}
    turns = (search, again, {"calls": [["crm__find", {}], ["weather", {}]]})
    made = created(site, site.request(*turns, tools=SEARCHING))
    first, second, third = [one.body for one in site.model.asked]
    assert [*functions_of(first)] == ["crm__count", "tool_search"]
    described = functions_of(first)["tool_search"]
    assert described["description"].endswith("- crm: Customers\n- weather: Of a place\n- mail: ")
    names = described["parameters"]["properties"]["paths"]["items"]["enum"]
    assert names == ["crm", "weather", "mail"]
    assert [*functions_of(second)] == ["crm__count", "tool_search", "crm__find", "weather"]
    told = second["messages"][-1]["content"]
    assert told == (
        "Loaded: crm, weather. These functions can be called now.\n"
        "Not found: bank. There is: crm, weather, mail."
    )
    # None of them twice; and the search is not offered after one that has found nothing new.
    assert [*functions_of(third)] == ["crm__count", "crm__find", "weather"]
    searched, found, *repeated, find, weather = made["output"]
    assert searched.pop("id").startswith("tsc_")
    arguments = {"paths": ["crm", "weather", "bank"]}
    common = {"status": "completed", "call_id": None, "execution": "server"}
    assert searched == {"type": "tool_search_call", **common, "arguments": arguments}
    assert (found["type"], found["execution"]) == ("tool_search_output", "server")
    shown = {**deferred("find"), "description": None, "strict": True}
    assert found["tools"][0] == {**CRM, "tools": [shown]}
    assert found["tools"][1]["name"] == "weather"
    assert [one["type"] for one in repeated] == ["tool_search_call", "tool_search_output"]
    assert (find["type"], find["namespace"], find["name"]) == ("function_call", "crm", "find")
    assert (weather["namespace"], weather["name"]) == ("weather", "weather")

    outputs = [
        {"type": "function_call_output", "call_id": one["call_id"], "output": "done"}
        for one in (find, weather)
    ]
    site.model.asked.clear()
    played = {"role": "user", "content": json.dumps([SAY])}
    body = {**site.request(tools=SEARCHING), "previous_response_id": made["id"]}
    created(site, {**body, "input": [*outputs, played]})
    [after] = site.model.asked
    assert [*functions_of(after.body)] == ["crm__count", "crm__find", "weather", "tool_search"]


def test_the_stream_of_a_tool_search_can_be_read_again(site: LoopSite) -> None:
    search = {"calls": [["tool_search", {"paths": ["weather"]}]]}
    tools = [{"type": "tool_search"}, WEATHER]
    body = {**site.request(search, SAY, tools=tools), "stream": True}
    with site.stack.http() as http:
        live = http.post("/v1/responses", json=body).text
        events = [json.loads(line[6:]) for line in live.splitlines() if line.startswith("data: {")]
        stored = events[-1]["response"]["id"]
        again = http.get(f"/v1/responses/{stored}?stream=true").text
    added = [one for one in events if one["type"] == "response.output_item.added"]
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    kinds = ["tool_search_call", "tool_search_output", "message"]
    assert [one["item"]["type"] for one in added] == [one["type"] for one in done] == kinds
    assert [one["item"]["status"] for one in added] == ["in_progress"] * 3
    assert [one["output_index"] for one in added] == [0, 1, 2]
    assert done == events[-1]["response"]["output"]
    assert again == live
    assert [*functions_of(site.model.body)] == ["weather"]  # All is loaded: no search any more.


def test_a_choice_of_a_deferred_tool_loads_it(site: LoopSite) -> None:
    site.model.asked.clear()
    chosen = {"type": "function", "name": "weather"}
    body = site.request({"calls": [["weather", {}]]}, tools=SEARCHING, tool_choice=chosen)
    [made] = created(site, body)["output"]
    assert [*functions_of(site.model.body)] == ["weather"]
    assert (made["name"], made["namespace"]) == ("weather", "weather")
