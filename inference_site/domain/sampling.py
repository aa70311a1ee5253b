"""Sampler settings of one request."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampler settings. ``None`` means "the model's own default"; an explicit 0 is honoured.

    ``repetition_penalty`` multiplies (1 is off), the presence and frequency penalties subtract.
    ``dry_*`` is the DRY sampler ("don't repeat yourself"), ``xtc_*`` "exclude top choices";
    both are off until their multiplier or probability is above 0. ``logit_bias`` holds pairs of a
    token id of the served model and what is added to its logit.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: tuple[str, ...] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None

    def over(self, defaults: Sampling) -> Sampling:
        """Return these settings, and the defaults for what is left out."""
        if self == _NOTHING:
            return defaults
        if defaults == _NOTHING:
            return self
        left_out = {
            name: value
            for name in self.__slots__
            if getattr(self, name) in (None, ()) and (value := getattr(defaults, name)) is not None
        }
        return replace(self, **left_out) if left_out else self


_NOTHING = Sampling()
