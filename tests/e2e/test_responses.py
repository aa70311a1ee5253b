"""Responses through the official client: made whole or streamed, and read again."""

from __future__ import annotations

import re
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.e2e.scripts import events, respond, script, stream_raw, types

CAPITAL = "What is the capital of Japan?"


class Answer(pydantic.BaseModel):
    """What the model is to answer with."""

    city: str
    is_capital: bool


def test_text_is_answered(client: openai.OpenAI) -> None:
    response = client.responses.create(model="demo", input=CAPITAL, temperature=0)
    assert "Tokyo" in response.output_text
    assert response.status == "completed"
    assert response.completed_at is not None
    assert response.completed_at >= response.created_at
    [message] = (item.to_dict() for item in response.output)
    assert re.fullmatch(r"resp_[0-9a-f]{32}", response.id)
    assert re.fullmatch(r"msg_[0-9a-f]{32}", str(message["id"]))
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["status"] == "completed"
    usage = response.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens > 0 < usage.output_tokens


def test_items_are_answered(client: openai.OpenAI) -> None:
    parts = [{"type": "input_text", "text": CAPITAL}]
    items: Any = [{"type": "message", "role": "user", "content": parts}]
    response = client.responses.create(model="demo", temperature=0, input=items)
    assert "Tokyo" in response.output_text


def test_every_field_is_shown_and_read_again_as_it_was(http: httpx.Client) -> None:
    given: dict[str, Any] = {
        "instructions": "Be x",
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "key",
        "reasoning": {"effort": None, "summary": "auto"},
        "safety_identifier": "ann",
        "service_tier": "flex",
        "temperature": 0,
        "top_p": 0.5,
        "truncation": "auto",
        "tools": [
            {
                "type": "function",
                "name": "f",
                "parameters": {"type": "object", "default": None, "x": [None, 1]},
                "description": None,
                "strict": False,
            },
            {"type": "custom", "name": "g", "description": "d"},
            {"type": "web_search", "user_location": None, "filters": {"a": None}},
        ],
        "tool_choice": "auto",
        "user": "bob",
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "store": True,
    }
    made = http.post("/v1/responses", json={"model": "scripted", "input": "hi", **given}).json()
    for name, value in given.items():
        if name != "tools":
            assert made[name] == value, name
    assert made["tools"][0] == given["tools"][0]
    assert made["tools"][1] == {**given["tools"][1], "format": {"type": "text"}}
    assert made["tools"][2] == given["tools"][2]
    assert http.get(f"/v1/responses/{made['id']}").json() == made


def test_defaults_are_shown(client: openai.OpenAI, http: httpx.Client) -> None:
    body = {"model": "scripted", "input": "hi"}
    made = http.post("/v1/responses", json=body).json()
    defaults: dict[str, Any] = {
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
    }
    for name, value in defaults.items():
        assert made[name] == value, name
    assert "conversation" not in made
    assert "user" not in made
    assert http.get(f"/v1/responses/{made['id']}").json() == made


def test_stream_is_the_whole_in_pieces(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "input": CAPITAL, "temperature": 0, "metadata": {"a": "b"}}
    seen: list[Any] = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    last = seen[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == text
    shown = [event.response for event in seen if hasattr(event, "response")]
    assert {response.id for response in shown} == {last.response.id}
    assert [response.metadata for response in shown] == [{"a": "b"}] * 3
    assert {e.item_id for e in seen if hasattr(e, "item_id")} == {last.response.output[0].id}
    assert client.responses.retrieve(last.response.id) == last.response
    whole = client.responses.create(model="demo", input=CAPITAL, temperature=0)
    assert whole.output_text == text


def test_events_of_a_text_come_in_the_published_order(http: httpx.Client) -> None:
    raw = stream_raw(http, input=script({"text": "a"}, {"text": "b"}))
    assert types(raw) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert raw[-1] == "data: [DONE]"
    assert not any(line.startswith("id:") for frame in raw for line in frame.split("\n"))


def test_answer_without_words_has_an_empty_message(http: httpx.Client) -> None:
    raw = stream_raw(http, input=script({"sleep_ms": 1}))
    assert "output_text.delta" not in types(raw)
    [message] = events(raw)[-1]["response"]["output"]
    assert message["content"][0]["text"] == ""


def test_stream_helper_accumulates(client: openai.OpenAI) -> None:
    with client.responses.stream(model="demo", input=CAPITAL, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.output_text.delta" in kinds
    assert "Tokyo" in final.output_text


def test_parse_gives_a_model(client: openai.OpenAI) -> None:
    response = client.responses.parse(
        model="demo",
        input="The city is Oslo.",
        text_format=Answer,
        max_output_tokens=200,
        temperature=0,
    )
    assert isinstance(response.output_parsed, Answer)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"


def test_streamed_parse_gives_a_model(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="demo", input="Oslo", text_format=Answer, max_output_tokens=200, temperature=0
    ) as stream:
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Answer)


def test_length_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="demo", input="Tell me a story.", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.completed_at is None
    assert response.output[-1].to_dict()["status"] == "incomplete"
    assert response.usage is not None
    assert response.usage.output_tokens == 3
    assert client.responses.retrieve(response.id) == response


def test_names_of_chats_are_honoured(http: httpx.Client) -> None:
    def made(**fields: Any) -> dict[str, Any]:
        answer = http.post("/v1/responses", json={"input": "x", "temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        assert "x-unsupported-params" not in answer.headers
        found: dict[str, Any] = http.get(f"/v1/responses/{answer.json()['id']}").json()
        assert found == answer.json()
        return found

    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 7}}}
    short = made(model="demo", max_tokens=3, logprobs=True, truncate_sequence=True, n_choices=1)
    assert (short["status"], short["usage"]["output_tokens"]) == ("incomplete", 3)
    assert (short["max_output_tokens"], short["truncation"]) == (3, "auto")
    assert len(short["output"][0]["content"][0]["logprobs"]) == 3
    formatted = made(model="demo", response_format=schema, reasoning_effort="none")
    assert formatted["output"][0]["content"][0]["text"] == "7"
    assert formatted["text"]["format"]["schema"] == {"const": 7}
    assert formatted["reasoning"]["effort"] == "none"


