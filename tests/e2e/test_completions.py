"""``/v1/completions``: prompts continued as they are."""

from __future__ import annotations

from typing import Any

import openai
import pytest

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
    assert told.text_offset[0] == 0
    assert told.text_offset[3] == len("".join(told.tokens[:3]))


def test_grammar_and_stop_hold(client: openai.OpenAI) -> None:
    extra = {"grammar": 'root ::= "yes" | "no"'}
    assert complete(client, extra_body=extra).choices[0].text in ("yes", "no")
    word = complete(client).choices[0].text.split()[1]
    stopped = complete(client, stop=word).choices[0]
    assert word not in stopped.text
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "prompt": [1, 2]}, "echo"),
        ({"logprobs": 6}, "logprobs"),
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
