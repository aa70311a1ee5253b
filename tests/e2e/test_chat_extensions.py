"""Chat completions beyond the API reference, and what of it only counts or waits."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.served_stack import ServedStack

STORY: list[Any] = [{"role": "user", "content": "Tell me a story."}]
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of Japan?"}]


def ask(client: openai.OpenAI, messages: list[Any] = STORY, **fields: Any) -> Any:
    """A completion of the demo model; fields that the client lacks travel as extensions."""
    body = {"temperature": 0, "max_tokens": 40, **fields}
    stream = body.pop("stream", False)
    return client.chat.completions.create(
        model=body.pop("model", "demo"), messages=messages, stream=stream, extra_body=body
    )


def text_of(client: openai.OpenAI, messages: list[Any] = STORY, **fields: Any) -> str:
    """The text of the first choice, streamed or not."""
    return texts_of(client, messages, **fields)[0][0]


def texts_of(
    client: openai.OpenAI, messages: list[Any] = STORY, **fields: Any
) -> list[tuple[str, str | None, Any]]:
    """Text, finish reason and stop of each choice, streamed or not."""
    answer = ask(client, messages, **fields)
    if not fields.get("stream"):
        return [
            (c.message.content, c.finish_reason, c.model_dump().get("stop_str"))
            for c in answer.choices
        ]
    texts = dict.fromkeys(range(fields.get("n", 1)), "")
    ends: dict[int, Any] = {}
    for chunk in answer:
        for choice in chunk.choices:
            assert choice.index not in ends
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = (choice.finish_reason, choice.model_dump().get("stop_str"))
    return [(texts[n], *ends[n]) for n in texts]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_stop_text_that_ended_a_choice_is_told(client: openai.OpenAI, stream: bool, n: int) -> None:
    whole = text_of(client)
    word = whole.split()[5]
    ended = texts_of(client, stop=["nowhere", word], stream=stream, n=n)
    assert ended == [(whole.split(word)[0], "stop", word)] * n


def test_choice_that_no_stop_ended_tells_none(client: openai.OpenAI, http: httpx.Client) -> None:
    assert texts_of(client, stop=["nowhere"])[0][1:] == ("length", None)
    body = {"model": "demo", "messages": STORY, "max_tokens": 2}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert "stop_str" not in choice


def tokens_of(http: httpx.Client, text: str) -> list[int]:
    """The ids of a text's tokens, without the one that every prompt begins with."""
    answer = http.post("/v1/tokenize", json={"model": "demo", "prompt": text}).json()
    tokens: list[int] = answer["tokens"][1:]
    return tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("logprobs", [False, True])
def test_stop_token_ends_each_choice_and_is_not_in_it(
    client: openai.OpenAI, http: httpx.Client, stream: bool, n: int, logprobs: bool
) -> None:
    whole = text_of(client)
    comma = tokens_of(http, ",")[-1]
    ended = texts_of(client, stop_token_ids=[2000, comma], stream=stream, n=n, logprobs=logprobs)
    assert ended == [(whole.split(",")[0], "stop", comma)] * n


