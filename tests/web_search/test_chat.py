"""``web_search_options`` of chat completions, through the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.upstream_server import chunks, delta, finish, text, usage
from tests.web_search.conftest import SearchingSite
from tests.web_search.played import calls, open_page, says, search
from tests.web_search.web import FJORDS, Web

ASK: Any = [{"role": "user", "content": "How long is the longest fjord?"}]
PLACE: Any = {"type": "approximate", "approximate": {"city": "Oslo", "country": "NO"}}
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_answer_is_one_message_with_its_citations(site: SearchingSite, web: Web) -> None:
    url = web.page("/fjords", "Fjords")
    site.model.answers = [calls(search("fjord"), said="Let me see. "), calls(open_page(url)),
                          says("204 km ", "[1].")]  # fmt: skip
    made = site.client.chat.completions.create(
        model="searcher", messages=ASK, store=True,
        web_search_options={"search_context_size": "low", "user_location": PLACE},
    )  # fmt: skip
    choice = made.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", "Let me see. 204 km [1].")
    assert choice.message.tool_calls is None
    [annotation] = choice.message.annotations or []
    cited = annotation.url_citation
    assert (cited.url, cited.title, cited.start_index, cited.end_index) == (url, "Fjords", 19, 22)
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (40, 17)
    searched, opened = site.tool_outputs()
    assert "A quote." in searched
    assert FJORDS in opened
    offered = site.model.asked[0].body["tools"]
    assert [tool["function"]["name"] for tool in offered] == ["web_search", "open_page"]
    assert "The user is in Oslo, NO." in offered[0]["function"]["description"]
    stored = site.client.chat.completions.retrieve(made.id)
    assert stored.choices[0].message.annotations == choice.message.annotations


def test_stream_shows_the_text_and_then_the_citations(site: SearchingSite, web: Web) -> None:
    url = web.page("/fjords", "Fjords")
    site.model.answers = [calls(search("fjord")), says(f"See {url}", " or [1]")]
    stream = site.client.chat.completions.create(
        model="searcher", messages=ASK, web_search_options={}, stream=True
    )
    deltas = [chunk.choices[0].delta.to_dict() for chunk in stream]
    assert [sorted(delta) for delta in deltas] == [
        ["content", "refusal", "role"], ["content"], ["content"], ["annotations"], []
    ]  # fmt: skip
    spans = [a["url_citation"]["start_index"] for a in deltas[3]["annotations"]]  # type: ignore[attr-defined]
    assert spans == [4, len(f"See {url} or ")]


def test_call_of_the_clients_function_ends_the_answer(site: SearchingSite, web: Web) -> None:
    site.model.answers = [calls(search("a")), calls(search("b"), ("look", {"at": 1})), says("no")]
    web.page("/fjords", "Fjords")
    stream = site.client.chat.completions.create(
        model="searcher", messages=ASK, tools=[LOOK], web_search_options={}, stream=True
    )
    choices = [chunk.choices[0] for chunk in stream]
    called = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert {call.index for call in called} == {0}
    assert [call.function.name for call in called if call.function and call.function.name] == [
        "look"
    ]
    assert choices[-1].finish_reason == "tool_calls"
    assert [query["q"] for query in web.queries] == ["a"]


def test_tokens_are_those_of_all_turns(site: SearchingSite, web: Web) -> None:
    web.page("/fjords", "Fjords")
    site.model.answers = [calls(search("a")), says("cut")]
    made = site.client.chat.completions.create(
        model="searcher", messages=ASK, web_search_options={}, max_completion_tokens=12
    )
    assert made.choices[0].message.content == "cut"
    assert site.model.body["max_tokens"] == 7
    site.model.answers = [calls(search("a")), says("never")]
    made = site.client.chat.completions.create(
        model="searcher", messages=ASK, web_search_options={}, max_completion_tokens=5
    )
    assert (made.choices[0].finish_reason, made.choices[0].message.content) == ("length", "")


@pytest.mark.parametrize("reason", ["length", "content_filter"])
def test_searches_of_a_turn_that_is_cut_off_are_not_made(
    site: SearchingSite, web: Web, reason: str
) -> None:
    made_calls = [
        {"index": index, "id": f"call_{index}", "type": "function",
         "function": {"name": "web_search", "arguments": arguments}}
        for index, arguments in enumerate(('{"query": "a"}', '{"query": "b'))
    ]  # fmt: skip
    cut = chunks(text("Hm"), delta({"tool_calls": made_calls}), finish(reason), usage(10, 5))
    site.model.answers = [cut, says("never")]
    made = site.client.chat.completions.create(
        model="searcher", messages=ASK, web_search_options={}
    )
    assert (made.choices[0].finish_reason, made.choices[0].message.content) == (reason, "Hm")
    assert web.queries == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2, "web_search_options": {}}, "n"),
        ({"web_search_options": {"search_context_size": "x"}},
         "web_search_options.search_context_size"),
        ({"web_search_options": {"user_location": {"approximate": {"country": "NOR"}}}},
         "web_search_options.user_location.approximate.country"),
        ({"web_search_options": {}, "tools": [{"type": "function", "function": {
            "name": "open_page", "parameters": {"type": "object"}}}]}, "tools[0]"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(site: SearchingSite, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        site.client.chat.completions.create(model="searcher", messages=ASK, **fields)
    assert caught.value.param == param


def test_forced_call_is_not_searched_for(site: SearchingSite) -> None:
    site.model.answers = [calls(("look", {}))]
    raw = site.client.chat.completions.with_raw_response.create(
        model="searcher", messages=ASK, tools=[LOOK], tool_choice="required", web_search_options={}
    )
    assert raw.headers["x-unsupported-params"] == "web_search_options"
    assert len(site.model.body["tools"]) == 1
