"""Anthropic's Messages API, through Anthropic's own client."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.e2e.keys import make_key
from tests.e2e.scripts import ENDLESS, call, frames, script
from tests.e2e.test_files import pdf
from tests.e2e.test_queue import all_slots_held
from tests.image_server import ImageServer
from tests.images import PNG, encoded
from tests.served_stack import ServedStack, wait_until
from tests.upstream_server import Talk, UpstreamServer, chunks, delta, finish, streamed, text

HELLO: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}},
        "required": ["city"],
        "$defs": {"city": {"type": "string", "maxLength": 20}},
    },
}
GREEDY: dict[str, Any] = {"model": "demo", "max_tokens": 80, "temperature": 0}
PING = 'event: ping\ndata: {"type": "ping"}'
DEMO: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 80,
    "extra_body": {"temperature": 0},  # The client of today has no argument for it.
}


@pytest.fixture(scope="module")
def claude(stack: ServedStack) -> Iterator[anthropic.Anthropic]:
    """The official client, which sends its key as ``x-api-key``."""
    with anthropic.Anthropic(base_url=stack.url, api_key=stack.key, max_retries=0) as opened:
        yield opened


def play(claude: anthropic.Anthropic, *steps: dict[str, Any], **fields: Any) -> Any:
    """What the scripted model answers when it plays these steps."""
    said = [{"role": "user", "content": script(*steps)}]
    return claude.messages.create(
        **{"model": "scripted", "max_tokens": 1000, "messages": said, **fields}
    )


def test_a_message_is_answered_whole_and_in_a_stream(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(**DEMO, messages=HELLO, system="Be brief.")
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "demo")
    assert whole.id.startswith("msg_")
    [block] = whole.content
    assert block.type == "text"
    assert "Paris" in block.text
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    assert whole.usage.output_tokens > 3
    with claude.messages.stream(**DEMO, messages=HELLO, system="Be brief.") as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [getattr(b, "text", "") for b in streamed.content] == [block.text]
    assert streamed.stop_reason == "end_turn"
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    read = streamed.usage.cache_read_input_tokens or 0
    assert read > 0  # The second prompt is the first one.
    assert streamed.usage.input_tokens + read == whole.usage.input_tokens + (
        whole.usage.cache_read_input_tokens or 0
    )
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"


def test_events_have_names_and_come_in_anthropics_order(http: httpx.Client) -> None:
    steps = script(
        {"reasoning": "Hm."}, {"text": "So "}, {"text": "be it."}, call("f", '{"a"', ":1}")
    )
    body = {
        "model": "scripted",
        "max_tokens": 99,
        "stream": True,
        "tools": [{**WEATHER, "name": "f"}],
    }
    asked = {**body, "messages": [{"role": "user", "content": steps}]}
    with http.stream("POST", "/v1/messages?beta=true", json=asked) as answer:
        sent = frames(answer)
    start = next(n for n, frame in enumerate(sent) if frame != PING)
    assert sent[start + 1] == PING
    pairs = [frame.split("\n") for frame in sent if frame != PING]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name.removeprefix("event: ") for name, _ in pairs] == [e["type"] for e in events]
    told = [(e["type"], e.get("index")) for e in events]
    assert told == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),  # The signature.
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("message_delta", None),
        ("message_stop", None),
    ]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert events[9]["content_block"]["input"] == {}
    assert "".join(e["delta"].get("partial_json", "") for e in events[10:12]) == '{"a":1}'
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 0


def paused(**fields: Any) -> dict[str, Any]:
    """A streamed message with a pause before its first event, and one between two words."""
    pause = {"sleep_ms": 1500}
    steps = script(pause, {"text": "late"}, pause, {"text": " words"})
    asked = {"model": "scripted", "max_tokens": 99, "stream": True, **fields}
    return {**asked, "messages": [{"role": "user", "content": steps}]}


def test_pauses_are_bridged_by_pings_which_the_client_takes(
    claude: anthropic.Anthropic, http: httpx.Client
) -> None:
    with http.stream("POST", "/v1/messages", json=paused()) as answer:
        sent = "".join(answer.iter_text()).split("\n\n")[:-1]
    start = next(n for n, frame in enumerate(sent) if frame.startswith("event: message_start"))
    assert sent[:start].count(PING) == start >= 2
    first, last = [n for n, frame in enumerate(sent) if "text_delta" in frame]
    between = sent[first + 1 : last]
    assert between.count(PING) == len(between) >= 2
    asked = {name: value for name, value in paused().items() if name != "stream"}
    with claude.messages.stream(**asked) as stream:
        types = [event.type for event in stream]
        message = stream.get_final_message()
    assert (types[0], types[-1]) == ("message_start", "message_stop")
    assert [getattr(block, "text", "") for block in message.content] == ["late words"]


def test_a_message_that_waits_in_the_queue_has_pings(
    stack: ServedStack, http: httpx.Client
) -> None:
    with ExitStack() as held:
        held.enter_context(all_slots_held(stack, make_key(stack)))
        with http.stream("POST", "/v1/messages", json=paused()) as answer:
            lines = answer.iter_lines()
            assert [next(lines) for _ in range(6)] == [*PING.split("\n"), ""] * 2
            held.close()
            events = [line for line in lines if line.startswith("event: ")]
    assert next(event for event in events if event != "event: ping") == "event: message_start"
    assert events[-1] == "event: message_stop"


def test_a_message_that_is_sent_again_has_the_same_events(http: httpx.Client) -> None:
    headers = {"Idempotency-Key": "pauses"}
    streams = list[list[str]]()
    for _ in range(2):
        asked = http.stream("POST", "/v1/messages", json=paused(), headers=headers)
        with asked as answer:
            streams.append(frames(answer))
    first, again = ([frame for frame in sent if frame != PING] for sent in streams)
    assert first == again
    assert first[-1].startswith("event: message_stop")


def test_a_failure_after_a_ping_is_an_event(claude: anthropic.Anthropic) -> None:
    steps: list[dict[str, Any]] = [{"sleep_ms": 1500}, {"fail": "boom"}]
    with pytest.raises(anthropic.APIStatusError, match="boom") as caught:
        list(play(claude, *steps, stream=True))
    assert caught.value.response.status_code == 200


def test_a_tool_is_called_and_its_result_is_read(claude: anthropic.Anthropic) -> None:
    question: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    tools: list[Any] = [WEATHER]
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        forced: Any = choice
        called = claude.messages.create(**DEMO, messages=question, tools=tools, tool_choice=forced)
        assert called.stop_reason == "tool_use"
    [use] = called.content
    assert use.type == "tool_use"
    assert use.input == {"city": "Oslo"}
    history = [
        *question,
        {"role": "assistant", "content": [use.to_dict()]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": use.id,
                    "content": [{"type": "text", "text": "Sunny, 21 degrees"}],
                    "is_error": False,
                },
                {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    answer = claude.messages.create(**DEMO, messages=history, tools=tools)
    assert answer.content[0].type == "text"
    assert answer.content[0].text
    counted = claude.messages.count_tokens(model="demo", messages=history, tools=tools)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_calls_whose_arguments_come_in_turns_stay_apart_in_each_api(
    claude: anthropic.Anthropic, client: openai.OpenAI, odd: UpstreamServer
) -> None:
    def piece(number: int, arguments: str, **named: str) -> dict[str, Any]:
        function = {"arguments": arguments, **({"name": "get_weather"} if named else {})}
        return delta({"tool_calls": [{"index": number, "function": function, **named}]})

    first, second = (piece(number, "", id=f"call_{number}") for number in (0, 1))
    in_turns = [first, second, piece(1, '{"city": '), piece(0, "{}"), piece(1, '"Oslo"}')]
    none_then_text = [first, second, piece(1, '{"city": "Oslo"}'), text("Wait.")]
    asked: Any = {"model": "odd", "max_tokens": 50, "messages": HELLO, "tools": [WEATHER]}
    function = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
    for sent in (in_turns, none_then_text):
        odd.answers = [chunks(*sent, finish("tool_calls"))]
        with claude.messages.stream(**asked) as stream:
            blocks = stream.get_final_message().content
        assert [b.input for b in blocks if b.type == "tool_use"] == [{}, {"city": "Oslo"}]
        given: Any = client.responses.create(model="odd", input="Hello", tools=[function])  # type: ignore[list-item]
        calls = [item for item in given.output if item.type == "function_call"]
        assert [json.loads(item.arguments) for item in calls] == [{}, {"city": "Oslo"}]


def test_many_tools_and_long_names_are_taken(claude: anthropic.Anthropic) -> None:
    question: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    name = "get_weather_" + "x" * 116
    tools: list[Any] = [{**WEATHER, "name": f"tool_{number}"} for number in range(1023)]
    asked: Any = {**DEMO, "max_tokens": 300, "messages": question}
    asked["tools"] = [*tools, {**WEATHER, "name": name}]
    asked["tool_choice"] = {"type": "tool", "name": name}
    [use] = claude.messages.create(**asked).content
    assert (use.type, use.name, set(use.input)) == ("tool_use", name, {"city"})
    events = list(claude.messages.create(**asked, stream=True))
    [begun] = [event.content_block for event in events if event.type == "content_block_start"]
    assert begun.name == name
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny"}
    asked["messages"] += [
        {"role": "assistant", "content": [use.to_dict()]},
        {"role": "user", "content": [result]},
    ]
    assert claude.messages.create(**asked).stop_reason == "tool_use"
    for refused in (
        {"tools": [*asked["tools"], WEATHER]},
        {"tools": [{**WEATHER, "name": f"{name}x"}]},
    ):
        with pytest.raises(anthropic.BadRequestError, match="tools"):
            claude.messages.create(**{**asked, **refused})


def test_thoughts_are_signed_and_only_the_signed_are_taken_back(
    claude: anthropic.Anthropic, stack: ServedStack
) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    answer = claude.messages.create(**DEMO, messages=HELLO, thinking=thinking)
    thought, said = answer.content
    assert thought.type == "thinking"
    assert thought.signature
    assert said.type == "text"
    turns = [*HELLO, {"role": "assistant", "content": [b.to_dict() for b in answer.content]}]
    more = [*turns, {"role": "user", "content": "And of Japan?"}]
    assert claude.messages.create(**DEMO, messages=more, thinking=thinking).content
    forged = json.loads(json.dumps(more))
    forged[1]["content"][0]["thinking"] += "!"
    with pytest.raises(anthropic.BadRequestError, match="signature"):
        claude.messages.create(**DEMO, messages=forged, thinking=thinking)
    key = make_key(stack).secret
    with (
        anthropic.Anthropic(base_url=stack.url, api_key=key) as other,
        pytest.raises(anthropic.BadRequestError, match="signature"),
    ):
        other.messages.create(**DEMO, messages=more, thinking=thinking)


def test_thoughts_that_are_left_out_come_back_in_their_signature(
    claude: anthropic.Anthropic,
) -> None:
    steps = [{"reasoning": "Oslo is "}, {"reasoning": "in Norway."}]
    steps.append(call("get_weather", '{"city": "Oslo"}'))
    tools: list[Any] = [WEATHER]
    omitted: Any = {"tools": tools, "thinking": {"type": "adaptive", "display": "omitted"}}
    shown = play(claude, *steps, tools=tools).content
    hidden = play(claude, *steps, **omitted).content
    assert (shown[0].thinking, hidden[0].thinking) == ("Oslo is in Norway.", "")
    updates: Any = {"type": "adaptive", "display": "updates"}
    assert play(claude, *steps, tools=tools, thinking=updates).content[0].thinking
    assert "Norway" not in hidden[0].signature
    events = list(play(claude, *steps, **omitted, stream=True))
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas == ["signature_delta", "input_json_delta"]

    def tokens(blocks: list[Any]) -> int:
        result = {"type": "tool_result", "tool_use_id": blocks[-1].id, "content": "Sunny"}
        turns: list[Any] = [
            *HELLO,
            {"role": "assistant", "content": [block.to_dict() for block in blocks]},
            {"role": "user", "content": [result]},
        ]
        count = claude.messages.count_tokens(model="demo", messages=turns, tools=tools)
        return count.input_tokens

    assert tokens(hidden) == tokens(shown) > tokens(shown[1:])
    hidden[0].signature = shown[0].signature
    with pytest.raises(anthropic.BadRequestError, match="signature"):
        tokens(hidden)


def test_a_model_does_not_think_unless_it_is_asked(claude: anthropic.Anthropic) -> None:
    for kind in (None, "disabled", "between_tools"):
        fields = {} if kind is None else {"thinking": {"type": kind}}
        answer = claude.messages.create(**DEMO, messages=HELLO, **fields)  # type: ignore[call-overload]  # Both are given.
        assert [block.type for block in answer.content] == ["text"]
    adaptive: Any = {"type": "adaptive"}
    effort: Any = {"effort": "xhigh"}
    thought = claude.messages.create(
        **DEMO, messages=HELLO, thinking=adaptive, output_config=effort
    )
    assert [block.type for block in thought.content] == ["thinking", "text"]


@pytest.mark.parametrize(
    ("model", "thinking", "named"),
    [
        ("demo", {"type": "adaptive"}, None),
        ("demo", {"type": "disabled"}, "output_config.effort"),
        ("scripted", {"type": "enabled", "budget_tokens": 1024}, "thinking,output_config.effort"),
    ],
)
def test_thinking_without_an_effect_is_named(
    http: httpx.Client, model: str, thinking: Any, named: str | None
) -> None:
    body = {**GREEDY, "model": model, "messages": HELLO, "output_config": {"effort": "low"}}
    answer = http.post("/v1/messages", json={**body, "thinking": thinking})
    assert (answer.status_code, answer.headers.get("x-unsupported-params")) == (200, named)


def test_ends_are_told_in_anthropics_words(claude: anthropic.Anthropic) -> None:
    short = claude.messages.create(**{**DEMO, "max_tokens": 2}, messages=HELLO)
    assert short.stop_reason == "max_tokens"
    stopped = claude.messages.create(
        **DEMO, messages=HELLO, stop_sequences=["Paris", "x1", "x2", "x3", "x4"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")


def test_a_prompt_is_read_into_the_cache_without_an_answer(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {**DEMO, "max_tokens": 0, "messages": HELLO, "system": "warm " * 40}
    read = claude.messages.create(**asked)
    assert (read.content, read.stop_reason, read.stop_sequence) == ([], "max_tokens", None)
    with claude.messages.stream(**asked) as stream:
        types = [event.type for event in stream]
    assert types == ["message_start", "message_delta", "message_stop"]
    answer = claude.messages.create(**{**asked, "max_tokens": 2})
    assert answer.content
    assert (answer.usage.cache_read_input_tokens or 0) > 40


@pytest.mark.parametrize(
    ("said", "param", "left"),
    [
        ("'max_tokens' is too large: 8000. This model's maximum context length is 8192 tokens and "
         "your request has 5000 input tokens (8000 > 8192 - 5000).", None, 3192),
        ("This model's maximum context length is 8192 tokens. However, you requested 8000 output "
         "tokens and your prompt contains at least 193 input tokens.", None, None),
        ("max_tokens is too large.", "max_tokens", None),
    ],
    ids=["exact", "at least", "no numbers"],
)  # fmt: skip
def test_max_tokens_is_lowered_once_to_what_the_server_has_left(
    claude: anthropic.Anthropic,
    client: openai.OpenAI,
    odd: UpstreamServer,
    said: str,
    param: str | None,
    left: int | None,
) -> None:
    def refuse(talk: Talk) -> None:
        talk.say(400, {"error": {"message": said, "type": "BadRequestError", "param": param}})

    odd.answers = [refuse, streamed("Fits")]
    before = len(odd.asked)
    answer = claude.messages.create(model="odd", max_tokens=8000, messages=HELLO)
    assert [getattr(block, "text", None) for block in answer.content] == ["Fits"]
    assert [one.body.get("max_tokens") for one in odd.asked[before:]] == [8000, left]
    odd.answers, before = [refuse], len(odd.asked)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(model="odd", max_tokens=8000, messages=HELLO)
    assert len(odd.asked) == before + 2
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="odd", max_tokens=8000, messages=HELLO)
    assert (caught.value.param, len(odd.asked)) == ("max_tokens", before + 3)


def test_an_answer_is_continued_from_where_it_stands(claude: anthropic.Anthropic) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "The capital of"}]
    [block] = claude.messages.create(**DEMO, messages=begun).content
    assert block.type == "text"
    assert block.text.startswith(" France")


def test_instructions_in_the_middle_are_a_message_or_a_block(claude: anthropic.Anthropic) -> None:
    text = "Be kind."
    block = {"type": "mid_conv_system", "content": [{"type": "text", "text": text}]}
    answers = [
        claude.messages.create(model="scripted", max_tokens=90, messages=[*HELLO, said])  # type: ignore[list-item]  # They are of each form.
        for said in ({"role": "system", "content": text}, {"role": "user", "content": [block]})
    ]
    [first], [second] = (answer.content for answer in answers)
    assert first.type == second.type == "text"
    assert first.text == second.text
    assert first.text.endswith(f"<system-reminder>\n{text}\n</system-reminder>")


def test_texts_of_messages_that_follow_each_other_stay_apart(claude: anthropic.Anthropic) -> None:
    said: Any = [
        {"role": "user", "content": "12"},
        {"role": "user", "content": [{"type": "text", "text": "3"}, {"type": "text", "text": "4"}]},
    ]
    answer = claude.messages.create(model="scripted", max_tokens=9, messages=said)
    assert [block.text for block in answer.content if block.type == "text"] == ["12\n\n34"]


@pytest.mark.parametrize("is_former", [False, True])
def test_a_format_binds_the_answer(claude: anthropic.Anthropic, is_former: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
    }
    format_ = {"type": "json_schema", "schema": schema}
    given = {"output_format": format_} if is_former else {"output_config": {"format": format_}}
    asked = {**DEMO, "extra_body": DEMO["extra_body"] | given}
    [block] = claude.messages.create(**asked, messages=HELLO).content
    assert block.type == "text"
    assert json.loads(block.text)["city"] in ("Paris", "Rome")


def test_documents_and_search_results_are_read(claude: anthropic.Anthropic) -> None:
    blocks: list[Any] = [
        {
            "type": "document",
            "title": "Notes",
            "source": {"type": "text", "media_type": "text/plain", "data": "A cat."},
        },
        {
            "type": "search_result",
            "source": "here",
            "title": "Found",
            "content": [{"type": "text", "text": "A dog."}],
        },
        {"type": "text", "text": "What is it?"},
    ]
    plain = claude.messages.count_tokens(
        model="demo", messages=[{"role": "user", "content": blocks[2:]}]
    )
    whole = claude.messages.count_tokens(
        model="demo", messages=[{"role": "user", "content": blocks}]
    )
    assert whole.input_tokens > plain.input_tokens + 10


@pytest.mark.parametrize("enabled", [True, False])
def test_citations_of_documents_are_named_as_unsupported(http: httpx.Client, enabled: bool) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "A cat."}
    document = {"type": "document", "source": source, "citations": {"enabled": enabled}}
    body = {**GREEDY, "messages": [{"role": "user", "content": [document]}]}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    named = answer.headers.get("x-unsupported-params")
    assert named == ("messages[].content[].citations.enabled" if enabled else None)


def test_documents_and_images_by_url_and_by_file_are_read(
    claude: anthropic.Anthropic, client: openai.OpenAI, odd: UpstreamServer
) -> None:
    report = client.files.create(file=("r.pdf", pdf("Profit was 42")), purpose="user_data").id
    red = client.files.create(file=("red.png", PNG), purpose="vision").id
    with ImageServer().running() as server:
        page = server.give("/page", b"<!doctype html><p>Caf\xe9 costs fell</p><script>x</script>")
        text = server.give("/notes%20a.txt", b"Sales rose.")
        image = server.give("/a.png", PNG)
        content: list[Any] = [
            {"type": "document", "title": "Page", "source": {"type": "url", "url": page}},
            {"type": "document", "source": {"type": "url", "url": text}},
            {"type": "document", "source": {"type": "file", "file_id": report}},
            {"type": "image", "source": {"type": "url", "url": image}},
            {"type": "image", "source": {"type": "file", "file_id": red}},
            {"type": "text", "text": "Well?"},
        ]
        said: list[Any] = [{"role": "user", "content": content}]
        claude.messages.create(model="seeing", max_tokens=9, messages=said)
    shown = odd.body["messages"][-1]["content"]
    texts = "".join(part["text"] for part in shown if part["type"] == "text")
    assert "Caf\u00e9 costs fell" in texts
    assert "script" not in texts
    assert "notes a.txt:\nSales rose." in texts
    assert "r.pdf:\nProfit was 42" in texts
    data = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert [p["image_url"]["url"] for p in shown if p["type"] == "image_url"] == [data, data]


def test_failed_results_images_and_found_tools_are_shown_to_the_model(
    claude: anthropic.Anthropic, odd: UpstreamServer
) -> None:
    data = base64.b64encode(PNG).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "text", "text": "It broke."}, {"type": "image", "source": source}]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": content}
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
    said: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    claude.messages.create(model="seeing", max_tokens=9, messages=said)
    told, shown = odd.body["messages"][-2:]
    assert (told["role"], told["tool_call_id"]) == ("tool", "toolu_1")
    assert told["content"] == "Error: It broke."
    url = f"data:image/png;base64,{data}"
    assert shown == {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    found = {"type": "tool_reference", "tool_name": "get_weather"}
    said[-1]["content"] = [{**result, "is_error": False, "content": [found, found]}]
    claude.messages.create(model="odd", max_tokens=9, messages=said)
    assert odd.body["messages"][-1]["content"] == "\n".join(
        ["The tool get_weather can be called."] * 2
    )


def test_deferred_tools_are_shown_when_a_search_of_the_client_has_found_them(
    claude: anthropic.Anthropic, odd: UpstreamServer
) -> None:
    deferred = {**WEATHER, "defer_loading": True}
    search = {**WEATHER, "name": "ToolSearch"}
    called = {"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {"city": "x"}}
    found = {"type": "tool_reference", "tool_name": "get_weather"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [found]}
    after: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": [called]},
        {"role": "user", "content": [result]},
    ]

    def shown(messages: Any, *tools: Any, **fields: Any) -> list[str]:
        asked = {"model": "odd", "max_tokens": 9, "messages": messages, "tools": tools, **fields}
        claude.messages.create(**asked)
        return [tool["function"]["name"] for tool in odd.body.get("tools", ())]

    assert shown(HELLO, search, deferred) == ["ToolSearch"]
    assert shown(after, search, deferred) == ["ToolSearch", "get_weather"]
    with pytest.raises(anthropic.InternalServerError, match="made no call"):
        shown(HELLO, search, deferred, tool_choice={"type": "tool", "name": "get_weather"})
    assert "get_weather" in [tool["function"]["name"] for tool in odd.body["tools"]]
    assert shown(HELLO, deferred) == ["get_weather"]  # The model could not search.
    hosted = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    assert shown(HELLO, hosted, search, deferred) == ["ToolSearch", "get_weather"]


def test_messages_add_and_remove_tools(claude: anthropic.Anthropic, odd: UpstreamServer) -> None:
    """The blocks of anthropic 2.14; the model sees the tools that are in force at the end."""
    weather = {"type": "tool_reference", "name": "get_weather"}
    removal, addition = (
        {"type": f"tool_{change}", "tool": weather} for change in ("removal", "addition")
    )
    other = {"type": "tool_definition", "definition": {**WEATHER, "name": "other"}}
    defined = {"type": "tool_addition", "tool": other}

    def shown(*changes: Any) -> list[str]:
        said: Any = [*HELLO, *({"role": "system", "content": [change]} for change in changes)]
        claude.messages.create(model="odd", max_tokens=9, messages=said, tools=[WEATHER])  # type: ignore[list-item]  # It is a tool.
        assert odd.body["messages"][-1]["content"] == HELLO[0]["content"]
        return [tool["function"]["name"] for tool in odd.body.get("tools", ())]

    assert shown(removal) == []
    assert shown(removal, defined) == ["other"]
    assert shown(removal, defined, addition) == ["get_weather", "other"]
    unknown = {"type": "tool_removal", "tool": {**weather, "name": "nothing"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.1\.content\.0\.tool\.name"):
        shown(unknown)


def test_strict_tools_and_single_calls_are_asked_of_the_server(
    claude: anthropic.Anthropic, odd: UpstreamServer
) -> None:
    asked: Any = {"model": "odd", "max_tokens": 9, "messages": HELLO}
    for strict, single in ((True, True), (False, False)):
        tools: Any = [{**WEATHER, "strict": strict}, {**WEATHER, "name": "other"}]
        choice: Any = {"type": "auto", "disable_parallel_tool_use": single}
        claude.messages.create(**asked, tools=tools, tool_choice=choice)
        assert odd.body["parallel_tool_calls"] is not single
        first, second = (tool["function"] for tool in odd.body["tools"])
        assert (first.get("strict"), second.get("strict")) == (strict or None, None)


def test_large_tools_need_room_in_the_context(http: httpx.Client) -> None:
    tools = [
        {**WEATHER, "name": f"tool_{number}", "description": "Find the weather of a city. " * 30}
        for number in range(64)
    ]
    assert len(json.dumps(tools)) >= 64 * 1024
    said = [{"role": "user", "content": script({"text": "Fits"})}]
    body = {"model": "wide", "max_tokens": 100, "messages": said, "tools": tools}
    taken = http.post("/v1/messages", json=body)
    assert (taken.status_code, taken.json()["content"][0]["text"]) == (200, "Fits")
    refused = http.post("/v1/messages", json={**body, "model": "demo"})
    assert refused.status_code == 400
    error = refused.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["details"] == {"error_code": "context_length_exceeded"}
    assert_too_long(error["error"]["message"])


def assert_too_long(message: str) -> None:
    """Assert the words of Anthropic's API, after which Claude Code compacts a session."""
    counts = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", message)
    assert counts, message
    assert int(counts[1]) > int(counts[2])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [6_000, 600_000], ids=["counted", "estimated"])