def test_stop_token_is_not_in_the_log_probabilities(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    comma = tokens_of(http, ",")[-1]
    choice = ask(client, stop_token_ids=[comma], logprobs=True, top_logprobs=2).choices[0]
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_tokens_that_may_begin_a_stop_text_have_their_own_log_probabilities(
    client: openai.OpenAI,
) -> None:
    whole, beginning = ask(client, logprobs=True).choices[0], text_of(client)[:12]
    entries = whole.logprobs.content
    missed = ask(client, logprobs=True, stop=[f"{beginning[3:]}nowhere"]).choices[0]
    assert missed == whole
    ended = ask(client, logprobs=True, stop=[beginning[3:]]).choices[0]
    assert (ended.message.content, ended.finish_reason) == (beginning[:3], "stop")
    assert ended.logprobs.content == entries[: len(ended.logprobs.content)]
    assert "".join(e.token for e in ended.logprobs.content).startswith(beginning[:3])


def test_log_probabilities_change_no_answer_with_a_stop_text_and_no_usage(
    client: openai.OpenAI,
) -> None:
    hot: dict[str, Any] = {"temperature": 1.2, "seed": 4, "n": 3, "max_tokens": 60}
    whole = ask(client, **hot)
    words = [choice.message.content.split()[4] for choice in whole.choices]
    thinking: dict[str, Any] = {"reasoning_effort": "high", "stop": ["story"]}
    for fields in (*({**hot, "stop": [word]} for word in words), thinking):
        plain, scored = (ask(client, logprobs=logprobs, **fields) for logprobs in (False, True))
        assert "stop" in [choice.finish_reason for choice in plain.choices]
        assert scored.usage.completion_tokens == plain.usage.completion_tokens
        for choice in scored.choices:
            choice.logprobs = None
        assert scored.choices == plain.choices


@pytest.mark.parametrize("stream", [False, True])
def test_allowed_tokens_and_forbidden_words(
    client: openai.OpenAI, http: httpx.Client, stream: bool
) -> None:
    ids = [tokens_of(http, text)[-1] for text in ("a", "b")]
    for words, letters in (([], "ab"), (["a"], "b"), (["b"], "a")):
        bound: dict[str, Any] = {"allowed_token_ids": ids, "bad_words": words, "stream": stream}
        [(text, reason, _)] = texts_of(client, temperature=2.0, **bound)
        assert set(text) == set(letters)
        assert (len(text), reason) == (40, "length")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"min_tokens": 3}, "unsupported_parameter"),
        ({"bad_words": ["incomprehensibilities"]}, None),
        ({"allowed_token_ids": [2**31 - 1]}, None),
        ({"allowed_token_ids": [5], "grammar": {"type": "regex", "value": "a"}}, None),
        ({"allowed_token_ids": [5], "model": "old"}, "unsupported_parameter"),
    ],
)
def test_bounds_that_cannot_be_held_are_refused(
    client: openai.OpenAI, fields: dict[str, Any], code: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert (caught.value.param, caught.value.code) == (next(iter(fields)), code)


def test_stop_token_that_nobody_says_changes_nothing(client: openai.OpenAI) -> None:
    whole = texts_of(client)
    assert texts_of(client, stop_token_ids=[2000]) == whole
    choice = ask(client, stop_token_ids=[2000]).choices[0]
    assert choice.logprobs is None  # They were needed, and not asked for.


def test_choice_that_a_stop_token_ended_counts_no_more(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    comma = tokens_of(http, ",")[-1]
    hot: dict[str, Any] = {
        "temperature": 1.5,
        "seed": 5,
        "n": 4,
        "ignore_eos": True,
        "max_tokens": 60,
    }
    completion = ask(client, stop_token_ids=[comma], logprobs=True, **hot)
    told = [len(choice.logprobs.content) for choice in completion.choices]
    assert min(told) < 20 < max(told)
    stops = sum(choice.finish_reason == "stop" for choice in completion.choices)
    assert completion.usage.completion_tokens == sum(told) + stops


@pytest.mark.parametrize("include_usage", [False, True])
def test_timings_come_with_the_answer_and_last_in_a_stream(
    client: openai.OpenAI, include_usage: bool
) -> None:
    options: dict[str, Any] = {}
    if include_usage:
        options["stream_options"] = {"include_usage": True}
    whole = ask(client, timings=True)
    chunks = list(ask(client, timings=True, stream=True, **options))
    *earlier, last = chunks
    assert all("timings" not in chunk.model_dump() for chunk in earlier)
    assert last.choices == []
    assert (last.usage is not None) == include_usage
    for told, usage in [(whole.timings, whole.usage), (last.timings, last.usage)]:
        assert told["predicted_n"] == 40
        assert told["prompt_ms"] > 0
        assert told["predicted_ms"] > 0
        assert told["predicted_per_second"] == pytest.approx(40_000 / told["predicted_ms"])
        if usage is not None:
            assert told["cache_n"] == usage.prompt_tokens_details.cached_tokens
            assert told["cache_n"] + told["prompt_n"] == usage.prompt_tokens
    assert "timings" not in ask(client).model_dump()


@pytest.mark.parametrize("stream", [False, True])
def test_prefix_begins_the_answer_and_is_not_in_it(client: openai.OpenAI, stream: bool) -> None:
    plain = text_of(client, CAPITAL)
    start, rest = plain[:3], plain[3:]
    assert start == "The"
    assert text_of(client, CAPITAL, response_prefix=start, stream=stream) == rest
    assert text_of(client, CAPITAL, response_prefix="Once upon", stream=stream) != plain


@pytest.mark.parametrize("stream", [False, True])
def test_last_message_of_the_assistant_is_continued(client: openai.OpenAI, stream: bool) -> None:
    plain = text_of(client, CAPITAL, enable_thinking=False)
    begun = [*CAPITAL, {"role": "assistant", "content": plain[:3]}]
    parts = [*CAPITAL, {"role": "assistant", "content": [{"type": "text", "text": plain[:3]}]}]
    explicit = {"continue_final_message": True, "add_generation_prompt": False}
    assert text_of(client, begun, stream=stream) == plain[3:]
    assert text_of(client, parts, stream=stream, enable_thinking=True, **explicit) == plain[3:]
    new_turns: list[dict[str, bool]] = [
        {"add_generation_prompt": True},
        {"continue_final_message": False},
    ]
    for new_turn in new_turns:
        assert text_of(client, begun, stream=stream, **new_turn) != plain[3:]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("continue_final_message", {"messages": CAPITAL, "continue_final_message": True}),
        (
            "continue_final_message",
            {"continue_final_message": True, "add_generation_prompt": True},
        ),
        ("messages[1]", {"response_format": {"type": "json_object"}}),
        ("messages[1]", {"grammar": 'root ::= "a"'}),
        (
            "messages[1]",
            {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "required",
            },
        ),
    ],
)
def test_what_cannot_be_continued_is_refused(
    client: openai.OpenAI, param: str, fields: dict[str, Any]
) -> None:
    begun = [*CAPITAL, {"role": "assistant", "content": "The"}]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **{"messages": begun, **fields})
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"response_prefix": "x", "add_generation_prompt": False},
        {
            "response_prefix": "x",
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "required",
        },
    ],
)
def test_prefix_of_what_has_no_beginning_is_refused(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert caught.value.param == "response_prefix"


def test_without_a_generation_prompt_the_model_goes_on_from_the_messages(
    client: openai.OpenAI,
) -> None:
    plain, bare = ask(client, CAPITAL), ask(client, CAPITAL, add_generation_prompt=False)
    assert bare.usage.prompt_tokens < plain.usage.prompt_tokens


def test_prompt_that_is_not_to_be_cached_is_computed_anew(client: openai.OpenAI) -> None:
    text = [{"role": "user", "content": "A prompt for the cache that nobody else sends. " * 5}]
    for _ in range(5):
        cached = ask(client, text, max_tokens=1).usage.prompt_tokens_details.cached_tokens
        anew = ask(client, text, max_tokens=1, cache_prompt=False).usage
        assert anew.prompt_tokens_details.cached_tokens == 0
    assert cached > 0


def conversation(turns: int) -> list[Any]:
    """A system message, many long turns, and a last question."""
    messages: list[Any] = [{"role": "system", "content": "You are a pirate."}]
    for n in range(turns):
        messages += [
            {"role": "user", "content": f"Question {n}. " + "word " * 150},
            {"role": "assistant", "content": f"Answer {n}."},
        ]
    return [*messages, *CAPITAL]


def test_conversation_that_is_too_long_loses_its_oldest_turns(client: openai.OpenAI) -> None:
    messages = conversation(30)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    answer = ask(client, messages, truncate_sequence=True)
    assert 500 < answer.usage.prompt_tokens < 2048
    assert answer.choices[0].message.content


def test_last_turn_is_never_dropped(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [{"role": "user", "content": "word " * 3000}], truncate_sequence=True)
    assert caught.value.code == "context_length_exceeded"


def test_conversation_that_fits_is_not_truncated(client: openai.OpenAI) -> None:
    messages = conversation(3)
    plain = ask(client, messages)
    assert ask(client, messages, truncate_sequence=True).usage.prompt_tokens == (
        plain.usage.prompt_tokens
    )


@pytest.mark.parametrize(
    ("asked", "told", "service_class"),
    [
        (None, "default", 0),
        ("auto", "default", 0),
        ("priority", "default", 0),
        ("flex", "flex", 10),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_service_tier_is_told_and_flex_runs_in_the_background(
    stack: ServedStack,
    client: openai.OpenAI,
    asked: str | None,
    told: str,
    service_class: int,
    stream: bool,
) -> None:
    answer = ask(client, service_tier=asked, stream=stream, max_tokens=2)
    answer = next(iter(answer)) if stream else answer
    assert answer.service_tier == told
    assert stack.row(answer.id)["service_class"] == service_class


@pytest.mark.parametrize(
    ("fields", "end_user"),
    [
        ({}, ""),
        ({"user": "ann"}, "ann"),
        ({"safety_identifier": "hash"}, "hash"),
        ({"user": "ann", "safety_identifier": "hash"}, "hash"),
    ],
)
def test_end_user_is_kept_in_the_row(
    stack: ServedStack, client: openai.OpenAI, fields: dict[str, Any], end_user: str
) -> None:
    assert stack.row(ask(client, max_tokens=1, **fields).id)["end_user"] == end_user


@pytest.mark.parametrize("field", ["user", "safety_identifier"])
def test_end_user_that_cannot_be_kept_is_400(client: openai.OpenAI, field: str) -> None:
    for bad in ("a\0b", "x" * 513):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, STORY, **{field: bad})
        assert caught.value.param == field


def test_sampling_of_the_models_record_is_what_requests_leave_out(client: openai.OpenAI) -> None:
    def told(model: str, **fields: Any) -> str:
        # A prompt out of the cache is not read in the same order: its last bits may differ.
        body = {"max_tokens": 24, "cache_prompt": False, **fields}
        completion = client.chat.completions.create(model=model, messages=STORY, extra_body=body)
        return completion.choices[0].message.content or ""

    # The record of "tuned" says: temperature 0, presence_penalty 2.
    greedy = told("demo", temperature=0, presence_penalty=2)
    assert {told("tuned", seed=seed) for seed in range(4)} == {greedy}
    plain = told("demo", temperature=0)
    assert plain != greedy
    assert told("tuned", presence_penalty=0) == plain  # An explicit 0 is honoured.
    assert len({told("tuned", temperature=1.5, seed=seed) for seed in range(4)}) > 1


def test_explicit_zero_goes_before_the_default_of_the_weights(client: openai.OpenAI) -> None:
    hot: dict[str, Any] = {"temperature": 1.9, "top_k": 0, "min_p": 0.0, "top_p": 1.0}
    wild = {text_of(client, **hot, seed=seed) for seed in range(3)}
    tame = {text_of(client, temperature=1.9, seed=seed) for seed in range(3)}
    assert wild.isdisjoint(tame)  # The GGUF file says top_k 20 and min_p 0.1.


@pytest.mark.parametrize("stream", [False, True])
def test_error_of_the_template_is_400(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, template_vars={"tools": 5}, stream=stream)
    assert caught.value.param == "messages"
    assert caught.value.code is None


def test_verbosity_is_a_variable_of_the_template_and_not_named_as_ignored(
    client: openai.OpenAI,
) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=STORY, max_tokens=1, verbosity="low"
    )
    assert "x-unsupported-params" not in raw.headers
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, verbosity="loud")
    assert caught.value.param == "verbosity"
