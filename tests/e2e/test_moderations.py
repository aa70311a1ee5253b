"""``/v1/moderations``: by a server that has them, and by chat models that are guards."""

from __future__ import annotations

import base64
import io
import json
import math
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from tests.served_stack import ServedStack
from tests.upstream_server import Talk, UpstreamServer, chunks, finish, streamed, text, usage
from worker.runtime.guards import CATEGORIES

SAFE = {"flagged": False, "categories": dict.fromkeys(CATEGORIES, False)}


def judged(talk: Talk) -> None:
    """Flag what has "gun" in it, as a server with moderations does."""
    given = talk.body["input"]
    inputs = given if isinstance(given[0], str) else [json.dumps(given)]
    results = [
        {
            "flagged": "gun" in each,
            "categories": {"violence": "gun" in each, "x/of-its-own": False},
            "category_scores": {"violence": 0.75 if "gun" in each else 0.25, "x/of-its-own": 0},
        }
        for each in inputs
    ]
    talk.say(200, {"id": "modr-1", "model": "odd", "results": results})


@pytest.fixture
def judge(odd: UpstreamServer) -> UpstreamServer:
    """The server, with moderations."""
    odd.answers = [judged]
    return odd


def test_a_text_and_a_list_are_judged_by_the_server(
    client: openai.OpenAI, stack: ServedStack, judge: UpstreamServer
) -> None:
    answer = client.moderations.create(input="a gun")  # By the name that is OpenAI's default.
    assert answer.model == "omni-moderation-latest"
    [result] = answer.results
    assert result.flagged
    assert result.categories.violence
    assert result.category_scores.violence == 0.75
    assert judge.asked[-1].path == "/v1/moderations"
    assert judge.body == {"model": "odd", "input": ["a gun"]}
    row = stack.row(answer.id)
    assert (row["kind"], row["status"], row["model"]) == ("moderation", "completed", "judge")
    assert row["input_tokens"] == 2

    many = client.moderations.create(model="judge", input=["a gun", "a cat", "two guns"])
    assert [result.flagged for result in many.results] == [True, False, True]
    assert many.results[1].to_dict() == {
        "flagged": False,
        "categories": {"violence": False, "x/of-its-own": False},
        "category_scores": {"violence": 0.25, "x/of-its-own": 0.0},
        "category_applied_input_types": {"violence": ["text"], "x/of-its-own": ["text"]},
    }


