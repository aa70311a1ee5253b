"""Models of other servers behind the whole product: llama.cpp's own, and one that misbehaves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import openai
import pytest

from tests.e2e.conftest import ODD_CONTEXT
from tests.e2e.test_tools import OSLO, WEATHER
from tests.served_stack import ServedStack, wait_until
from tests.upstream_server import Talk, UpstreamServer, chunks, finish, streamed, text

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def _checked(other_stack: ServedStack) -> Iterator[None]:
    """Fail a test in which the product sent what does not fit its schema."""
    with other_stack.checked():
        yield


@pytest.fixture(scope="module")
def remote(other_stack: ServedStack) -> openai.OpenAI:
    """The official client of the product."""
    return other_stack.client()


def test_chat_is_streamed_and_counted(remote: openai.OpenAI, other_stack: ServedStack) -> None:
    stream = remote.chat.completions.create(
        model="remote",
        messages=HELLO,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    sent = list(stream)
    answer = "".join(c.choices[0].delta.content or "" for c in sent if c.choices)
    assert answer
    assert [c.choices[0].finish_reason for c in sent if c.choices][-1] == "stop"
    used = sent[-1].usage
    assert used is not None
    row = other_stack.row(sent[0].id)
    assert (row["status"], row["input_tokens"]) == ("completed", used.prompt_tokens)
    assert row["output_tokens"] == used.completion_tokens > 0
    local = remote.chat.completions.create(model="demo", messages=HELLO, temperature=0)
    assert local.choices[0].message.content == answer


@pytest.mark.parametrize("question", ["Hello", "Tell me a story.", "Count from 1 to 20."])
def test_one_model_says_the_same_on_llama_cpp_on_ctransformers_and_behind_a_server(
    remote: openai.OpenAI, question: str
) -> None:
    create: Any = partial(
        remote.chat.completions.create,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=60,
    )
    told = {}
    for model in ("demo", "old", "remote"):
        whole = create(model=model)
        [choice], usage = whole.choices, whole.usage
        pieces = [c.choices[0].delta.content or "" for c in create(model=model, stream=True)]
        assert choice.message.content == "".join(pieces)
        assert len(pieces) > 2
        assert usage is not None
        told[model] = (choice.message.content, choice.finish_reason, usage.prompt_tokens)
    assert told["demo"] == told["old"] == told["remote"]


def test_context_is_what_the_server_says(remote: openai.OpenAI, other_stack: ServedStack) -> None:
    told: Any = remote.models.retrieve("odd")
    assert told.context_length == ODD_CONTEXT
    listed = other_stack.manage("models").splitlines()
    [odd] = [line.split() for line in listed if line.startswith("odd ")]
    assert odd[:4] == ["odd", "openai_upstream", "4", f"{ODD_CONTEXT:,}"]


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_tools_are_called(remote: openai.OpenAI, tool_choice: Any) -> None:
    tools: list[Any] = [WEATHER]
    [choice] = remote.chat.completions.create(
        model="remote", messages=OSLO, tools=tools, tool_choice=tool_choice, temperature=0
    ).choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}


def test_completions_and_tokens_come_from_the_server(
    remote: openai.OpenAI, other_stack: ServedStack
) -> None:
    made = remote.completions.create(model="remote", prompt="One, two,", max_tokens=3)
    assert made.usage is not None
    assert made.usage.completion_tokens == 3
    with other_stack.http() as http:
        told = [
            http.post("/v1/tokenize", json={"model": name, "prompt": "Hello there"}).json()
            for name in ("remote", "demo")
        ]
    assert told[0]["tokens"] == told[1]["tokens"]


def test_responses_chain_makes_a_stateless_server_stateful(
    remote: openai.OpenAI, odd: UpstreamServer
) -> None:
    odd.answers = [streamed("I will", " remember.")]
    first = remote.responses.create(model="odd", input="My name is Ann.", instructions="Be kind.")
    assert first.output_text == "I will remember."
    odd.answers = [streamed("Ann")]
    second = remote.responses.create(
        model="odd", input="What is my name?", previous_response_id=first.id
    )
    assert second.output_text == "Ann"
    assert [(m["role"], m["content"]) for m in odd.body["messages"]] == [
        ("user", "My name is Ann."),
        ("assistant", "I will remember."),
        ("user", "What is my name?"),
    ]
    assert odd.asked[-1].headers["authorization"] == "Bearer sk-of-the-operator"
    assert remote.responses.retrieve(second.id).output_text == "Ann"


def test_responses_chain_on_the_demo_model(remote: openai.OpenAI) -> None:
    first = remote.responses.create(model="remote", input="Hello", temperature=0)
    second = remote.responses.create(
        model="remote", input="Count to 3.", previous_response_id=first.id, temperature=0
    )
    assert first.output_text
    assert second.output_text
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize("model", ["hooked-demo", "told", "old"])
def test_template_says_what_ends_a_turn(remote: openai.OpenAI, model: str) -> None:
    """On llama.cpp, on chats of the platform's own there, and on ctransformers."""
    asked: list[Any] = [{"role": "user", "content": "What is the capital of Japan?"}]
    greedy: dict[str, Any] = {"temperature": 0, "messages": asked}
    whole = remote.chat.completions.create(model="demo", **greedy).choices[0]
    cut = remote.chat.completions.create(model=model, **greedy).choices[0]
    before, found, _ = (whole.message.content or "").casefold().partition("tokyo")
    assert found
    said = (cut.message.content or "").casefold()
    if model == "told":  # It comes to that while it thinks.
        thought = str(getattr(cut.message, "reasoning_content", "")).casefold()
        assert ("tokyo" in thought, said) == (False, "")
    else:
        assert said.rstrip() == before.rstrip()
    assert (cut.finish_reason, getattr(cut, "stop_str", None)) == ("stop", None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("status", "kind"), [(429, openai.RateLimitError),
                                              (503, openai.InternalServerError)])  # fmt: skip
