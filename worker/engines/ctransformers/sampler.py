"""The sampler chain: from the logits of one step to a token.

The order is llama.cpp's: biases and penalties, DRY, top-k, typical, top-p, min-p, XTC, temperature.
Sources: "The Curious Case of Neural Text Degeneration" (top-p), "Locally Typical Sampling",
"Min P Sampling"; DRY and XTC as text-generation-webui introduced them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.engines.ctransformers.dry import dry_penalties
from worker.generation import Sampling

Floats = npt.NDArray[np.float32]

_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = 0.8, 40, 0.95, 0.05
"""What requests and the model's record leave out: llama.cpp's own defaults."""
_PENALISED = 64
"""Tokens at the end of the context that the repetition penalty looks at."""


class Sampler:
    """Chooses the tokens of one choice. ``seed`` makes it repeatable."""

    def __init__(self, sampling: Sampling, breakers: Sequence[frozenset[int]], seed: int | None):
        self._settings = sampling
        self._breakers = breakers
        self._random = np.random.default_rng(None if seed is None else seed % 2**64)
        self._bias = dict(sampling.logit_bias)
        self._temperature = float(_or(sampling.temperature, _TEMPERATURE))
        self._cuts = [cut for cut, is_on in self._all_cuts() if is_on]

    def choose(self, logits: Floats, history: Sequence[int], output: Sequence[int]) -> int:
        """Return the next token.

        ``logits`` is changed; those of tokens that a grammar forbids are −inf. ``history`` is the
        prompt and the output so far, ``output`` the latter alone.
        """
        self._penalise(logits, history, output)
        if self._temperature <= 0:
            return int(np.argmax(logits))
        candidates = self._candidates(logits)
        scores = logits[candidates] / self._temperature
        heights = np.cumsum(np.exp(scores - scores.max()), dtype=np.float64)
        chosen = int(heights.searchsorted(self._random.random() * heights[-1], side="right"))
        return int(candidates[min(chosen, len(candidates) - 1)])

    def _penalise(self, logits: Floats, history: Sequence[int], output: Sequence[int]) -> None:
        settings = self._settings
        for token, bias in self._bias.items():
            if token < len(logits):
                logits[token] += bias
        if (factor := _or(settings.repetition_penalty, 1.0)) != 1.0 and history:
            seen = list(set(history[-_PENALISED:]))
            scores = logits[seen]
            logits[seen] = np.where(scores > 0, scores / factor, scores * factor)
        presence = _or(settings.presence_penalty, 0.0)
        frequency = _or(settings.frequency_penalty, 0.0)
        if output and (presence or frequency):
            tokens, counts = np.unique(np.asarray(output), return_counts=True)
            logits[tokens] -= presence + frequency * counts
        for token, penalty in dry_penalties(settings, history, self._breakers).items():
            logits[token] -= penalty

    def _candidates(self, logits: Floats) -> npt.NDArray[np.int64]:
        """Return the tokens to choose from, the likeliest first."""
        tokens = _top_k(logits, _or(self._settings.top_k, _TOP_K))
        for cut in self._cuts:
            if len(tokens) > 1:
                tokens = cut(tokens, _softmax(logits[tokens]))
        return tokens

    def _all_cuts(self) -> Iterator[tuple[Callable[[Any, Floats], Any], bool]]:
        """Yield the cuts in their order, and whether each cuts anything with these settings."""
        settings = self._settings
        yield self._typical, _or(settings.typical_p, 1.0) < 1
        yield self._top_p, _or(settings.top_p, _TOP_P) < 1
        yield self._min_p, _or(settings.min_p, _MIN_P) > 0
        yield self._xtc, _or(settings.xtc_probability, 0.0) > 0

    def _typical(self, tokens: Any, probabilities: Floats) -> Any:
        mass = _or(self._settings.typical_p, 1.0)
        surprise = -np.log(probabilities + 1e-10)
        expected = float((probabilities * surprise).sum())
        order = np.argsort(np.abs(surprise - expected), kind="stable")
        kept = order[: _reaching(probabilities[order], mass)]
        return tokens[np.sort(kept)]

    def _top_p(self, tokens: Any, probabilities: Floats) -> Any:
        mass = _or(self._settings.top_p, _TOP_P)
        return tokens[: _reaching(probabilities, mass)]

    def _min_p(self, tokens: Any, probabilities: Floats) -> Any:
        least = _or(self._settings.min_p, _MIN_P) * probabilities[0]
        return tokens[: max(1, int((probabilities >= least).sum()))]

    def _xtc(self, tokens: Any, probabilities: Floats) -> Any:
        """Exclude top choices: now and then, all that are likely but the least likely of them."""
        if self._random.random() >= _or(self._settings.xtc_probability, 0.0):
            return tokens
        likely = int((probabilities >= _or(self._settings.xtc_threshold, 0.1)).sum())
        return tokens[max(0, likely - 1) :]


def log_probabilities(logits: Floats) -> Floats:
    """Return the natural logarithms of the probabilities, before any sampler changed them."""
    shifted = logits - logits.max()
    result: Floats = shifted - np.log(np.exp(shifted).sum())
    return result


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _top_k(logits: Floats, k: int) -> npt.NDArray[np.int64]:
    """Return the k likeliest tokens, best first; all that are allowed for k ≤ 0."""
    tokens = logits.argpartition(-k)[-k:] if 0 < k < len(logits) else np.arange(len(logits))
    scores = logits[tokens]
    order = np.argsort(-scores, kind="stable")
    return tokens[order[: np.isfinite(scores).sum()]]


def _softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max())
    result: Floats = weights / weights.sum()
    return result


def _reaching(probabilities: Floats, mass: float) -> int:
    """Return how many of these, in order, it takes to reach this much."""
    return int(np.searchsorted(np.cumsum(probabilities), mass)) + 1
