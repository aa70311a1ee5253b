"""How the answers of guards become moderations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import pytest

from inference_site.catalogue.engines.options import GuardName
from inference_site.core.domain.deltas import (
    Finish,
    ModerationDelta,
    TextDelta,
    TokenLogprob,
    Usage,
)
from inference_site.core.domain.errors import GenerationFailed
from inference_site.core.domain.request import GenerationRequest
from tests.sinks import RecordingSink
from worker.engines.base import Engine, Sink
from worker.runtime.guards import _GUARDS, CATEGORIES, GuardChats, read_judgement


class Answering(Engine):
    """A model that gives these answers, one after another."""

    def __init__(self, answers: Sequence[Sequence[TextDelta]]) -> None:
        self.answers, self.asked = list(answers), list[GenerationRequest]()

    def chat(self, request: GenerationRequest, sink: Sink) -> None:
        """Give the next answer."""
        self.asked.append(request)
        for delta in self.answers.pop(0):
            sink.feed(delta)
        sink.feed(Finish("stop"))
        sink.feed(Usage(10, 0, 1))

    def close(self) -> None:
        """Do nothing."""


def said(word: str, **likely: float) -> list[TextDelta]:
    """An answer of one token, with the probabilities of others."""
    top = tuple(TokenLogprob(token, math.log(p), token.encode()) for token, p in likely.items())
    chosen = TokenLogprob(word, math.log(likely.get(word.strip(), 1)), word.encode(), top)
    return [TextDelta(word, logprobs=(chosen,) if likely else ())]


def moderated(
    guard: GuardName, *answers: Sequence[TextDelta]
) -> tuple[list[ModerationDelta], Answering]:
    """The results of one text for each set of answers."""
    engine, sink = Answering(answers), RecordingSink()
    texts = ("x",) * (len(answers) // len(_GUARDS[guard].questions))
    asked = GenerationRequest("m", operation="moderate", prompts=texts, guard=guard)
    assert not GuardChats(engine, asked, sink, lambda error: None).start()
    assert sink.usage.input_tokens == 10 * len(answers)
    assert len(sink.finishes) == len(texts)
    return [delta for delta in sink.deltas if isinstance(delta, ModerationDelta)], engine


def flagged(result: ModerationDelta) -> set[str]:
    """The categories that are true."""
    assert tuple(result.categories) == tuple(result.scores) == CATEGORIES
    return {name for name, is_so in result.categories.items() if is_so}


def test_every_guard_of_an_entry_has_a_row_and_names_known_categories() -> None:
    assert set(_GUARDS) == set(get_args(GuardName))
    for guard in _GUARDS.values():
        named = {name for names in guard.hazards.values() for name in names}
        assert named <= set(CATEGORIES)
        assert set(guard.questions) - {""} <= set(guard.hazards)


def test_shield_gemma_is_asked_for_each_guideline_and_each_has_its_score() -> None:
    [result], engine = moderated(
        "shield_gemma",
        said("No", Yes=0.3, No=0.6),
        said("Yes", Yes=0.9, No=0.1),
        said("No", Yes=0.1, No=0.9),
        said("No", Yes=0.0001, No=0.9),
    )
    assert result.is_flagged
    assert flagged(result) == {"harassment"}
    assert result.scores["harassment"] == pytest.approx(0.9)
    assert result.scores["illicit"] == result.scores["self-harm"] == pytest.approx(1 / 3)
    guidelines = [str(chat.template_vars["guideline"]) for chat in engine.asked]
    assert [text.split('"')[1] for text in guidelines] == [
        "No Dangerous Content",
        "No Harassment",
        "No Hate Speech",
        "No Sexually Explicit Information",
    ]


@pytest.mark.parametrize(
    ("answer", "is_flagged", "categories"),
    [
        ("Safety: Safe\nCategories: None", False, set()),
        ("Safety: Controversial\nCategories: Violent", False, set()),
        (
            "Safety: Unsafe\nCategories: Violent, Suicide & Self-Harm",
            True,
            {"violence", "self-harm"},
        ),
        ("Safety: Unsafe\nCategories: Non-violent Illegal Acts", True, {"illicit"}),
        ("Safety: Unsafe\nCategories: Jailbreak", True, set()),
    ],
)
def test_qwen_guard(answer: str, is_flagged: bool, categories: set[str]) -> None:
    [result], _ = moderated("qwen3_guard", said(answer))
    assert result.is_flagged == is_flagged
    assert flagged(result) == categories


def test_a_verdict_after_other_words_has_the_probability_of_its_own_token() -> None:
    first = TokenLogprob("Safety:", 0.0, b"Safety:")
    top = tuple(
        TokenLogprob(token, math.log(p), token.encode())
        for token, p in {" Un": 0.5, " Safe": 0.2, " Contro": 0.05, " Maybe": 0.25}.items()
    )
    second = TokenLogprob(" Un", math.log(0.5), b" Un", top)
    guard = _GUARDS["qwen3_guard"]
    judged = read_judgement(guard, "Safety: Unsafe\nCategories: Violent", (first, second))
    assert judged.probability == pytest.approx(0.5 / 0.75)


def test_codes_are_read_whole() -> None:
    results, _ = moderated(
        "llama_guard", said("\n\nunsafe\nS10"), said("unsafe\nS1,S12"), said("safe")
    )
    assert [flagged(result) for result in results] == [
        {"hate"},
        {"violence", "illicit/violent", "sexual"},
        set(),
    ]
    assert [result.index for result in results] == [0, 1, 2]


@pytest.mark.parametrize("answer", ["", "unsafest", "I cannot say.", "Safety: Unsafe"])
def test_an_answer_without_a_verdict_is_a_failure(answer: str) -> None:
    with pytest.raises(GenerationFailed, match="'unsafe' or 'safe'"):
        moderated("llama_guard", said(answer))