def test_when_to_come_back_is_passed_on(
    remote: openai.OpenAI,
    odd: UpstreamServer,
    stream: bool,
    status: int,
    kind: type[openai.APIStatusError],
) -> None:
    asked = len(odd.asked)
    odd.answers = [lambda talk: talk.say(status, {"error": "Slow down."}, Retry_After="17")]
    with pytest.raises(kind) as caught:
        remote.chat.completions.create(model="odd", messages=HELLO, stream=stream)
    assert caught.value.status_code == status
    assert caught.value.response.headers["retry-after"] == "17"
    assert "Slow down." not in str(caught.value)
    if status == 429:
        assert caught.value.code == "rate_limit_exceeded"
        assert len(odd.asked) == asked + 1


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_server_does_not_know_is_named_and_what_it_knows_is_passed_on(
    remote: openai.OpenAI, odd: UpstreamServer, stream: bool
) -> None:
    unknown = {"dry_multiplier": 0.8, "xtc_probability": 0.5, "ignore_eos": True, "min_p": 0.1}
    asked: dict[str, Any] = {"model": "odd", "reasoning_effort": "low", "stream": stream}
    odd.answers = [streamed("Hi")]
    raw = remote.chat.completions.with_raw_response
    answer = raw.create(messages=HELLO, temperature=0.5, extra_body=unknown, **asked)
    named = answer.headers["x-unsupported-params"].split(",")
    assert sorted(named) == sorted(unknown)
    assert odd.body["reasoning_effort"] == "low"
    assert odd.body["temperature"] == 0.5
    if stream:
        assert list(answer.parse())
    odd.answers = [streamed("Hi")]
    made = remote.responses.with_raw_response.create(
        model="odd", input="Hi", reasoning={"effort": "low"}, extra_body=unknown
    )
    assert sorted(made.headers["x-unsupported-params"].split(",")) == sorted(unknown)
    assert odd.body["reasoning_effort"] == "low"