def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words(
    http: httpx.Client, length: int, stream: bool
) -> None:
    said = [{"role": "user", "content": "e\u0301" * length}]
    body = {"model": "demo", "max_tokens": 9, "messages": said, "stream": stream}
    refused = http.post("/v1/messages", json=body)
    assert refused.status_code == 400
    assert_too_long(refused.json()["error"]["message"])


def test_a_prompt_whose_tokens_its_server_does_not_name_is_refused_in_these_words_too(
    claude: anthropic.Anthropic, odd: UpstreamServer
) -> None:
    said = "max_tokens must be at least 1, got 0."

    def refuse(talk: Talk) -> None:
        talk.say(400, {"error": {"message": said, "type": "BadRequestError", "param": None}})

    odd.answers = [refuse]
    words = "prompt is too long: This model's maximum context length is 2048 tokens"
    with pytest.raises(anthropic.BadRequestError, match=words):
        claude.messages.create(model="odd", max_tokens=9, messages=HELLO)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"type": "url", "url": "file:///etc/passwd"}, "expected an http"),
        ({"type": "url", "url": "http://[::1"}, "expected an http"),
        ({"type": "url", "url": "http://localhost:1/a"}, "not fetched from this host"),
        ({"type": "url", "url": "http://127.0.0.1:9/a"}, "does not answer"),
        ({"type": "file", "file_id": "file-none"}, "no file 'file-none'"),
    ],
)
def test_a_document_that_cannot_be_had_is_refused(
    claude: anthropic.Anthropic, source: dict[str, Any], message: str
) -> None:
    said: list[Any] = [{"role": "user", "content": [{"type": "document", "source": source}]}]
    with pytest.raises(anthropic.BadRequestError, match=message):
        claude.messages.create(model="demo", max_tokens=9, messages=said)


