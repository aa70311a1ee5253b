"""The tool ``file_search`` in responses, through the official client: items, events, citations."""

from __future__ import annotations

import json
from typing import Any

import openai
import orjson
import pytest

from inference_site.vector_stores.search import Found, Ranking
from tests.vector_stores.conftest import FJORDS, INVOICES, TEA, ReadingSite
from tests.web_search.played import calls, says
from worker.tools.base import CallContext
from worker.tools.file_search import FileSearch

QUESTION = "How long is the longest fjord of Norway?"


def ask(site: ReadingSite, store: Any, *answers: Any, **fields: Any) -> Any:
    site.model.asked.clear()
    site.model.answers = list(answers)
    tool: Any = {"type": "file_search", "vector_store_ids": [store.id], **fields.pop("tool", {})}
    return site.client.responses.create(model="reader", input=QUESTION, tools=[tool], **fields)


def results(site: ReadingSite) -> list[str]:
    """What the model was given as the results of its calls."""
    messages = site.model.asked[-1].body["messages"]
    return [message["content"] for message in messages if message["role"] == "tool"]


def look_for(query: str) -> Any:
    return "file_search", {"query": query}


def test_answer_cites_the_files_that_were_found(site: ReadingSite) -> None:
    with site.stack.checked():
        store = site.store(fjords_txt=FJORDS, tea_txt=TEA)
        made = ask(
            site, store, calls(look_for("Sognefjord")), says("It is 205 km long [1]."),
            include=["file_search_call.results"], tool={"ranking_options": {"ranker": "auto"}},
        )  # fmt: skip
        call, message = made.output
        assert (call.type, call.status, call.queries) == (
            "file_search_call",
            "completed",
            ["Sognefjord"],
        )
        assert call.results[0].filename == "fjords.txt"
        assert call.results[0].text == FJORDS
        [annotation] = message.content[0].annotations
        assert annotation.to_dict() == {
            "type": "file_citation",
            "index": 18,
            "file_id": call.results[0].file_id,
            "filename": "fjords.txt",
        }
        [shown] = results(site)
        assert f"[1] fjords.txt\n{FJORDS}" in shown
        assert site.client.responses.retrieve(made.id).to_dict() == made.to_dict()
        [offered] = site.model.asked[0].body["tools"]
        assert offered["function"]["name"] == "file_search"
        assert "(library)" in offered["function"]["description"]


def test_stream_has_the_events_of_the_search(site: ReadingSite) -> None:
    with site.stack.checked():
        store = site.store(fjords_txt=FJORDS)
        events = [
            event.to_dict()
            for event in ask(
                site, store, calls(look_for("fjord"), look_for("tea")), says("See [1]."),
                stream=True,
            )
        ]  # fmt: skip
        of_search = [e["type"] for e in events if "file_search" in e["type"]]
        assert of_search == [
            f"response.file_search_call.{state}"
            for state in ("in_progress", "searching", "completed") * 2
        ]
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        [added] = [e for e in events if e["type"] == "response.output_text.annotation.added"]
        assert added["annotation"]["type"] == "file_citation"
        final = events[-1]["response"]
        assert [item["type"] for item in final["output"]] == [
            "file_search_call", "file_search_call", "message",
        ]  # fmt: skip
        assert final["output"][0]["results"] is None
        replayed = site.client.responses.retrieve(final["id"], stream=True)
        assert [event.to_dict() for event in replayed] == events


def test_only_files_that_the_filter_lets_through_are_found(site: ReadingSite) -> None:
    store = site.store(bills_txt=INVOICES, tea_txt=TEA)
    files = site.client.vector_stores.files
    for entry in files.list(store.id).data:
        name = site.client.files.retrieve(entry.id).filename
        files.update(entry.id, vector_store_id=store.id, attributes={"name": name})
    tool: Any = {"filters": {"type": "eq", "key": "name", "value": "tea.txt"}}
    made = ask(site, store, calls(look_for("invoice QX-77")), says("None."), tool=tool)
    assert made.output[0].status == "completed"
    [shown] = results(site)
    assert TEA in shown
    assert INVOICES not in shown


def test_background_response_and_the_next_turn_know_the_search(site: ReadingSite) -> None:
    store = site.store(fjords_txt=FJORDS)
    made = ask(site, store, calls(look_for("fjord")), says("205 km [1]."))
    site.model.answers = [says("Yes.")]
    site.client.responses.create(
        model="reader", input="Sure?", previous_response_id=made.id, store=False
    )
    messages = site.model.asked[-1].body["messages"]
    [call] = [m["tool_calls"][0] for m in messages if m.get("tool_calls")]
    assert json.loads(call["function"]["arguments"]) == {"queries": ["fjord"]}


def test_store_without_files_finds_nothing(site: ReadingSite) -> None:
    store = site.client.vector_stores.create()
    made = ask(site, store, calls(look_for("fjord")), says("I do not know."))
    assert made.output[0].status == "completed"
    assert results(site) == ["The search has found nothing."]


def test_store_that_was_deleted_meanwhile_finds_nothing(site: ReadingSite) -> None:
    store = site.store(fjords_txt=FJORDS)
    made = ask(site, store, calls(("file_search", {"query": 7})), says("Hm."))
    assert made.output[0].status == "failed"
    assert made.output[0].queries == []


def test_what_cannot_be_searched_is_refused(site: ReadingSite) -> None:
    store = site.client.vector_stores.create()
    for tools, param in (
        ([{"type": "file_search"}], "tools[0].vector_store_ids"),
        ([{"type": "file_search", "vector_store_ids": ["vs_none"]}], "tools[0].vector_store_ids"),
        ([{"type": "file_search", "vector_store_ids": [store.id], "max_num_results": 0}],
         "tools[0].max_num_results"),
        ([{"type": "file_search", "vector_store_ids": [store.id]}] * 2, "tools[1]"),
    ):  # fmt: skip
        request: Any = {"model": "reader", "input": "x", "tools": tools}
        with pytest.raises(openai.BadRequestError) as refused:
            site.client.responses.create(**request)
        assert (refused.value.param or "").startswith(param), refused.value


@pytest.mark.parametrize("shows_results", [True, False])
def test_results_with_large_attributes_are_as_many_as_there_is_room_for(
    shows_results: bool,
) -> None:
    attributes = {f"key{number}": "é" * 512 for number in range(16)}
    found = [Found(f"file-{n}", "a.txt", attributes, FJORDS, 1.0) for n in range(50)]
    tool = FileSearch([1], 50, None, Ranking(), shows_results)
    context = CallContext("k", "g", 1, 1.0, 262_144, lambda: False)
    made = tool._shown(found, context.max_bytes, context)
    count = 31 if shows_results else 50
    assert (len(made.sources), made.output.count(FJORDS)) == (count, count)
    assert len(orjson.dumps(made.fields)) <= 2 * context.max_bytes
