"""DRY ("don't repeat yourself"): the longer a repetition would get, the less likely its next token.

Source: https://github.com/oobabooga/text-generation-webui/pull/5677
"""

from __future__ import annotations

from collections.abc import Sequence

from inference_site.domain.request import Sampling

_BASE, _ALLOWED_LENGTH = 1.75, 2
_LONGEST = 64
"""Tokens of a repetition that count: beyond them the penalty is far above any logit."""


def dry_penalties(
    sampling: Sampling, history: Sequence[int], breakers: Sequence[frozenset[int]]
) -> dict[int, float]:
    """Return what is subtracted from the logits of tokens that would go on with a repetition.

    A repetition does not reach across a token that is among the ``breakers``.
    """
    multiplier = sampling.dry_multiplier or 0.0
    if multiplier <= 0:
        return {}
    allowed = (
        _ALLOWED_LENGTH if sampling.dry_allowed_length is None else sampling.dry_allowed_length
    )
    base = sampling.dry_base or _BASE
    breaking = frozenset[int]().union(*breakers)
    return {
        token: multiplier * base ** (length - allowed)
        for token, length in _repeats(_looked_at(sampling, history), breaking).items()
        if length >= allowed
    }


def _looked_at(sampling: Sampling, history: Sequence[int]) -> Sequence[int]:
    last_n = sampling.dry_penalty_last_n
    if last_n is None or last_n < 0:
        return history
    return history[len(history) - min(last_n, len(history)) :]


def _repeats(history: Sequence[int], breaking: frozenset[int]) -> dict[int, int]:
    """Return, for each token that once followed the end of the history, the longest such end."""
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
