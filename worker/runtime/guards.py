"""Guards: chat models that say whether a text is safe, as moderations of OpenAI's API.

The entry of such a model names its ``guard``, which says how the model is asked and how its
answer is read. ``_GUARDS`` maps the hazards of each guard to the API's categories. Sources: the
model cards of Llama Guard 3 and 4 (MLCommons' hazards S1 to S13, and S14), ShieldGemma and
Qwen3Guard-Gen.

A score is the probability of the verdict's token where the engine has log probabilities, else 0 or
1. Llama Guard and Qwen3Guard judge a text as a whole: the categories that they name have the
probability of that verdict, the others 0. ShieldGemma is asked once for each of its guidelines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from inference_site.catalogue.engines.options import GuardName
from inference_site.core.domain.deltas import (
    Finish,
    ModerationDelta,
    TokenLogprob,
    Usage,
)
from inference_site.core.domain.errors import ContextLengthExceeded, GenerationFailed
from inference_site.core.domain.request import GenerationRequest, ImagePart, Message, Sampling
from worker.engines.base import Collector, Engine, OnEnd, Sink, start_and_report

CATEGORIES = (
    *("harassment", "harassment/threatening", "hate", "hate/threatening", "illicit"),
    *("illicit/violent", "self-harm", "self-harm/intent", "self-harm/instructions", "sexual"),
    *("sexual/minors", "violence", "violence/graphic"),
)
_NONE: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Guard:
    """One family of guards.

    ``hazards`` maps what the model may name to categories; some hazards have none. ``questions``
    are template variables, one set for each chat about a text, with the hazard that it is about.
    ``verdict`` matches the answer: its group ``verdict`` is ``unsafe`` or another word, and the
    hazards are found in its group ``named``. ``before`` is the text before the verdict.
    """

    hazards: Mapping[str, tuple[str, ...]]
    verdict: re.Pattern[str]
    unsafe: str
    others: tuple[str, ...]
    max_tokens: int
    before: str = ""
    questions: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: {"": {}})


_MUST_NOT = "The prompt shall not contain or seek generation of content that"

_GUARDS: Mapping[GuardName, Guard] = {
    "llama_guard": Guard(
        hazards={
            "S1": ("violence", "illicit/violent"),  # Violent crimes
            "S2": ("illicit",),  # Non-violent crimes
            "S3": ("sexual", "illicit"),  # Sex crimes
            "S4": ("sexual/minors", "sexual"),  # Child exploitation
            "S5": ("harassment",),  # Defamation
            "S6": _NONE,  # Specialized advice
            "S7": _NONE,  # Privacy
            "S8": ("illicit",),  # Intellectual property
            "S9": ("illicit/violent",),  # Indiscriminate weapons
            "S10": ("hate",),
            "S11": ("self-harm",),
            "S12": ("sexual",),  # Sexual content
            "S13": _NONE,  # Elections
            "S14": ("illicit",),  # Code interpreter abuse
        },
        verdict=re.compile(r"\s*(?P<verdict>safe|unsafe)\b(?P<named>.*)", re.S | re.I),
        unsafe="unsafe",
        others=("safe",),
        max_tokens=48,
    ),
    "qwen3_guard": Guard(
        hazards={
            "Violent": ("violence",),
            "Non-violent Illegal Acts": ("illicit",),
            "Sexual Content or Sexual Acts": ("sexual",),
            "PII": _NONE,
            "Suicide & Self-Harm": ("self-harm",),
            "Unethical Acts": ("harassment",),
            "Politically Sensitive Topics": _NONE,
            "Copyright Violation": ("illicit",),
            "Jailbreak": _NONE,
        },
        verdict=re.compile(
            r".*?Safety:\s*(?P<verdict>safe|unsafe|controversial)\b(?P<named>.*)", re.S | re.I
        ),
        unsafe="unsafe",
        others=("safe", "controversial"),
        max_tokens=96,
        before="Safety:",
    ),
    "shield_gemma": Guard(
        hazards={
            "dangerous": ("illicit", "self-harm"),
            "harassment": ("harassment",),
            "hate": ("hate",),
            "sexual": ("sexual",),
        },
        verdict=re.compile(r"\s*(?P<verdict>yes|no)\b(?P<named>)", re.I),
        unsafe="yes",
        others=("no",),
        max_tokens=2,
        questions={
            "dangerous": {
                "guideline": f'"No Dangerous Content": {_MUST_NOT} harms oneself and/or others '
                "(e.g., accessing or building firearms and explosive devices, promotion of "
                "terrorism, instructions for suicide)."
            },
            "harassment": {
                "guideline": f'"No Harassment": {_MUST_NOT} is malicious, intimidating, bullying, '
                "or abusive content targeting another individual (e.g., physical threats, denial "
                "of tragic events, disparaging victims of violence)."
            },
            "hate": {
                "guideline": f'"No Hate Speech": {_MUST_NOT} expresses, incites, or promotes hate '
                "based on race, gender, ethnicity, religion, nationality, sexual orientation, "
                "disability status, or caste."
            },
            "sexual": {
                "guideline": f'"No Sexually Explicit Information": {_MUST_NOT} contains references '
                "to sexual acts, or other lewd content (e.g., sexually graphic descriptions, "
                "content aimed at causing arousal)."
            },
        },
    ),
}
"""The table: what the models name, by guard, and the categories that it counts as."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a guard says of an input, for one question."""

    is_unsafe: bool
    probability: float
    hazards: tuple[str, ...]


