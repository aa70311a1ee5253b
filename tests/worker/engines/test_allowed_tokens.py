"""Allowed tokens and forbidden words of requests, on llama.cpp with the demo model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from inference_site.catalogue.catalogue import DEMO_FILE
from inference_site.core.domain.deltas import TextDelta, TokensDelta
from inference_site.core.domain.errors import InvalidRequest
from inference_site.core.domain.model_spec import ModelSpec
from inference_site.core.domain.request import (
    Constraint,
    GenerationRequest,
    Message,
    Sampling,
    Tool,
)
from tests.sinks import RecordingSink
from tests.worker.engines.llama_payloads import payloads
from worker.engines.base import Engine, load_engine

SPEC = ModelSpec("demo", "llama_cpp", DEMO_FILE, slots=2, context_length=512)
STORY = (Message("user", "Tell me a story."),)
HOT = Sampling(temperature=2.0, seed=7)
END = 260
"""The token that ends the demo model's answers."""
VOCABULARY = 2560


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    loaded = load_engine(SPEC)
    yield loaded
    loaded.close()


def answered(engine: Engine, extensions: dict[str, Any], **fields: Any) -> RecordingSink:
    told = {"sampling": Sampling(temperature=0), "max_output_tokens": 30, **fields}
    if "prompts" not in told:
        told["messages"] = STORY
    request = GenerationRequest("demo", extensions=extensions, **told)
    sink = RecordingSink()
    engine.run(request, sink)
    return sink


def ids_of(engine: Engine, text: str) -> list[int]:
    request = GenerationRequest(
        "demo", operation="tokenize", prompts=(text,), add_special_tokens=False
    )
    sink = RecordingSink()
    engine.run(request, sink)
    [found] = [delta for delta in sink.deltas if isinstance(delta, TokensDelta)]
    return list(found.ids)


def drawn(sink: RecordingSink) -> list[str]:
    """The texts of the tokens of an answer."""
    pieces = (delta for delta in sink.deltas if isinstance(delta, TextDelta))
    return [entry.token for piece in pieces for entry in piece.logprobs]


def ids_of_each(engine: Engine, *texts: str) -> list[int]:
    """The ids of texts that are one token each."""
    found = [ids_of(engine, text) for text in texts]
    assert all(len(ids) == 1 for ids in found), found
    return [ids[0] for ids in found]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), HOT])
@pytest.mark.parametrize("asked", [{}, {"operation": "complete", "prompts": ("Once",)}])
def test_only_allowed_tokens_come_and_the_end_is_one_of_them_or_not(
    engine: Engine, sampling: Sampling, asked: dict[str, Any]
) -> None:
    allowed = ids_of_each(engine, "a", "b", ",")
    endless = answered(engine, {"allowed_token_ids": allowed}, sampling=sampling, **asked)
    assert set(endless.text) <= set("ab,")
    assert len(endless.text) == 30
    assert endless.finishes == ["length"]
    ending = answered(engine, {"allowed_token_ids": [END]}, sampling=sampling, **asked)
    assert (ending.text, ending.finishes) == ("", ["stop"])


@pytest.mark.parametrize("asked", [{}, {"operation": "complete", "prompts": ("Once",)}])
def test_a_single_allowed_token_comes_alone(engine: Engine, asked: dict[str, Any]) -> None:
    allowed = {"allowed_token_ids": ids_of_each(engine, "b")}
    sampling = Sampling(temperature=0, logit_bias=((allowed["allowed_token_ids"][0], -100.0),))
    assert answered(engine, allowed, sampling=sampling, **asked).text == "b" * 30
    with pytest.raises(InvalidRequest, match="forbids all tokens") as caught:
        answered(engine, {**allowed, "bad_words": ["b"]}, **asked)
    assert caught.value.param == "bad_words"


def test_thoughts_have_only_allowed_tokens(engine: Engine) -> None:
    allowed = {"allowed_token_ids": ids_of_each(engine, "a", "b")}
    sink = answered(engine, allowed, template_vars={"enable_thinking": True})
    assert set("".join(sink.pieces)) <= set("ab")
    assert sink.usage.output_tokens == 30


def test_as_many_tokens_as_a_request_may_name_are_a_bound(engine: Engine) -> None:
    allowed = tuple(range(1500, 2500))
    spoken = RecordingSink()
    prompts = tuple((id_,) for id_ in allowed)
    engine.run(GenerationRequest("demo", operation="detokenize", prompts=prompts), spoken)
    request = {"operation": "complete", "prompts": ("Once",), "sampling": HOT, "top_logprobs": 0}
    free = drawn(answered(engine, {}, **request))
    bound = drawn(answered(engine, {"allowed_token_ids": list(allowed)}, **request))
    assert len(bound) == 30
    assert set(bound) <= set(spoken.pieces)
    assert not set(free) <= set(spoken.pieces)


@pytest.mark.parametrize("top_logprobs", [None, 0])
def test_offered_tools_change_nothing(engine: Engine, top_logprobs: int | None) -> None:
    """With log probabilities, the chat is a completion of its prompt."""
    tools = (Tool("f", None, {"type": "object"}),)
    bounds = {"allowed_token_ids": ids_of_each(engine, "a", "b"), "bad_words": ["a"]}
    sink = answered(engine, bounds, tools=tools, top_logprobs=top_logprobs)
    assert set("".join(sink.pieces)) == {"b"}
    assert sink.usage.output_tokens == 30