def test_a_file_of_another_project_is_no_file(
    claude: anthropic.Anthropic, client: openai.OpenAI, stack: ServedStack
) -> None:
    id_ = client.files.create(file=("a.txt", b"secret"), purpose="user_data").id
    source = {"type": "file", "file_id": id_}
    said: list[Any] = [{"role": "user", "content": [{"type": "document", "source": source}]}]
    with (
        anthropic.Anthropic(base_url=stack.url, api_key=make_key(stack).secret) as other,
        pytest.raises(anthropic.BadRequestError, match="no file"),
    ):
        other.messages.create(model="demo", max_tokens=9, messages=said)


def test_an_image_on_a_model_without_eyes_is_refused_in_its_envelope(http: httpx.Client) -> None:
    image = {
        "type": "image",
        "source": {
            "type": "base64",
            "media_type": "image/png",
            "data": base64.b64encode(encoded("PNG")).decode(),
        },
    }
    body = {**GREEDY, "messages": [{"role": "user", "content": [image]}]}
    refused = http.post("/v1/messages", json=body)
    assert refused.status_code == 400
    assert refused.json()["type"] == "error"
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert "reads no images" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"system": "Hi", "messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "messages.0.content.0",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"tool_choice": {"type": "tool", "name": "none"}, "tools": [WEATHER]}, "tool_choice.name"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}
                ]
            },
            "tool",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
                    }
                ]
            },
            "a message of the user has no blocks",
        ),
    ],
)
def test_bad_input_names_its_field(
    http: httpx.Client, change: dict[str, Any], message: str
) -> None:
    body = {**GREEDY, "messages": HELLO, **change}
    refused = http.post("/v1/messages", json={k: v for k, v in body.items() if v is not None})
    assert refused.status_code == 400, refused.text
    error = refused.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert message in error["error"]["message"]