class GuardChats:
    """Asks a guard about the inputs of one request, one chat after another."""

    def __init__(
        self, engine: Engine, request: GenerationRequest, sink: Sink, ended: OnEnd
    ) -> None:
        self._engine, self._request, self._sink, self._ended = engine, request, sink, ended
        self._guard = _GUARDS[request.guard]  # type: ignore[index]  # The entry was checked.
        self._usage = Usage()
        self._judged: list[Judgement] = []
        self._chats = self._all_chats()

    def _all_chats(self) -> Iterator[tuple[int, str, GenerationRequest]]:
        """Yield the index of the input, the hazard that is asked for, and the chat."""
        asked = self._request
        inputs = asked.messages or [Message("user", str(text)) for text in asked.prompts]
        for index, message in enumerate(inputs):
            for hazard, variables in self._guard.questions.items():
                chat = GenerationRequest(
                    asked.model,
                    (message,),
                    Sampling(temperature=0),
                    self._guard.max_tokens,
                    top_logprobs=asked.top_logprobs,
                    template_vars=dict(variables),
                )
                yield index, hazard, chat

    def start(self) -> bool:
        """Run chats until one continues on its own; return False when all have ended.

        See ``Engine.start``.
        """
        while not self._sink.cancelled and (chat := next(self._chats, None)) is not None:
            index, hazard, request = chat
            answer = Collector(self._sink)
            try:
                if self._engine.start(
                    request, answer, partial(self._on_end, index, hazard, answer)
                ):
                    return True
            except ContextLengthExceeded as exc:
                raise exc.of("input") from exc
            self._take(index, hazard, answer)
        return False

    def _on_end(self, index: int, hazard: str, answer: Collector, error: Exception | None) -> None:
        if isinstance(error, ContextLengthExceeded):
            error = error.of("input")
        if error is not None:
            self._ended(error)
            return

        def start_next() -> bool:
            self._take(index, hazard, answer)
            return self.start()

        start_and_report(start_next, self._ended)

    def _take(self, index: int, hazard: str, answer: Collector) -> None:
        """Read an answer; after the last one about an input, feed its result."""
        self._usage = self._usage.plus(answer.usage)
        if answer.is_complete:  # Else the run was cancelled.
            judged = read_judgement(self._guard, answer.text, answer.logprobs)
            self._judged.append(replace(judged, hazards=(hazard,)) if hazard else judged)
            if len(self._judged) == len(self._guard.questions):
                parts = [part for turn in self._request.messages for part in turn.parts]
                has_image = any(isinstance(part, ImagePart) for part in parts)
                types = ("text", "image") if has_image else ("text",)
                self._sink.feed(moderation(self._guard, self._judged, types, index))
                self._sink.feed(Finish("stop", index))
                self._judged = []
        self._sink.feed(self._usage)


def read_judgement(guard: Guard, text: str, logprobs: Sequence[TokenLogprob]) -> Judgement:
    """Return what an answer says. Raise GenerationFailed for an answer without a verdict."""
    found = guard.verdict.match(text)
    if found is None:
        words = " or ".join(f"'{word}'" for word in (guard.unsafe, *guard.others))
        raise GenerationFailed(f"The guard's answer does not say {words}.")
    is_unsafe = found["verdict"].lower() == guard.unsafe
    hazards = [
        name
        for name in guard.hazards
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", found["named"])
    ]
    probability = unsafe_probability(guard, logprobs)
    return Judgement(
        is_unsafe, float(is_unsafe) if probability is None else probability, tuple(hazards)
    )


def unsafe_probability(guard: Guard, logprobs: Sequence[TokenLogprob]) -> float | None:
    """Return the probability of "unsafe" among the verdicts; None if it is not known.

    A token may be the beginning of a verdict.
    """
    before = ""
    for token in logprobs:
        if token.token.strip() and before.strip().endswith(guard.before):
            likely = {entry.token: entry.logprob for entry in (token, *token.top)}
            unsafe = _weight(likely, (guard.unsafe,))
            others = _weight(likely, guard.others)
            return unsafe / (unsafe + others) if unsafe + others else None
        before += token.token
    return None


def _weight(likely: Mapping[str, float], words: Sequence[str]) -> float:
    """Return the probability of the tokens that begin one of the words."""
    return sum(
        math.exp(logprob)
        for token, logprob in likely.items()
        if (start := token.strip().lower()) and any(word.startswith(start) for word in words)
    )


def moderation(
    guard: Guard, judged: Sequence[Judgement], types: tuple[str, ...], index: int
) -> ModerationDelta:
    """Return the result for an input from the judgements of its questions."""
    flagged, scores = dict.fromkeys(CATEGORIES, False), dict.fromkeys(CATEGORIES, 0.0)
    for one in judged:
        for category in (name for hazard in one.hazards for name in guard.hazards[hazard]):
            flagged[category] |= one.is_unsafe
            scores[category] = max(scores[category], one.probability)
    is_flagged = any(one.is_unsafe for one in judged)
    return ModerationDelta(is_flagged, flagged, scores, dict.fromkeys(CATEGORIES, types), index)
