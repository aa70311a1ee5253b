"""Sampler fields, several choices and log probabilities, on the real model."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

STORY: list[Any] = [{"role": "user", "content": "Tell me a story."}]
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of Japan?"}]


def answer(client: openai.OpenAI, **fields: Any) -> str:
    """The text of one answer of the demo model; fields it lacks travel as extensions."""
    completion = client.chat.completions.create(
        model="demo", messages=STORY, extra_body={"max_tokens": 40, **fields}
    )
    return completion.choices[0].message.content or ""


@pytest.fixture(scope="module")
def drawn(client: openai.OpenAI) -> list[str]:
    """Answers that are drawn with the usual samplers."""
    return [answer(client, temperature=1.3, seed=seed) for seed in range(3)]


@pytest.mark.parametrize(
    "field",
    [
        {"top_k": 1},
        {"temperature": 0.0, "top_p": 0.5},
        {"top_p": 0.0},
        {"min_p": 1.0},
    ],
)
def test_explicit_values_make_the_answer_greedy(
    client: openai.OpenAI, field: dict[str, Any]
) -> None:
    greedy = answer(client, temperature=0, seed=1)
    hot = {"temperature": 1.9, **field}
    assert {answer(client, **hot, seed=seed) for seed in range(2)} == {greedy}


@pytest.mark.parametrize(
    "field",
    [
        {"typical_p": 0.2},
        {"repetition_penalty": 1.8},
        {"presence_penalty": 2},
        {"frequency_penalty": 2},
        {"xtc_probability": 1.0, "xtc_threshold": 0.01},
        {"mirostat": 2, "mirostat_tau": 0.5, "mirostat_eta": 0.9},
        {"mirostat": 1, "mirostat_tau": 9.0},
    ],
)  # fmt: skip
def test_each_sampler_changes_what_is_drawn(
    client: openai.OpenAI, drawn: list[str], field: dict[str, Any]
) -> None:
    changed = [answer(client, temperature=1.3, seed=seed, **field) for seed in range(3)]
    assert changed != drawn


def test_dry_sampler_breaks_repetitions(client: openai.OpenAI) -> None:
    """A greedy answer that may not end repeats itself, until DRY forbids it."""
    endless = {"temperature": 0, "ignore_eos": True}
    dry = {
        "dry_multiplier": 5.0,
        "dry_base": 3.0,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "dry_sequence_breakers": ["#"],
    }
    plain = answer(client, **endless, max_tokens=300)
    assert answer(client, **endless, **dry, max_tokens=300) != plain


def test_no_honoured_field_is_named_as_ignored(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="demo",
        messages=STORY,
        max_tokens=2,
        n=1,
        presence_penalty=0.1,
        logit_bias={"5": 1},
        logprobs=True,
        extra_body={"top_k": 40, "min_p": 0.1, "grammar": None},
    )
    assert "x-unsupported-params" not in raw.headers


def test_bias_bans_a_token_or_makes_it_come(client: openai.OpenAI, http: httpx.Client) -> None:
    def first(**fields: Any) -> str:
        completion = client.chat.completions.create(
            model="demo", messages=CAPITAL, max_tokens=1, temperature=0, **fields
        )
        return completion.choices[0].message.content or ""

    def number(text: str) -> str:
        answer = http.post("/v1/tokenize", json={"model": "demo", "prompt": text}).json()
        return str(answer["tokens"][-1])

    likely = first()
    assert first(logit_bias={number(likely): -100}) != likely
    assert first(logit_bias={number(","): 100}) == ","


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"logit_bias": {"word": 1}}, "logit_bias.word"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 9}, "n"),
        ({"n": 5}, "n"),  # The model has four slots.
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"mirostat": 3}, "mirostat"),
        ({"dry_sequence_breakers": []}, "dry_sequence_breakers"),
    ],
)
def test_values_out_of_range_are_refused(
    client: openai.OpenAI, field: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=STORY, extra_body=field)
    assert caught.value.param == param


@pytest.mark.parametrize("field", [{"n": 2}, {"logprobs": True}, {"grammar": 'root ::= "x"'}])
def test_what_the_engine_lacks_is_refused_before_it_is_queued(
    client: openai.OpenAI, field: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=STORY, extra_body=field)
    assert caught.value.code == "unsupported_parameter"
    assert caught.value.param == next(iter(field))


def test_several_choices_differ_and_are_counted_once_for_the_prompt(client: openai.OpenAI) -> None:
    question: dict[str, Any] = {
        "model": "demo",
        "messages": STORY,
        "temperature": 1.5,
        "max_tokens": 30,
        "seed": 5,
    }
    one = client.chat.completions.create(**question)
    completion = client.chat.completions.create(**question, n=3)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in completion.choices}) > 1
    assert one.usage is not None
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == one.usage.prompt_tokens
    assert completion.usage.completion_tokens > one.usage.completion_tokens


def test_streamed_choices_interleave_and_each_ends_once(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=STORY,
            n=3,
            stream=True,
            max_tokens=30,
            extra_body={"ignore_eos": True},
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 90
    parts = [chunk.choices[0] for chunk in chunks[:-1]]
    assert [part.index for part in parts[:3]] == [0, 1, 2]
    assert [part.delta.role for part in parts[:3]] == ["assistant"] * 3
    assert all(part.delta.role is None for part in parts[3:])
    ended = [part.index for part in parts if part.finish_reason]
    assert sorted(ended) == [0, 1, 2]
    order = [part.index for part in parts[3:] if part.delta.content]
    assert order != sorted(order)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_belong_to_the_text(client: openai.OpenAI, stream: bool) -> None:
    question: dict[str, Any] = {
        "model": "demo",
        "messages": CAPITAL,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
        "stream": stream,
    }
    if stream:
        parts = [chunk.choices[0] for chunk in client.chat.completions.create(**question)]
        text = "".join(part.delta.content or "" for part in parts)
        entries = [e for p in parts if p.logprobs for e in p.logprobs.content or []]
    else:
        choice = client.chat.completions.create(**question).choices[0]
        text = choice.message.content or ""
        assert choice.logprobs is not None
        entries = list(choice.logprobs.content or [])
    assert bytes(b for entry in entries for b in entry.bytes or []).decode() == text
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        ranked = [other.logprob for other in entry.top_logprobs]
        assert ranked == sorted(ranked, reverse=True)
        assert entry.token == entry.top_logprobs[0].token  # Greedy.


def test_zero_top_logprobs_are_an_empty_list(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model="demo", messages=CAPITAL, max_tokens=2, logprobs=True, top_logprobs=0
    )
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.content
    assert completion.choices[0].logprobs.content[0].top_logprobs == []