def test_errors_have_the_clients_classes(stack: ServedStack, claude: anthropic.Anthropic) -> None:
    with (
        anthropic.Anthropic(base_url=stack.url, api_key="sk-wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(**DEMO, messages=HELLO)
    with pytest.raises(anthropic.NotFoundError, match="none"):
        claude.messages.create(model="none", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.InternalServerError):
        play(claude, {"fail": "It broke."})
    with pytest.raises(anthropic.APIStatusError, match="failed"):
        for _ in play(claude, {"text": "a"}, {"fail": "It broke."}, stream=True):
            pass


def test_what_claude_code_sends_is_taken(http: httpx.Client) -> None:
    tools = [
        {"name": f"tool_{number}", "description": "x" * 20, "input_schema": {"type": "object"}}
        for number in range(24)
    ]
    body = {
        "model": "demo",
        "max_tokens": 32_000,
        "stream": True,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "metadata": {"user_id": json.dumps({"device_id": "d" * 64, "session_id": "s"})},
        "system": [
            {"type": "text", "text": f"Part {n}.", "cache_control": {"type": "ephemeral"}}
            for n in range(3)
        ],
        "tools": tools,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "say hello"}]},
            {"role": "system", "content": "The date has changed."},
        ],
    }
    betas = ",".join(f"beta-{n}-2026-01-01" for n in range(7))
    assert http.head("/").status_code in (200, 302)
    with http.stream(
        "POST", "/v1/messages?beta=true", json=body, headers={"anthropic-beta": betas}
    ) as answer:
        assert answer.status_code == 200, answer.read()
        assert "context_management" in answer.headers["x-unsupported-params"]
        sent = frames(answer)
    assert sent[-1].startswith("event: message_stop")