@pytest.mark.parametrize(
    "said",
    [
        "This model's maximum context length is 2048 tokens. However, your prompt contains at "
        "least 2049 input tokens, which exceeds this limit even before generating output tokens.",
        "This model's maximum context length is 2048 tokens. However, your prompt contains 1000148 "
        "characters (more than 262144 characters, which is the upper bound for 2048 input tokens).",
        "max_tokens must be at least 1, got 0.",
    ],
)
def test_a_prompt_that_is_too_long_in_the_words_of_vllm(
    remote: openai.OpenAI, odd: UpstreamServer, said: str
) -> None:
    def refuse(talk: Talk) -> None:
        talk.say(400, {"error": {"message": said, "type": "BadRequestError", "param": None}})

    turns: list[Any] = [{"role": "user", "content": "Word " * 50} for _ in range(8)]
    odd.answers = [refuse]
    with pytest.raises(openai.BadRequestError) as caught:
        remote.chat.completions.create(model="odd", messages=turns)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    odd.answers = [refuse, streamed("Fits")]
    made = remote.chat.completions.create(
        model="odd", messages=turns, extra_body={"truncate_sequence": True}
    )
    assert made.choices[0].message.content == "Fits"
    assert 0 < len(odd.body["messages"]) < 8
    odd.answers = [refuse, streamed("Fits")]
    assert remote.responses.create(model="odd", input=turns, truncation="auto").output_text


def test_strict_tools_stay_strict(remote: openai.OpenAI, odd: UpstreamServer) -> None:
    strict: Any = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    odd.answers = [streamed("Hi")]
    tools: list[Any] = [{"type": "function", "function": strict}]
    remote.chat.completions.create(model="odd", messages=HELLO, tools=tools)
    assert odd.body["tools"][0]["function"]["strict"] is True
    flat: list[Any] = [{"type": "function", **strict}]
    remote.responses.create(model="odd", input="Hi", tools=flat)
    assert odd.body["tools"][0]["function"]["strict"] is True


def test_refused_request_names_the_field(remote: openai.OpenAI, odd: UpstreamServer) -> None:
    error = {"message": "Too hot for me.", "param": "temperature"}
    odd.answers = [lambda talk: talk.say(400, {"error": error})]
    with pytest.raises(openai.BadRequestError, match="Too hot") as caught:
        remote.chat.completions.create(model="odd", messages=HELLO, temperature=1.9)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize(
    ("name", "param"),
    [
        ("max_tokens", "max_output_tokens"),
        ("reasoning_effort", "reasoning.effort"),
        ("verbosity", "text.verbosity"),
        ("messages", "input"),
    ],
)
def test_refused_response_names_the_field_of_responses(
    remote: openai.OpenAI, odd: UpstreamServer, name: str, param: str
) -> None:
    error = {"message": "Not that one.", "param": name}
    odd.answers = [lambda talk: talk.say(400, {"error": error})]
    with pytest.raises(openai.BadRequestError) as caught:
        remote.responses.create(
            model="odd",
            input="Hi",
            max_output_tokens=9,
            reasoning={"effort": "low"},
            text={"verbosity": "low"},
        )
    assert caught.value.param == param


@pytest.mark.parametrize("status", [429, 500, 503])
def test_words_of_a_failure_are_for_the_log(
    remote: openai.OpenAI, odd: UpstreamServer, status: int
) -> None:
    error = {"message": "cuda oom at /srv/x"}
    odd.answers = [lambda talk: talk.say(status, {"error": error})]
    with pytest.raises(openai.APIStatusError) as caught:
        remote.chat.completions.create(model="odd", messages=HELLO)
    assert "cuda" not in caught.value.response.text


@pytest.mark.parametrize(
    ("sent", "passed"),
    [
        ({}, {"strict": True}),
        ({"strict": False, "description": "d"}, {"strict": False, "description": "d"}),
    ],
)
def test_schema_keeps_its_name_and_what_is_said_of_it(
    remote: openai.OpenAI, odd: UpstreamServer, sent: dict[str, Any], passed: dict[str, Any]
) -> None:
    named = {"name": "weather", "schema": {"type": "object"}}
    odd.answers = [streamed("{}")]
    wanted: Any = {"type": "json_schema", "json_schema": {**named, **sent}}
    remote.chat.completions.create(model="odd", messages=HELLO, response_format=wanted)
    assert odd.body["response_format"]["json_schema"] == {**named, **passed}
    given: Any = {"type": "json_schema", **named, **sent}
    remote.responses.create(model="odd", input="Hello", text={"format": given})
    assert odd.body["response_format"]["json_schema"] == {**named, **passed}