def test_parts_are_judged_together_and_images_reach_the_server_as_bytes(
    client: openai.OpenAI, judge: UpstreamServer
) -> None:
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts: list[Any] = [
        {"type": "text", "text": "a gun"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    answer = client.moderations.create(model="judge", input=parts)
    [result] = answer.results
    assert result.flagged
    assert result.category_applied_input_types.violence == ["text", "image"]
    assert [part["type"] for part in judge.body["input"]] == ["text", "image_url"]
    assert judge.body["input"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    [both] = client.moderations.create(model="judge", input=parts[:1]).results
    assert both.category_applied_input_types.violence == ["text"]


def test_a_thousand_texts_are_judged_in_their_order(
    client: openai.OpenAI, stack: ServedStack, judge: UpstreamServer
) -> None:
    texts = [f"text {n} {'gun' if n % 7 == 0 else ''}" for n in range(1000)]
    answer = client.moderations.create(model="judge", input=texts)
    assert [n for n, result in enumerate(answer.results) if result.flagged] == list(
        range(0, 1000, 7)
    )
    guarded = client.moderations.create(
        model="told-guard",
        input=[
            json.dumps([{"text": f"Safety: {'Unsafe' if n % 7 == 0 else 'Safe'}\nCategories: PII"}])
            for n in range(1000)
        ],
    )
    assert [n for n, result in enumerate(guarded.results) if result.flagged] == list(
        range(0, 1000, 7)
    )
    row = stack.row(guarded.id)
    assert (row["status"], row["output_tokens"]) == ("completed", 1000)


def verdict(words: str, **likely: float) -> Any:
    """The answer of a guard whose first token is blank and whose second has alternatives."""
    top = [{"token": token, "logprob": math.log(p)} for token, p in likely.items()]
    first, _, rest = words.partition("\n")
    blank = {"token": "\n\n", "logprob": 0.0, "top_logprobs": []}
    chosen = {"token": first, "logprob": math.log(likely[first]), "top_logprobs": top}
    return chunks(
        text("\n\n", logprobs={"content": [blank]}),
        text(first, logprobs={"content": [chosen]}),
        *([text(f"\n{rest}")] if rest else []),
        finish(),
        usage(20, 4),
    )


def test_llama_guard_is_read_with_its_probabilities(
    client: openai.OpenAI, stack: ServedStack, odd: UpstreamServer
) -> None:
    odd.answers = [
        verdict("unsafe\nS1,S10", unsafe=0.6, safe=0.2),
        verdict("safe", safe=0.9, unsafe=0.1),
    ]
    answer = client.moderations.create(model="guard", input=["kill them", "a cat"])
    harmful, harmless = answer.results
    assert harmful.flagged
    flagged = {name for name, is_so in harmful.categories.to_dict().items() if is_so}
    assert flagged == {"violence", "illicit/violent", "hate"}
    assert harmful.category_scores.hate == pytest.approx(0.75)
    assert harmful.category_scores.sexual == 0
    assert harmless.categories.to_dict() == SAFE["categories"]
    assert not harmless.flagged
    sent = odd.asked[-2].body
    assert sent["messages"] == [{"role": "user", "content": "kill them"}]
    assert (sent["temperature"], sent["logprobs"], sent["top_logprobs"]) == (0, True, 5)
    row = stack.row(answer.id)
    assert (row["input_tokens"], row["output_tokens"]) == (40, 8)


def test_a_hazard_without_a_category_flags_and_a_guard_without_logprobs_scores_one(
    client: openai.OpenAI, odd: UpstreamServer
) -> None:
    odd.answers = [streamed("unsafe\n", "S6")]
    [result] = client.moderations.create(model="guard", input="x").results
    assert result.flagged
    assert result.categories.to_dict() == SAFE["categories"]
    odd.answers = [streamed("unsafe\n", "S11")]
    [result] = client.moderations.create(model="guard", input="x").results
    assert result.category_scores.self_harm == 1


def test_an_answer_that_is_no_verdict_is_an_error(
    client: openai.OpenAI, odd: UpstreamServer
) -> None:
    odd.answers = [streamed("I am a poet.")]
    with pytest.raises(openai.InternalServerError, match="does not say 'unsafe' or 'safe'"):
        client.moderations.create(model="guard", input="x")
    odd.answers = [lambda talk: talk.say(200, {"results": [{"flagged": "yes"}]})]
    with pytest.raises(openai.InternalServerError, match="sent no moderation"):
        client.moderations.create(model="judge", input="x")
    odd.answers = [lambda talk: talk.say(200, {"results": []})]
    with pytest.raises(openai.InternalServerError, match="another number"):
        client.moderations.create(model="judge", input="x")


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": []}, "input", None),
        ({"input": ["a", 1]}, "input[1]", None),
        ({"input": ["a"] * 2049}, "input", "array_above_max_length"),
        ({"input": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}, None, None),
        ({"input": "x", "model": "scripted"}, "model", "unsupported_model"),
        ({"input": "x " * 6000, "model": "told-guard"}, "input", "context_length_exceeded"),
        (
            {"input": ['[{"text": "Safety: Safe"}]', "x " * 6000], "model": "told-guard"},
            "input",
            "context_length_exceeded",
        ),
        (
            {
                "input": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
                "model": "guard",
            },
            "input[0].image_url.url",
            "unsupported_parameter",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused(
    http: httpx.Client, body: dict[str, Any], param: str | None, code: str | None
) -> None:
    answer = http.post("/v1/moderations", json={"model": "judge", **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code