def test_streamed_length_ends_with_incomplete(client: openai.OpenAI) -> None:
    *_, last = respond(
        client, {"text": "a "}, {"text": "b "}, {"text": "c"}, max_output_tokens=2, stream=True
    )
    assert last.type == "response.incomplete"
    assert last.response.output_text == "a b "


def test_samplers_of_chat_reach_the_model(http: httpx.Client) -> None:
    def told(**fields: Any) -> str:
        body = {"model": "demo", "input": "Tell me a story.", "max_output_tokens": 20, **fields}
        text: str = http.post("/v1/responses", json=body).json()["output"][0]["content"][0]["text"]
        return text

    greedy, hot = told(temperature=0), {"temperature": 1.9}
    for field in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        assert {told(**hot, **field, seed=seed) for seed in range(2)} == {greedy}, field
    assert told(temperature=0, presence_penalty=2, frequency_penalty=2) != greedy
    assert told(temperature=0, repetition_penalty=1.8) != greedy


@pytest.mark.parametrize("model", ["demo", "scripted"])
def test_samplers_of_chat_are_honoured(http: httpx.Client, model: str) -> None:
    body = {
        "model": model,
        "input": CAPITAL,
        "max_output_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 10,
        "min_p": 0.05,
        "typical_p": 1.0,
        "seed": 7,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "repetition_penalty": 1.1,
        "dry_multiplier": 0.5,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_sequence_breakers": ["."],
        "xtc_probability": 0.1,
        "xtc_threshold": 0.1,
        "mirostat": 0,
        "ignore_eos": True,
    }
    answers = [http.post("/v1/responses", json=body) for _ in range(2)]
    assert answers[0].status_code == 200, answers[0].text
    assert "x-unsupported-params" not in answers[0].headers
    texts = [answer.json()["output"][0]["content"][0]["text"] for answer in answers]
    assert texts[0] == texts[1]


def test_greedy_sampling_gives_what_chat_gives(client: openai.OpenAI) -> None:
    made = client.responses.create(model="demo", input=CAPITAL, temperature=0)
    chat = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": CAPITAL}], temperature=0
    )
    assert made.output_text == chat.choices[0].message.content


def test_stop_texts_and_grammars_are_honoured(client: openai.OpenAI) -> None:
    made = client.responses.create(model="scripted", input="a b c d", extra_body={"stop": [" c"]})
    assert (made.output_text, made.status) == ("a b", "completed")
    grammar = {"grammar": {"type": "regex", "value": "[0-9]{3}"}}
    made = client.responses.create(model="demo", input="x", temperature=0, extra_body=grammar)
    assert made.output_text.isdecimal()
    assert len(made.output_text) == 3
    any_json = client.responses.create(
        model="demo",
        input="x",
        text={"format": {"type": "json_object"}},
        max_output_tokens=200,
        temperature=0,
    )
    assert any_json.output_text.startswith("{")


def test_unknown_fields_are_named(http: httpx.Client) -> None:
    body = {"model": "scripted", "input": "hi", "frobnicate": 1, "image": {"x": 1}}
    response = http.post("/v1/responses", json=body)
    assert response.status_code == 200
    assert set(response.headers["x-unsupported-params"].split(",")) == {"frobnicate", "image"}


def test_nulls_are_as_if_they_were_left_out(http: httpx.Client) -> None:
    names = [
        *("instructions", "tools", "tool_choice", "text", "reasoning", "include", "metadata"),
        *("store", "background", "previous_response_id", "conversation", "truncation", "user"),
    ]
    body = {"model": "scripted", "input": "hi", **dict.fromkeys(names)}
    response = http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert "x-unsupported-params" not in response.headers


def test_character_that_the_database_cannot_hold_is_kept_as_another(
    client: openai.OpenAI,
) -> None:
    response = client.responses.create(
        model="scripted", input="a\0b", instructions="\0", metadata={"k": "\0"}
    )
    assert response.output_text == "a\0b"
    kept = client.responses.retrieve(response.id)
    assert kept.output_text == "a\ufffdb"
    [item] = client.responses.input_items.list(response.id)
    assert item.to_dict()["content"] == [{"type": "input_text", "text": "a\ufffdb"}]


def test_headers_are_those_of_every_endpoint(http: httpx.Client) -> None:
    body = {"model": "scripted", "input": "hi"}
    response = http.post("/v1/responses", json=body, headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["openai-version"]
    assert int(response.headers["openai-processing-ms"]) >= 0
    with http.stream("POST", "/v1/responses", json={**body, "stream": True}) as stream:
        assert stream.headers["cache-control"] == "no-cache"
        assert stream.headers["x-accel-buffering"] == "no"
        assert stream.headers["x-request-id"].startswith("req_")
        stream.read()


def test_methods_that_are_not_there_are_405(http: httpx.Client) -> None:
    response = http.put("/v1/responses", json={})
    assert response.status_code == 405
    assert response.headers["allow"]