def test_answer_that_was_filtered_says_so(remote: openai.OpenAI, odd: UpstreamServer) -> None:
    odd.answers = [chunks(text("Hel"), finish("content_filter"))]
    [choice] = remote.chat.completions.create(model="odd", messages=HELLO).choices
    assert (choice.finish_reason, choice.message.content) == ("content_filter", "Hel")
    made = remote.responses.create(model="odd", input="Hello")
    assert made.incomplete_details is not None
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "content_filter")


def test_stream_that_breaks_off_ends_with_an_error(
    remote: openai.OpenAI, odd: UpstreamServer
) -> None:
    odd.answers = [chunks(text("Hel"), text("lo"), done=False)]
    stream = remote.chat.completions.create(model="odd", messages=HELLO, stream=True)
    received = (chunk.choices[0].delta.content or "" for chunk in stream)
    assert next(received) + next(received) + next(received) == "Hello"
    with pytest.raises(openai.APIError, match="ended the stream"):
        list(received)


def test_client_that_leaves_frees_the_server(
    remote: openai.OpenAI, odd: UpstreamServer, other_stack: ServedStack
) -> None:
    hung_up = threading.Event()

    def answer(talk: Talk) -> None:
        talk.begin()
        talk.event(text("Hello"))
        if talk.wait_for_hang_up():
            hung_up.set()

    odd.answers = [answer]
    stream = remote.chat.completions.create(model="odd", messages=HELLO, stream=True)
    first = next(iter(stream))
    stream.close()
    assert hung_up.wait(60)
    wait_until(
        lambda: other_stack.row(first.id)["status"] == "cancelled", 120, "the row's cancellation"
    )


def test_what_the_server_cannot_do_is_refused_before_it_is_asked(
    remote: openai.OpenAI, odd: UpstreamServer
) -> None:
    odd.answers = [streamed("Hello")]
    asked = len(odd.asked)
    switch = {"enable_thinking": True}
    with pytest.raises(openai.BadRequestError) as caught:
        remote.chat.completions.create(model="odd", messages=HELLO, extra_body=switch)
    assert caught.value.code == "unsupported_parameter"
    assert len(odd.asked) == asked


def test_a_model_is_ready_when_its_server_is_and_the_site_is_all_the_time(
    remote: openai.OpenAI, other_stack: ServedStack, away_port: int
) -> None:
    def absent() -> dict[str, str]:
        told = http.get("/health/ready").raise_for_status().json()
        found: dict[str, str] = told["models"]
        return found

    def ask(model: str) -> str | None:
        answer = remote.chat.completions.create(model=model, messages=HELLO, max_tokens=3)
        return answer.choices[0].message.content

    def is_answered(model: str) -> bool:
        try:
            return bool(ask(model))
        except openai.InternalServerError:
            return False

    server = UpstreamServer(away_port)
    server.models, server.answers = ["away"], [streamed("Here", " again")]
    with other_stack.http() as http:
        assert absent() == {"away": "failed"}
        with pytest.raises(openai.InternalServerError) as caught:
            ask("away")
        assert caught.value.code == "engine_unavailable"
        assert ask("demo")
        with server.running():
            wait_until(lambda: absent() == {}, 120, "the server to be found")
            wait_until(lambda: is_answered("away"), 120, "the web to know it as well")
            assert ask("away") == "Here again"
            server.answers = [_endless]
            stream = remote.chat.completions.create(model="away", messages=HELLO, stream=True)
            next(iter(stream))
        with pytest.raises(openai.APIError, match="closed the connection"):
            list(stream)  # Its server is gone.
        wait_until(lambda: absent() == {"away": "failed"}, 120, "the server to be missed")
        assert ask("demo")


