"""LoRA adapters: applied by name, for one request alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.served_stack import ServedStack

STORY: list[Any] = [{"role": "user", "content": "Tell me a story."}]


def told(client: openai.OpenAI, lora: Any = None, model: str = "tuned") -> str:
    completion = client.chat.completions.create(
        model=model,
        messages=STORY,
        max_tokens=20,
        extra_body={"lora": lora, "temperature": 0, "presence_penalty": 0},
    )
    return completion.choices[0].message.content or ""


def long_story(client: openai.OpenAI, lora: Any) -> tuple[str, str]:
    """The id and the text of an answer that takes a while."""
    completion = client.chat.completions.create(
        model="tuned",
        messages=STORY,
        max_tokens=400,
        extra_body={"lora": lora, "temperature": 0, "ignore_eos": True},
    )
    return completion.id, completion.choices[0].message.content or ""


def scaled(name: str, scale: float) -> dict[str, Any]:
    return {"name": name, "scale": scale}


def test_each_adapter_changes_the_answer_in_its_own_way(client: openai.OpenAI) -> None:
    plain = told(client, model="demo")
    assert told(client) == plain
    one, two = told(client, "one"), told(client, "two")
    both = told(client, [{"name": "one"}, {"name": "two"}])
    assert len({plain, one, two, both}) == 4
    assert told(client) == plain  # It was for those requests alone.


def test_scale_says_how_much_of_it_is_applied(client: openai.OpenAI) -> None:
    whole = told(client, "one")
    assert told(client, [{"name": "one"}]) == told(client, [scaled("one", 1.0)]) == whole
    assert told(client, [scaled("one", 0.0)]) == told(client, []) == told(client)
    assert told(client, [scaled("one", 0.5)]) not in (whole, told(client))
    assert told(client, [scaled("one", 1.0), scaled("two", 0.0)]) == whole


def test_requests_with_different_adapters_run_at_once(
    client: openai.OpenAI, stack: ServedStack
) -> None:
    """Each says what it says alone, while the others are running."""
    kinds: list[Any] = [None, "one", "two", [scaled("one", 0.5)]]
    alone = [long_story(client, lora)[1] for lora in kinds]
    assert len(set(alone)) == len(kinds)
    gate = threading.Barrier(len(kinds))

    def among_others(lora: Any) -> tuple[str, str]:
        gate.wait(10)
        return long_story(client, lora)

    with ThreadPoolExecutor(len(kinds)) as pool:
        told_at_once = list(pool.map(among_others, kinds))
    assert [text for _id, text in told_at_once] == alone
    rows = [stack.row(public_id) for public_id, _text in told_at_once]
    assert max(row["claimed_at"] for row in rows) < min(row["finished_at"] for row in rows)
    assert len({row["worker"] for row in rows}) == 1


def test_completions_have_adapters_too(client: openai.OpenAI) -> None:
    def completed(lora: Any) -> str:
        fields = {"lora": lora, "temperature": 0}
        answer = client.completions.create(
            model="tuned", prompt="Once upon a time", max_tokens=8, extra_body=fields
        )
        return answer.choices[0].text

    assert completed("one") != completed(None)


@pytest.mark.parametrize(
    ("model", "lora", "param", "code"),
    [
        ("tuned", "ghost", "lora", None),
        ("tuned", [scaled("one", 1.0), scaled("ghost", 1.0)], "lora", None),
        ("tuned", [{"scale": 1.0}], "lora[0].name", "missing_required_parameter"),
        ("tuned", [scaled("one", "much")], "lora[0].scale", "invalid_type"),  # type: ignore[arg-type]  # Wrong on purpose.
        ("tuned", 5, "lora", "invalid_type"),
        ("demo", "one", "lora", "unsupported_parameter"),
        ("scripted", "one", "lora", "unsupported_parameter"),
    ],
)
def test_adapter_that_is_not_there_is_400(
    client: openai.OpenAI, model: str, lora: Any, param: str, code: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        told(client, lora, model)
    assert (caught.value.param, caught.value.code) == (param, code)
