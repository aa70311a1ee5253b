"""The fold of a response whose tools the site runs: items, the next request, restarts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from inference_site.core.domain.compaction import SUMMARY_HEADING, CompactedContext
from inference_site.core.domain.deltas import (
    CompactionDelta,
    Delta,
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from inference_site.core.domain.request import Compaction, GenerationRequest, Message, Tool
from inference_site.core.domain.site_tools import ToolResult
from inference_site.runs.streams.batches import Sent
from responses_api import site_tools
from responses_api.assembler import ResponseAssembler
from responses_api.events import decode
from responses_api.items import unseal_context
from responses_api.site_tools import Route
from tests.responses_api.deltas import new_assembler, new_response
from tests.tool_loop.counted_tool import NAMES, TYPE, CountedToolType

ROUTES = {name: asdict(Route(TYPE, name)) for name in NAMES}
REQUEST = GenerationRequest(
    "m",
    (Message("user", "Hi"),),
    max_output_tokens=20,
    tools=(*(Tool(name, None, {}) for name in NAMES), Tool("ask", None, {})),
    must_call=True,
)


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the tool registered in this process, for one test."""
    monkeypatch.setattr(site_tools, "_registered", [CountedToolType()])
    site_tools.site_tools.cache_clear()


def assembler(most_calls: int = 5) -> ResponseAssembler:
    """Return the assembler of a response with a counted tool."""
    tools: list[dict[str, Any]] = [{"type": TYPE}]
    return new_assembler(routes=ROUTES, site_tools=tools, most_calls=most_calls, compacts_for=1)


def call(number: int, name: str, *pieces: str) -> list[Delta]:
    """Return the deltas of a call."""
    first = ToolCallDelta(number, "", id=f"call_{number}", name=name)
    return [first, *(ToolCallDelta(number, piece) for piece in pieces)]


def fed(fold: ResponseAssembler, *deltas: Delta) -> list[bytes]:
    """Return the frames of these deltas."""
    return [frame for delta in deltas for frame in fold.feed(delta)]


def types(frames: Sequence[bytes]) -> list[str]:
    """Return the types of events, without their common beginning."""
    return [decode(frame)["type"].removeprefix("response.") for frame in frames]


OPENED = ["output_item.added", "mcp_call.in_progress"]
CALLED = ["mcp_call_arguments.done"]
ENDED = ["mcp_call.completed", "output_item.done"]


def test_items_do_not_overlap_and_what_follows_a_call_waits_for_its_result() -> None:
    fold = assembler()
    fold.begin()
    frames = fed(fold, *call(0, "count", '{"a":', "1}"), *call(1, "again"), TextDelta("Well"))
    delta = "mcp_call_arguments.delta"
    assert types(frames) == [*OPENED, delta, delta, *CALLED]
    assert not fold.calls()  # The turn has not ended.
    assert fed(fold, Finish("tool_calls")) == []
    assert [(c.number, c.name, c.arguments) for c in fold.calls()] == [
        (0, "count", '{"a":1}'),
        (1, "again", ""),
    ]
    assert types(fold.add_result(ToolResult("one"))) == [*ENDED, *OPENED, *CALLED]
    text = ["output_item.added", "content_part.added", "output_text.delta"]
    assert types(fold.add_result(ToolResult("two"))) == [*ENDED, *text]
    assert not fold.calls()
    numbers = [decode(frame)["sequence_number"] for frame in fold.complete().frames[:-1]]
    assert numbers == sorted(numbers)


def test_the_next_request_has_the_turn_and_what_is_left_of_the_tokens() -> None:
    fold = assembler()
    fold.begin()
    fed(fold, ReasoningDelta("Hm."), TextDelta("Wait."), *call(0, "count", '{"a": 1}'))
    fed(fold, Finish("tool_calls"), Usage(3, 0, 8))
    fold.add_result(ToolResult("one"))
    request = fold.next_request(REQUEST)
    assert request is not None
    assert (request.must_call, request.max_output_tokens) == (False, 12)
    assert request.tools == REQUEST.tools
    turn, result = request.messages[1:]
    assert (turn.text, turn.reasoning, turn.tool_calls[0].arguments) == ("Wait.", "Hm.", '{"a": 1}')
    assert (result.role, result.text, result.tool_call_id) == ("tool", "one", "call_0")
    fed(fold, *call(0, "count"), Finish("tool_calls"), Usage(9, 0, 20))
    fold.add_result(ToolResult("two"))
    assert fold.next_request(REQUEST) is None  # All tokens are spent.
    assert b'"reason":"max_output_tokens"' in fold.complete().body