@pytest.mark.parametrize(
    ("type_", "name"), [("bash_20250124", "bash"), ("memory_20250818", "memory")]
)
def test_tools_of_anthropics_are_shown_or_named(http: httpx.Client, type_: str, name: str) -> None:
    tools = [
        {"type": type_, "name": name},
        {"type": "web_fetch_20250910", "name": "web_fetch"},
        {"type": "browser_toolset_20260801", "configs": {"zoom": {"enabled": False}}},
    ]
    forced = {"tool_choice": {"type": "tool", "name": name}}
    answer = http.post("/v1/messages", json={**GREEDY, "messages": HELLO, "tools": tools, **forced})
    assert answer.status_code == 200, answer.text
    [use] = answer.json()["content"]
    assert (use["type"], use["name"]) == ("tool_use", name)
    named = answer.headers["x-unsupported-params"].replace(" ", "").split(",")
    assert sorted(named) == ["tools[].browser_toolset_20260801", "tools[].web_fetch_20250910"]


def test_blocks_of_tools_of_anthropics_are_left_out_and_named(http: httpx.Client) -> None:
    call_id, page = "srvtoolu_1", {"url": "https://a.example/"}
    answered = [
        {"type": "compaction", "content": "Nothing so far."},
        {"type": "server_tool_use", "id": call_id, "name": "web_fetch", "input": page},
        {"type": "web_fetch_tool_result", "tool_use_id": call_id, "content": page},
        {"type": "text", "text": "I cannot read it."},
        {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
        {"type": "server_tool_use", "id": "srvtoolu_2", "name": "advisor", "input": {}},
        {"type": "advisor_tool_result", "tool_use_id": "srvtoolu_2", "content": page},
        {"type": "tool_use", "id": "toolu_1", "name": "browser_find", "input": {}},
    ]
    shown = {"type": "browser_state", "tabs": [{"tab_id": "1", "title": "a", "url": "b"}]}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [shown]}
    upload = {"type": "container_upload", "file_id": "file_1"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Read https://a.example/"}, upload]},
        {"role": "assistant", "content": answered},
        {"role": "user", "content": [result]},
        *HELLO,
    ]
    answer = http.post("/v1/messages", json={**GREEDY, "messages": messages})
    assert answer.status_code == 200, answer.text
    types = (
        *("container_upload", "compaction", "web_fetch_tool_result"),
        *("fallback", "advisor_tool_result", "content[].browser_state"),
    )
    names = ", ".join(f"messages[].content[].{type_}" for type_ in types)
    assert answer.headers["x-unsupported-params"].replace(",", ", ").replace("  ", " ") == names


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "no search engine"),
        ({"mcp_servers": [{"type": "url", "name": "a", "url": "http://a.example/mcp"}]},
         "registered MCP servers only"),
    ],
)  # fmt: skip
def test_tools_that_this_site_cannot_run_are_refused(
    http: httpx.Client, fields: dict[str, Any], message: str
) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = {"model": "demo", "messages": HELLO, **fields}
        body |= {} if path.endswith("tokens") else {"max_tokens": 9}
        refused = http.post(path, json=body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["type"] == "invalid_request_error"
        assert message in refused.json()["error"]["message"]


def test_files_have_anthropics_form_for_its_client(stack: ServedStack) -> None:
    key = make_key(stack).secret
    with anthropic.Anthropic(base_url=stack.url, api_key=key, max_retries=0) as claude:
        made = [
            claude.files.upload(file=(f"{name}.txt", b"Say yes.", "text/plain"))
            for name in ("a", "b", "c")
        ]
        shown = claude.files.retrieve_metadata(made[0].id)
        assert (shown.type, shown.filename, shown.mime_type) == ("file", "a.txt", "text/plain")
        assert (shown.size_bytes, shown.expires_at, shown.downloadable) == (8, None, True)
        assert abs(datetime.now(UTC) - shown.created_at) < timedelta(minutes=5)
        newest = [file.id for file in reversed(made)]
        assert [file.id for file in claude.files.list(limit=1)] == newest
        for query, ids in (
            ({"after_id": newest[0]}, newest[1:]),
            ({"before_id": newest[1]}, newest[:1]),
        ):
            page = claude.get("/v1/files", cast_to=dict[str, Any], options={"params": query})
            assert [file["id"] for file in page["data"]] == ids
        brief = claude.files.upload(file=("d.txt", b"x"), expires_in_seconds=7200)
        assert brief.expires_at is not None
        assert brief.expires_at - brief.created_at == timedelta(hours=2)
        source = {"type": "file", "file_id": made[0].id}
        asked: Any = [{"role": "user", "content": [{"type": "document", "source": source}]}]
        assert claude.messages.create(**DEMO, messages=asked).content
        assert claude.files.download(made[0].id).read() == b"Say yes."
        claude.files.delete(made[0].id)
        with pytest.raises(anthropic.NotFoundError) as caught:
            claude.files.retrieve_metadata(made[0].id)
        assert caught.value.type == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="expires_in_seconds"):
            claude.files.upload(file=("e.txt", b"x"), expires_in_seconds=1)