def test_a_request_waits_for_a_server_that_comes_back_whenever_it_came(
    remote: openai.OpenAI, other_stack: ServedStack, away_port: int
) -> None:
    """Before the server went, as it went, and after; in the background for any time."""
    respond = partial(remote.responses.create, model="away", input="Hello", background=True)
    chat: Any = partial(remote.chat.completions.create, model="away", messages=HELLO)

    def completed(id_: str) -> None:
        wait_until(lambda: other_stack.row(id_)["status"] == "completed", 60, "its end")

    with ThreadPoolExecutor(3) as pool:
        early = respond()  # While it is down.
        with pytest.raises(openai.InternalServerError) as caught:
            chat()
        assert (caught.value.status_code, caught.value.code) == (503, "engine_unavailable")
        with _away(away_port) as server:
            completed(early.id)
            server.answers = [_silent]
            running = respond()
            waiting = pool.submit(chat)
            wait_until(lambda: len(server.asked) == 3, 60, "both runs")
        wait_until(lambda: other_stack.row(running.id)["status"] == "queued", 60, "its return")
        after = pool.submit(
            lambda: "".join(c.choices[0].delta.content or "" for c in chat(stream=True))
        )
        with _away(away_port):
            assert waiting.result(60).choices[0].message.content == "Here again"
            assert after.result(60) == "Here again"
            completed(running.id)
    assert other_stack.row(running.id)["attempt"] > 1


@pytest.mark.parametrize("said", [b"", b"EngineCore encountered an issue. See stack trace (above)"])
def test_a_response_in_the_background_is_repeated_whose_server_ends_in_the_middle(
    remote: openai.OpenAI, other_stack: ServedStack, odd: UpstreamServer, said: bytes
) -> None:
    def end(talk: Talk) -> None:
        talk.begin()
        talk.event(text("Half"))
        if said:
            talk.event({"error": {"message": said.decode(), "code": 500}})
        talk.cut()

    odd.answers = [end, streamed("All of it")]
    made = remote.responses.create(model="odd", input="Hello", background=True)
    wait_until(lambda: other_stack.row(made.id)["status"] == "completed", 60, "its end")
    assert remote.responses.retrieve(made.id).output_text == "All of it"


@contextmanager
def _away(port: int) -> Iterator[UpstreamServer]:
    server = UpstreamServer(port)
    server.models, server.answers = ["away"], [streamed("Here", " again")]
    with server.running():
        yield server


def _silent(talk: Talk) -> None:
    talk.begin()
    talk.wait_for_hang_up()


def _endless(talk: Talk) -> None:
    talk.begin()
    while True:
        talk.event(text("on "))
        time.sleep(0.05)


@pytest.mark.parametrize("stream", [False, True])
def test_entry_says_how_its_answers_are_read_and_drawn(remote: openai.OpenAI, stream: bool) -> None:
    def answer(text: str, **fields: Any) -> tuple[str, str, list[str]]:
        asked: Any = {"model": "told", "messages": [{"role": "user", "content": text}], **fields}
        made: Any = remote.chat.completions.create(**asked, stream=stream)
        parts = [c.choices[0].delta for c in made] if stream else [made.choices[0].message]
        calls = [call for part in parts for call in part.tool_calls or []]
        thoughts = [getattr(part, "reasoning_content", None) or "" for part in parts]
        names = [call.function.name for call in calls if call.function.name]
        return "".join(part.content or "" for part in parts), "".join(thoughts), names

    # Whatever is asked for, it is greedy and it thinks.
    story = answer(
        "Tell me a story.", temperature=2.0, seed=1, extra_body={"enable_thinking": False}
    )
    assert story[1]
    assert story == answer("Tell me a story.", temperature=1.5, seed=2)
    assert answer("What is the weather in Oslo?", tools=[WEATHER])[2] == ["get_weather"]
    assert answer("Count from 1 to 20.")[0].endswith("7, 8")
    asked: Any = {"model": "told", "input": "Tell me a story.", "temperature": 2.0}
    made: Any = remote.responses.create(**asked, stream=stream)
    response = list(made)[-1].response if stream else made
    assert response.output_text == story[0]
    assert [item.type for item in response.output] == ["reasoning", "message"]