def test_a_call_of_the_client_ends_the_response() -> None:
    fold = assembler()
    fold.begin()
    fed(fold, *call(0, "ask"), *call(1, "count"), Finish("tool_calls"))
    [one] = fold.calls()
    assert one.name == "count"
    fold.add_result(ToolResult("one"))
    assert fold.next_request(REQUEST) is None


def test_above_the_limit_calls_are_ignored_and_the_tools_are_not_offered() -> None:
    fold = assembler(most_calls=1)
    fold.begin()
    fed(fold, *call(0, "count"), *call(1, "count", "{}"), Finish("tool_calls"))
    assert len(fold.calls()) == 1
    fold.add_result(ToolResult("one"))
    request = fold.next_request(REQUEST)
    assert request is not None
    assert [tool.name for tool in request.tools] == ["ask"]
    assert len(request.messages[1].tool_calls) == 1


def test_a_cut_off_call_is_not_run() -> None:
    fold = assembler()
    fold.begin()
    fed(fold, *call(0, "count", '{"a":'), Finish("length"))
    assert not fold.calls()
    ending = json.loads(fold.complete().body)
    assert (ending["status"], ending["output"][0]["status"]) == ("incomplete", "incomplete")


def test_a_restart_keeps_the_items_of_ended_turns_and_announces_their_last_calls_again() -> None:
    fold = assembler()
    sent = list(fold.begin())
    sent += fed(fold, TextDelta("First."), *call(0, "count", "{}"), Finish("tool_calls"))
    sent += fold.add_result(ToolResult("one"))
    fold.next_request(REQUEST)
    sent += fed(fold, TextDelta("Second."), *call(0, "again", "{}"), Finish("tool_calls"))
    saved = json.loads(json.dumps(fold.save()))
    sent += fold.add_result(ToolResult("two"))
    fold.next_request(REQUEST)
    sent += fed(fold, TextDelta("Thi"))

    lost = Sent(next=1_000_000)  # Redis has lost the log.
    # The worker may die before all that it has saved is in the log.
    logs = [Sent(tuple(sent[:end]), end) for end in range(2, len(sent) + 1)]
    for log in (*logs, lost):
        resumed = assembler()
        frames = [*resumed.restart(log, saved), *resumed.begin()]
        assert [(c.number, c.name) for c in resumed.calls()] == [(1, "again")]
        frames += resumed.add_result(ToolResult("two"))
        request = resumed.next_request(REQUEST)
        assert request is not None
        assert [m.role for m in request.messages] == [
            *("user", "assistant", "tool"),
            *("assistant", "tool"),
        ]
        frames += fed(resumed, TextDelta("Third."), Finish("stop"))
        ending = resumed.complete()
        frames += ending.frames
        output = json.loads(ending.body)["output"]
        assert [_text(item) for item in output] == ["First.", "one", "Second.", "two", "Third."]
        assert {item["status"] for item in output} == {"completed"}
        if log is logs[-1]:  # What was sent whole is not sent again.
            assert sum(b'"response.output_item.added"' in frame for frame in frames) == 2
        numbers = [decode(frame)["sequence_number"] for frame in frames[:-1]]
        assert numbers == list(range(log.next, log.next + len(numbers)))
        # Who ends it in place of its worker finds the same items in the log.
        recovered = assembler()
        recovered.recover(Sent((*log.frames, *frames[:-2]), log.next + len(frames) - 2))
        partial = json.loads(recovered.cancel().body)["output"]
        assert [_text(item) for item in partial] == ["First.", "one", "Second.", "two", "Third."]