def test_a_client_that_leaves_ends_its_run(stack: ServedStack, http: httpx.Client) -> None:
    body = {"model": "scripted", "max_tokens": 9000, "stream": True}
    said = {**body, "messages": [{"role": "user", "content": ENDLESS}]}
    with http.stream("POST", "/v1/messages", json=said) as answer:
        lines = answer.iter_lines()
        start = next(line for line in lines if line.startswith('data: {"type":"message_start"'))
        message = json.loads(start.removeprefix("data: "))["message"]["id"]
        next(line for line in lines if "text_delta" in line)
    wait_until(lambda: stack.row(message)["status"] == "cancelled", 10, "the run is cancelled")
    assert stack.row(message)["output_tokens"] > 0


def test_limits_are_told_in_anthropics_headers(stack: ServedStack) -> None:
    with make_key(stack, requests_per_minute=2).http(stack) as http:
        answers = [http.post("/v1/messages", json={**GREEDY, "messages": HELLO}) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    now = datetime.now(UTC)
    for answer, remaining in zip(answers, ("1", "0", "0"), strict=True):
        assert answer.headers["anthropic-ratelimit-requests-limit"] == "2"
        assert answer.headers["anthropic-ratelimit-requests-remaining"] == remaining
        reset = datetime.fromisoformat(answer.headers["anthropic-ratelimit-requests-reset"])
        assert timedelta(seconds=-5) < reset - now < timedelta(seconds=125)
    assert answers[-1].json()["error"]["type"] == "rate_limit_error"
    assert int(answers[-1].headers["retry-after"]) > 0


def test_the_models_are_listed_in_anthropics_form(claude: anthropic.Anthropic) -> None:
    listed = {model.id: model for model in claude.models.list()}
    assert listed["demo"].type == "model"
    assert listed["demo"].display_name == "demo"
    assert listed["demo"].lifecycle == "active"
    assert claude.models.retrieve("demo").created_at == listed["demo"].created_at


def test_answers_and_errors_have_an_id(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    raw = claude.messages.with_raw_response.create(**DEMO, messages=HELLO)
    assert raw.headers["request-id"] == raw.headers["x-request-id"]
    assert http.post("/v1/messages", json={}).headers["request-id"].startswith("req_")


def test_a_thread_is_not_held_and_its_client_sends_everything_again(
    claude: anthropic.Anthropic, http: httpx.Client
) -> None:
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    refused = http.post("/v1/messages", json={**GREEDY, "messages": HELLO, "thread": thread})
    assert refused.status_code == 404
    assert refused.json()["error"]["details"] == {"error_code": "thread_not_found"}

    results = []

    def look(city: str) -> str:
        """Look at a city."""
        results.append(city)
        return f"sunny in {city}"

    said = script(call("look", '{"city": "Oslo"}'))
    runner = claude.beta.messages.tool_runner(
        model="scripted",
        max_tokens=100,
        messages=[{"role": "user", "content": said}],
        tools=[anthropic.beta_tool(look)],
        max_iterations=3,
    )
    assert [message.stop_reason for message in runner] == ["tool_use"] * 3
    assert results[:2] == ["Oslo", "Oslo"]


@pytest.mark.parametrize("turn", [0, 1], ids=["a prompt", "the result of a tool"])
def test_requests_of_claude_code_as_it_sends_them(http: httpx.Client, turn: int) -> None:
    """Recorded from version 2.1.197; long texts are cut short."""
    recorded = Path(__file__).parent / "bodies" / "claude_code_2.1.197.json"
    sent = json.loads(recorded.read_text())[turn]
    assert len(sent["body"]["tools"]) == 24
    body = {**sent["body"], "model": "scripted"}
    with http.stream("POST", sent["path"], json=body, headers=sent["headers"]) as answer:
        assert answer.status_code == 200, answer.read()
        sent_frames = frames(answer)
    assert sent_frames[0].startswith("event: message_start")
    assert sent_frames[-1].startswith("event: message_stop")
    assert http.head("/").status_code < 400
