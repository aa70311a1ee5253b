"""``/v1/completions``: prompts continued as they are."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest

from tests.served_stack import ServedStack

PROMPT = "Once upon a time"


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    """A completion of the demo model."""
    return client.completions.create(
        model="demo", prompt=prompt, **{"temperature": 0, "max_tokens": 8, **fields}
    )


def test_prompt_is_continued_and_counted(client: openai.OpenAI) -> None:
    completion = complete(client)
    assert completion.id.startswith("cmpl-")
    assert completion.object == "text_completion"
    [choice] = completion.choices
    assert choice.text
    assert (choice.index, choice.finish_reason) == (0, "length")
    assert completion.usage.completion_tokens == 8
    assert completion.usage.prompt_tokens > 1


def test_sixteen_tokens_are_the_default(client: openai.OpenAI) -> None:
    completion = client.completions.create(
        model="demo", prompt=PROMPT, extra_body={"ignore_eos": True}
    )
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 16


def test_index_is_prompt_times_n_plus_choice(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "The capital of Japan is"]
    alone = [complete(client, prompt).choices[0].text for prompt in prompts]
    assert alone[0] != alone[1]
    completion = complete(client, prompts, n=2)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in completion.choices] == [alone[0]] * 2 + [alone[1]] * 2
    endless = complete(client, prompts, n=2, extra_body={"ignore_eos": True})
    assert endless.usage.completion_tokens == 4 * 8
    assert endless.usage.prompt_tokens == sum(
        complete(client, p).usage.prompt_tokens for p in prompts
    )


def test_prompt_may_be_token_ids(client: openai.OpenAI) -> None:
    one = complete(client, [1, 5, 6]).choices[0].text
    lists = complete(client, [[1, 5, 6], [1, 7, 8]])
    assert lists.choices[0].text == one
    assert [choice.index for choice in lists.choices] == [0, 1]


def test_prompt_of_null_begins_a_new_document(client: openai.OpenAI) -> None:
    completion = complete(client, None)
    assert completion.choices[0].text == complete(client, "").choices[0].text
    assert completion.usage.prompt_tokens == 1  # The token that begins a text.


def test_echo_repeats_the_prompt(client: openai.OpenAI) -> None:
    plain = complete(client).choices[0].text
    assert complete(client, echo=True).choices[0].text == PROMPT + plain
    parts = [chunk.choices[0].text for chunk in complete(client, echo=True, stream=True)]
    assert "".join(parts) == PROMPT + plain


def test_stream_adds_up_and_usage_comes_last(client: openai.OpenAI) -> None:
    whole = complete(client)
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])
    parts = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(part.text for part in parts) == whole.choices[0].text
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]


def test_log_probabilities_are_parallel_lists(client: openai.OpenAI) -> None:
    choice = complete(client, logprobs=2).choices[0]
    told = choice.logprobs
    assert "".join(told.tokens) == choice.text
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == 8
    assert all(len(top) == 2 for top in told.top_logprobs)
    surprising = complete(client, logprobs=0, temperature=2, seed=3).choices[0].logprobs
    assert [list(top) for top in surprising.top_logprobs] == [[t] for t in surprising.tokens]
    assert told.text_offset[0] == 0
    assert told.text_offset[3] == len("".join(told.tokens[:3]))


def test_prompt_has_log_probabilities(client: openai.OpenAI) -> None:
    prompt = "The capital of France is Paris 🦊."
    scored = complete(client, prompt, echo=True, logprobs=1, max_tokens=0)
    [choice] = scored.choices
    told = choice.logprobs
    assert (choice.text, choice.finish_reason) == (prompt, "length")
    assert "".join(told.tokens[1:6]) == "The capital of France is"
    assert told.token_logprobs[0] is None
    assert told.top_logprobs[0] is None
    assert len(told.tokens) == len(told.token_logprobs) == scored.usage.prompt_tokens
    assert (scored.usage.completion_tokens, scored.usage.prompt_tokens_details.cached_tokens) == (
        0,
        0,
    )
    for token, offset in zip(told.tokens[1:6], told.text_offset[1:], strict=False):
        assert prompt[offset:].startswith(token)
    for token, logprob, top in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, strict=True
    ):
        assert top is None or (top[token] == logprob <= max(top.values()))
    # What the model says of its own words is the same when they are its prompt.
    begun = complete(client, "The capital of France is", logprobs=1, max_tokens=1).choices[0]
    at = told.tokens.index(begun.text)
    assert abs(told.token_logprobs[at] - begun.logprobs.token_logprobs[0]) < 0.01


def test_likelihoods_of_continuations_are_as_harnesses_ask_for_them(client: openai.OpenAI) -> None:
    def tokens_of(text: str) -> list[int]:
        body = {"model": "demo", "prompt": text}
        found: Any = client.post("/tokenize", body=body, cast_to=object)
        return list(found["tokens"])

    context = tokens_of("The capital of France is")
    rows = [tokens_of(f"The capital of France is {end}") for end in ("Paris.", "Oslo.")]
    answers = complete(client, rows, echo=True, logprobs=1, max_tokens=1, seed=1234).choices
    sums = []
    for row, choice in zip(rows, answers, strict=True):
        told = choice.logprobs
        assert len(told.tokens) == len(row) + 1
        sums.append(sum(told.token_logprobs[len(context) : -1]))
    assert sums[0] > sums[1]
    alone = complete(client, rows[1], echo=True, max_tokens=1).choices[0]
    assert alone.text == answers[1].text


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_streamed_prompt_is_the_same(client: openai.OpenAI, max_tokens: int) -> None:
    asked: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": max_tokens, "n": 2}
    prompts = ["The capital of Norway is " * 15, PROMPT]
    whole = complete(client, prompts, **asked).choices
    texts, logprobs = [""] * 4, [list[Any]() for _ in range(4)]
    for chunk in complete(client, prompts, stream=True, **asked):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        if choice.logprobs:
            told = choice.logprobs
            logprobs[choice.index] += zip(told.tokens, told.text_offset, strict=True)
    assert texts == [choice.text for choice in whole]
    for index, choice in enumerate(whole):
        pairs = zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
        assert logprobs[index] == list(pairs)


def test_grammar_and_stop_hold(client: openai.OpenAI) -> None:
    extra = {"grammar": 'root ::= "yes" | "no"'}
    assert complete(client, extra_body=extra).choices[0].text in ("yes", "no")
    word = complete(client).choices[0].text.split()[1]
    stopped = complete(client, stop=word).choices[0]
    assert word not in stopped.text
    many = [f"no {n}" for n in range(15)]
    assert complete(client, stop=[*many, word]).choices[0].text == stopped.text
    with pytest.raises(openai.BadRequestError, match="16"):
        complete(client, stop=[*many, word, "no"])
    assert stopped.finish_reason == "stop"


def tuned(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    """A completion of the model that has marks for filling in the middle."""
    body = {"temperature": 0, "presence_penalty": 0, "max_tokens": 8, **fields}
    return client.completions.create(model="tuned", prompt=prompt, **body)


def test_suffix_is_put_between_the_models_marks(client: openai.OpenAI) -> None:
    filled = tuned(client, suffix="the end.")
    marked = tuned(client, f"Before: {PROMPT} After: the end. Between: ")
    assert filled.choices[0].text == marked.choices[0].text
    assert filled.usage.prompt_tokens == marked.usage.prompt_tokens
    assert filled.choices[0].text != tuned(client).choices[0].text
    several = tuned(client, [PROMPT, "The capital"], suffix="the end.")
    assert several.choices[0].text == filled.choices[0].text


def test_infill_is_that_of_llama_server(client: openai.OpenAI, stack: ServedStack) -> None:
    filled = tuned(client, suffix="the end.")
    asked = {"model": "tuned", "input_prefix": PROMPT[:9], "prompt": PROMPT[9:], "n_predict": 8}
    asked |= {"input_suffix": "the end.", "temperature": 0, "presence_penalty": 0}
    with stack.http() as http:
        answer = http.post("/infill", json=asked).raise_for_status().json()
        assert answer["content"] == filled.choices[0].text
        assert (answer["stop"], answer["stop_type"]) == (True, "limit")
        assert answer["tokens_evaluated"] == filled.usage.prompt_tokens
        assert answer["tokens_predicted"] == 8
        streamed = http.post("/infill", json={**asked, "stream": True}).raise_for_status().text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line[:5] == "data:"]
        assert "".join(event["content"] for event in events) == answer["content"]
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        before = {"input_extra": [{"text": "def f(): pass", "filename": "f.py"}]}
        longer = http.post("/infill", json={**asked, **before}).raise_for_status().json()
        assert longer["tokens_evaluated"] > answer["tokens_evaluated"]
        unknown = {"n": 2, "samplers": ["top_k"], "max_tokens": 2}
        same = http.post("/infill", json={**asked, **unknown})
        assert same.json()["content"] == answer["content"]
        assert same.headers["x-unsupported-params"] == "n,samplers,max_tokens"
        bound = http.post("/infill", json={**asked, "grammar": 'root ::= "xyz"'})
        assert (bound.json()["content"], bound.headers.get("x-unsupported-params")) == ("xyz", None)
        huge = {"input_prefix": "words, " * 1500, "input_suffix": "so many " * 20_000}
        cut = http.post("/infill", json={**asked, **huge}).raise_for_status().json()
        assert 1000 < cut["tokens_evaluated"] <= 2048 - 8
        refused = http.post("/infill", json={**asked, "model": "scripted"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        assert refused.json()["error"]["code"] == "unsupported_model"
        refused = http.post("/infill", json={**asked, "n_predict": -2})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n_predict")
        assert http.post("/infill", json=asked, headers={"Authorization": ""}).status_code == 401


def test_an_editor_has_the_other_files_read_before_it_needs_them(stack: ServedStack) -> None:
    """llama.vim sends this each second, and does not look at the answer; it was a 400."""
    files = {"input_extra": [{"text": f"def f{time.time_ns()}(): pass\n" * 20}]}
    warming = {**files, "input_prefix": "", "prompt": "", "input_suffix": "", "n_predict": 0}
    warming |= {"model": "tuned", "samplers": [], "cache_prompt": True, "t_max_predict_ms": 1}
    with stack.http() as http:
        warmed = http.post("/infill", json=warming).raise_for_status().json()
        assert warmed["tokens_predicted"] <= 1
        asked = {**files, "model": "tuned", "input_prefix": "x = f", "input_suffix": "()"}
        answer = http.post("/infill", json={**asked, "n_predict": 4}).raise_for_status().json()
    assert answer["timings"]["cache_n"] > 100


def test_best_of_answers_the_likeliest_and_counts_all(client: openai.OpenAI) -> None:
    hot = {"temperature": 1.5, "seed": 5, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    every = complete(client, n=4, logprobs=0, **hot)
    means = {choice.text: sum(choice.logprobs.token_logprobs) / 8 for choice in every.choices}
    ranked = sorted(means, key=lambda text: means[text], reverse=True)
    assert len(ranked) == 4
    best = complete(client, n=2, best_of=4, **hot)
    assert [choice.text for choice in best.choices] == ranked[:2]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.choices[0].logprobs is None
    assert best.usage.completion_tokens == every.usage.completion_tokens == 32
    [one] = complete(client, best_of=4, **hot).choices
    assert one.text == ranked[0]
    prompts = complete(client, [PROMPT, "The capital of Japan is"], best_of=2, **hot)
    assert [choice.index for choice in prompts.choices] == [0, 1]
    assert prompts.usage.completion_tokens == 32


def test_best_of_as_many_as_are_wanted_may_be_streamed(client: openai.OpenAI) -> None:
    chunks = complete(client, n=2, best_of=2, stream=True)
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


@pytest.mark.parametrize("stream", [False, True])
def test_stop_and_timings_are_told(client: openai.OpenAI, stream: bool) -> None:
    word = complete(client).choices[0].text.split()[1]
    answer = complete(client, stop=word, stream=stream, extra_body={"timings": True})
    answers = list(answer) if stream else [answer]
    stops = [c.model_dump().get("stop_str") for answer in answers for c in answer.choices]
    assert stops[-1] == word
    assert set(stops[:-1]) <= {None}
    assert answers[-1].timings["predicted_n"] > 0
    assert all("timings" not in answer.model_dump() for answer in answers[:-1])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 5}, "best_of"),
        ({"prompt": [10_000_000]}, "prompt"),
        ({"prompt": [2**40]}, "prompt[0]"),
        ({"echo": True, "logprobs": 1, "best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "prompt": [10_000_000]}, "prompt"),
        ({"echo": True, "logprobs": 1, "prompt": [1, 10_000_000]}, "prompt"),
        ({"echo": True, "logprobs": 1, "prompt": "word " * 4000}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [PROMPT, 5]}, "prompt[1]"),
        ({"n": 5}, "n"),
        ({"prompt": "word " * 4000}, "prompt"),
    ],
)
def test_what_cannot_be_done_is_400_and_names_the_parameter(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    prompt = fields.pop("prompt", PROMPT)
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, prompt, **fields)
    assert caught.value.param == param