def test_later_turns_begin_with_what_a_compaction_has_left() -> None:
    compaction = Compaction(1000, 100, instructions=1, leading=1)
    instructions = Message("system", "Be brief.")
    request = replace(REQUEST, messages=(instructions, *REQUEST.messages), compaction=compaction)
    fold = assembler()
    sent = [*fold.begin(), *fed(fold, *call(0, "count", "{}"), Finish("tool_calls"))]
    sent += fold.add_result(ToolResult("one"))
    second = fold.next_request(request)
    assert second is not None
    left = CompactedContext("So far.", newest=second.messages[1:])
    sent += fed(fold, CompactionDelta(left), *call(0, "again", "{}"), Finish("tool_calls"))
    saved = json.loads(json.dumps(fold.save()))
    resumed = assembler()
    resumed.restart(Sent(tuple(sent), len(sent)), saved)
    resumed.begin()
    for each in (fold, resumed):
        each.add_result(ToolResult("two"))
        third = each.next_request(request)
        assert third is not None
        summary = Message("system", f"{SUMMARY_HEADING}So far.")
        assert third.messages[:5] == (instructions, summary, *left.newest)
        assert [m.text for m in third.messages[5:]] == [None, "two"]
        assert third.compaction == replace(compaction, has_summary=True)
        output = json.loads(each.complete().body)["output"]
        assert [item["type"] for item in output] == ["mcp_call", "compaction", "mcp_call"]


def _text(item: dict[str, Any]) -> str:
    if item["type"] == "mcp_call":
        return str(item["output"])
    return "".join(part["text"] for part in item["content"])


def searching(**fields: Any) -> ResponseAssembler:
    """Return the assembler of a response with a search that loads ``look``."""
    deferred = {"type": "function", "name": "look", "parameters": {}, "defer_loading": True}
    search = {
        "type": "hosted_tool_search",
        "names": ["look"],
        "tools": [{"param": "tools[1]", "tool": deferred}],
    }
    return new_assembler(
        new_response(**fields),
        routes={**ROUTES, "tool_search": asdict(Route("hosted_tool_search", "tool_search"))},
        site_tools=[{"type": TYPE}, search],
        most_calls=9,
        compacts_for=1,
    )


SEARCH = [*call(0, "tool_search", '{"paths": ["look"]}'), Finish("tool_calls")]


def test_a_search_of_tools_is_not_the_call_that_is_required() -> None:
    found = ToolResult("Loaded", {"names": ["look"]})
    chosen = searching(tool_choice={"type": "tool_search"})
    chosen.begin()
    fed(chosen, *SEARCH)
    chosen.add_result(found)
    request = chosen.next_request(REQUEST)
    assert request is not None
    assert not request.must_call
    fold = searching(tool_choice="required")
    sent = [*fold.begin(), *fed(fold, *SEARCH)]
    saved, resumed = json.loads(json.dumps(fold.save())), searching(tool_choice="required")
    resumed.restart(Sent(tuple(sent), len(sent)), saved)
    resumed.begin()
    for each in (fold, resumed):
        each.add_result(found)
        request = each.next_request(REQUEST)
        assert request is not None
        assert request.must_call
        fed(each, *call(0, "count"), Finish("tool_calls"))
        each.add_result(ToolResult("one"))
        request = each.next_request(REQUEST)
        assert request is not None
        assert not request.must_call


def test_a_restart_keeps_the_tools_that_a_search_has_loaded() -> None:
    fold = searching()
    sent = [*fold.begin()]
    sent += fed(fold, *SEARCH)
    sent += fold.add_result(ToolResult("Loaded", {"names": ["look"]}))
    request = fold.next_request(REQUEST)
    assert request is not None
    assert request.tools == (*REQUEST.tools, Tool("look", None, {}))
    sent += fed(fold, *call(0, "count"), Finish("tool_calls"))
    saved = json.loads(json.dumps(fold.save()))
    fold.add_result(ToolResult("one"))

    resumed = searching()
    resumed.restart(Sent(tuple(sent), len(sent)), saved)
    resumed.begin()
    resumed.add_result(ToolResult("one"))
    again = resumed.next_request(REQUEST)
    assert again is not None
    assert again.tools == request.tools
    fed(resumed, *call(0, "look", "{}"), Finish("tool_calls"))
    output = json.loads(resumed.complete().body)["output"]
    assert [item["type"] for item in output] == [
        *("tool_search_call", "tool_search_output"),
        *("mcp_call", "function_call"),
    ]
    assert output[-1]["namespace"] == "look"

    fed(fold, CompactionDelta(CompactedContext("So far.")))
    *_, found, compaction = json.loads(fold.cancel().body)["output"]
    assert (found["type"], compaction["type"]) == ("mcp_call", "compaction")
    sealed = unseal_context(compaction["encrypted_content"], 1, "input")
    assert [item["type"] for item in sealed.items] == ["tool_search_output"]
