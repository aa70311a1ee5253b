"""Sampler settings and their bounds, as requests, entries and ``SAMPLING`` write them.

The names are those of ``domain.request.Sampling``, which holds the parsed values.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

from pydantic import BaseModel, Field

from inference_site.catalogue.operator_settings import OperatorSettings
from inference_site.core.domain.request import Sampling

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
NotNegative = Annotated[float, Field(ge=0)]
MAX_BIAS = 100
"""Minus this bias forbids a token; this bias forbids all tokens without it."""
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
_TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=False)]  # JSON keys are strings.


class SamplerFields(BaseModel):
    """The fields that requests and defaults share: all but ``logit_bias``, whose keys differ."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Probability | None = None
    typical_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    dry_multiplier: NotNegative | None = None
    dry_base: Annotated[float, Field(ge=1)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=0)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1)] | None = None
    dry_sequence_breakers: (
        Annotated[list[Annotated[str, Field(max_length=256)]], Field(min_length=1, max_length=64)]
        | None
    ) = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    mirostat: Annotated[int, Field(ge=0, le=2)] | None = None
    mirostat_tau: NotNegative | None = None
    mirostat_eta: NotNegative | None = None

    def to_sampling(self, biases: dict[int, float]) -> Sampling:
        """Return the domain's value."""
        breakers = self.dry_sequence_breakers
        return Sampling(
            **{name: getattr(self, name) for name in _UNCHANGED},
            dry_sequence_breakers=None if breakers is None else tuple(breakers),
            logit_bias=tuple(biases.items()),
        )


_UNCHANGED = {field.name for field in fields(Sampling)} - {"logit_bias", "dry_sequence_breakers"}


class SamplerDefaults(SamplerFields, OperatorSettings):
    """An operator's defaults for fields that a request leaves out."""

    logit_bias: dict[_TokenId, Bias] | None = None

    def to_defaults(self) -> Sampling:
        """Return the domain's value."""
        return self.to_sampling(self.logit_bias or {})
