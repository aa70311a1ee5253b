"""The sampler chain: from the logits of one step to a token.

The order is llama.cpp's: biases and penalties, DRY, top-k, typical, top-p, min-p, XTC, temperature.
Sources: "The Curious Case of Neural Text Degeneration" (top-p), "Locally Typical Sampling",
"Min P Sampling"; DRY and XTC as text-generation-webui introduced them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from inference_site.core.domain.request import Sampling

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]
Candidates = tuple[Tokens, Floats]

_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = 0.8, 40, 0.95, 0.05
"""Defaults of the sampling parameters; llama.cpp's."""
_HIGHEST = 1e4
"""The highest factor or penalty. With a higher one the logit of a token becomes infinite, as are
those of the tokens that a grammar forbids."""
_PENALISED = 64
"""Tokens at the end of the context that the repetition penalty counts."""


class Sampler:
    """Chooses the tokens of one choice. ``seed`` makes it repeatable."""

    def __init__(self, sampling: Sampling, breakers: Sequence[frozenset[int]], seed: int | None):
        self._settings = sampling
        self._breakers = breakers
        self._random = np.random.default_rng(None if seed is None else seed % 2**64)
        self._bias = dict(sampling.logit_bias)
        self._temperature = float(_or(sampling.temperature, _TEMPERATURE))
        top_p, min_p = _or(sampling.top_p, _TOP_P), _or(sampling.min_p, _MIN_P)
        cuts: tuple[tuple[Callable[[Floats], Any], bool], ...] = (
            (self._typical, _or(sampling.typical_p, 1.0) < 1),
            (lambda w: slice(_reaching(w, top_p)), top_p < 1),
            (lambda w: slice(max(1, np.count_nonzero(w >= min_p * w[0]))), min_p > 0),
            (self._xtc, _or(sampling.xtc_probability, 0.0) > 0),
        )
        self._cuts = [cut for cut, is_on in cuts if is_on]
        """Each takes the weights of the candidates; it returns the indices to keep, in order."""

    def choose(self, logits: Floats, history: Sequence[int], output: Sequence[int]) -> int:
        """Return the next token.

        ``logits`` is modified; those of tokens that a grammar forbids are −inf. ``history`` is the
        prompt and the output so far, ``output`` only the output.
        """
        self._penalise(logits, history, output)
        if self._temperature <= 0:
            return int(np.argmax(logits))
        # The candidates, the likeliest first. Weights are relative to it: cuts do not change them.
        tokens, scores = _top_k(logits, _or(self._settings.top_k, _TOP_K))
        weights = np.exp(scores - scores[0])
        for cut in self._cuts:
            if len(tokens) > 1:
                kept = cut(weights)
                tokens, weights = tokens[kept], weights[kept]
        heights = np.power(weights, 1 / self._temperature, dtype=np.float64).cumsum()
        chosen = int(heights.searchsorted(self._random.random() * heights[-1], side="right"))
        return int(tokens[min(chosen, len(tokens) - 1)])

    def _penalise(self, logits: Floats, history: Sequence[int], output: Sequence[int]) -> None:
        settings = self._settings
        for token, bias in self._bias.items():
            if token < len(logits):
                logits[token] += bias
        factor = min(_or(settings.repetition_penalty, 1.0), _HIGHEST)
        if factor != 1.0 and history:
            seen = np.array(history[-_PENALISED:])  # Repeated indices are assigned once.
            scores = logits[seen]
            logits[seen] = np.where(scores > 0, scores / factor, scores * factor)
        presence = _or(settings.presence_penalty, 0.0)
        frequency = _or(settings.frequency_penalty, 0.0)
        if output and (presence or frequency):
            tokens, counts = np.unique(np.asarray(output), return_counts=True)
            logits[tokens] -= presence + frequency * counts
        for token, penalty in dry_penalties(settings, history, self._breakers).items():
            logits[token] -= penalty

    def _typical(self, weights: Floats) -> Any:
        probabilities = weights / weights.sum()
        surprise = -np.log(probabilities + 1e-10)
        expected = float((probabilities * surprise).sum())
        order = np.argsort(np.abs(surprise - expected), kind="stable")
        kept = order[: _reaching(weights[order], _or(self._settings.typical_p, 1.0))]
        return np.sort(kept)

    def _xtc(self, weights: Floats) -> Any:
        """Exclude Top Choices: with a probability, drop all likely tokens but the last of them."""
        if self._random.random() >= _or(self._settings.xtc_probability, 0.0):
            return slice(None)
        least = _or(self._settings.xtc_threshold, 0.1) * weights.sum()
        return slice(max(0, np.count_nonzero(weights >= least) - 1), None)


def log_probabilities(logits: Floats) -> Floats:
    """Return the natural logarithms of the probabilities, before any sampler changed them."""
    shifted = logits - logits.max()
    result: Floats = shifted - np.log(np.exp(shifted).sum())
    return result


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _top_k(logits: Floats, k: int) -> Candidates:
    """Return the k likeliest tokens, best first, with their logits; for k ≤ 0 all allowed ones."""
    tokens = logits.argpartition(-k)[-k:] if 0 < k < len(logits) else np.arange(len(logits))
    scores = logits[tokens]
    order = np.argsort(-scores, kind="stable")
    tokens, scores = tokens[order], scores[order]
    if scores[-1] > -np.inf:
        return tokens, scores
    allowed = np.count_nonzero(np.isfinite(scores))
    return tokens[:allowed], scores[:allowed]


def _reaching(weights: Floats, mass: float) -> int:
    """Return the number of weights, in order, that add up to this share of their sum."""
    sums = weights.cumsum()
    return int(sums.searchsorted(mass * sums[-1])) + 1


_BASE, _ALLOWED_LENGTH = 1.75, 2
_LONGEST = 64
"""Maximal counted length of a repetition: the penalty is far above any logit then."""


def dry_penalties(
    sampling: Sampling, history: Sequence[int], breakers: Sequence[frozenset[int]]
) -> dict[int, float]:
    """Return the penalties of tokens that would continue a repetition.

    A token among the ``breakers`` ends a repetition.
    """
    multiplier = sampling.dry_multiplier or 0.0
    if multiplier <= 0:
        return {}
    allowed = (
        _ALLOWED_LENGTH if sampling.dry_allowed_length is None else sampling.dry_allowed_length
    )
    base = min(sampling.dry_base or _BASE, _HIGHEST)
    breaking = frozenset[int]().union(*breakers)
    last_n = sampling.dry_penalty_last_n
    if last_n is not None and last_n >= 0:
        history = history[len(history) - min(last_n, len(history)) :]
    return {
        token: min(multiplier * base ** (length - allowed), _HIGHEST)
        for token, length in _repeats(history, breaking).items()
        if length >= allowed
    }


def _repeats(history: Sequence[int], breaking: frozenset[int]) -> dict[int, int]:
    """Return the tokens that followed an earlier copy of the history's end, with its length."""
    if not history or history[-1] in breaking:
        return {}
    longest: dict[int, int] = {}
    end = len(history) - 1
    for position in range(end - 1, -1, -1):
        if history[position] != history[end]:
            continue
        length = 1
        while (
            length <= min(position, _LONGEST)
            and history[position - length] == history[end - length]
            and history[position - length] not in breaking
        ):
            length += 1
        following = history[position + 1]
        longest[following] = max(longest.get(following, 0), length)
    return longest