def test_every_choice_has_only_allowed_tokens(engine: Engine) -> None:
    allowed = {"allowed_token_ids": ids_of_each(engine, "a", "b")}
    sink = answered(engine, allowed, choices=2, sampling=HOT)
    assert set("".join(sink.pieces)) <= set("ab")
    assert sink.usage.output_tokens == 60


def test_a_token_that_is_none_is_the_clients_fault(engine: Engine) -> None:
    for number in (VOCABULARY, 2**31 - 1):
        with pytest.raises(InvalidRequest, match="no token of this model") as caught:
            answered(engine, {"allowed_token_ids": [5, number]})
        assert caught.value.param == "allowed_token_ids"
    assert answered(engine, {"allowed_token_ids": [VOCABULARY - 1]}, max_output_tokens=2).text


@pytest.mark.parametrize(
    "fields",
    [
        {"constraint": Constraint("regex", "a+", "grammar")},
        {"constraint": Constraint("json_object", "", "response_format")},
        {"tools": (Tool("f", None, {"type": "object"}),), "must_call": True},
        {"reasoning_budget": 3},
    ],
)
def test_allowed_tokens_are_refused_beside_what_takes_their_place(
    engine: Engine, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest, match="cannot be combined with a") as caught:
        answered(engine, {"allowed_token_ids": [5]}, **fields)
    assert caught.value.param == "allowed_token_ids"


def test_a_build_without_llguidance_refuses_allowed_tokens() -> None:
    request = GenerationRequest("demo", STORY, extensions={"allowed_token_ids": [5]})
    with pytest.raises(InvalidRequest, match="llguidance") as caught:
        payloads(SPEC, has_llguidance=False).chat(request)
    assert caught.value.param == "allowed_token_ids"


@pytest.mark.parametrize("asked", [{}, {"operation": "complete", "prompts": ("Once upon",)}])
def test_forbidden_words_do_not_come(engine: Engine, asked: dict[str, Any]) -> None:
    free = answered(engine, {}, **asked).text
    words = [word for word in free.split() if len(ids_of(engine, word)) == 1]
    assert words, free
    bound = answered(engine, {"bad_words": words}, **asked).text
    assert not set(words) & set(bound.split())
    assert bound


def test_a_forbidden_word_is_forbidden_with_a_space_before_it_and_without(engine: Engine) -> None:
    words = [" a", "a"]
    forbidden = {ids[0] for word in words if len(ids := ids_of(engine, word)) == 1}
    allowed = {"allowed_token_ids": [*forbidden, *ids_of_each(engine, "b")]}
    assert "a" in answered(engine, allowed, sampling=HOT).text
    for word in words:
        bound = answered(engine, {**allowed, "bad_words": [word]}, sampling=HOT)
        assert set(bound.text) == {"b"}


def test_a_bias_of_what_is_no_token_is_the_clients_fault() -> None:
    last, beyond = VOCABULARY - 1, VOCABULARY
    request = GenerationRequest("demo", STORY, Sampling(logit_bias=((last, 5.0),)))
    assert payloads(SPEC).chat(request)["logit_bias"] == {str(last): 5.0}
    request = GenerationRequest("demo", STORY, Sampling(logit_bias=((beyond, 5.0),)))
    with pytest.raises(InvalidRequest, match="no token of this model") as caught:
        payloads(SPEC).chat(request)
    assert caught.value.param == f"logit_bias.{beyond}"


def test_a_forbidden_word_of_several_tokens_is_refused_by_its_name(engine: Engine) -> None:
    word = "incomprehensibilities"
    assert len(ids_of(engine, word)) > 1
    with pytest.raises(InvalidRequest, match=f"'{word}' has .* tokens") as caught:
        answered(engine, {"bad_words": ["a", word]})
    assert caught.value.param == "bad_words"


def test_forbidden_words_go_with_biases_a_constraint_and_a_forced_call(engine: Engine) -> None:
    [a, b] = ids_of_each(engine, "a", "b")
    request = GenerationRequest(
        "demo", STORY, Sampling(logit_bias=((b, 5.0),)), extensions={"bad_words": (a,)}
    )
    assert payloads(SPEC).chat(request)["logit_bias"] == {str(b): 5.0, str(a): False}
    three = Constraint("regex", "[ab]{3}", "grammar")
    bound = answered(engine, {"bad_words": ["a"]}, constraint=three)
    assert re.fullmatch("[ab]{3}", bound.text)
    tool = Tool("f", None, {"type": "object", "properties": {}, "additionalProperties": False})
    called = answered(engine, {"bad_words": ["b"]}, tools=(tool,), must_call=True)
    assert called.finishes == ["tool_calls"]


def test_a_forbidden_word_that_a_constraint_needs_comes_all_the_same(engine: Engine) -> None:
    shape = Constraint("json_schema", '{"const": "a"}', "response_format")
    assert answered(engine, {"bad_words": ['"']}, constraint=shape).text == '"a"'


def test_a_request_that_is_cancelled_while_its_words_are_looked_up_says_nothing(
    engine: Engine,
) -> None:
    sink = RecordingSink(cancel_after=0)
    request = GenerationRequest("demo", STORY, extensions={"bad_words": ["a"] * 256})
    engine.run(replace(request, max_output_tokens=5), sink)
    assert sink.pieces == []
