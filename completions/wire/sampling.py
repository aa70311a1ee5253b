"""Sampler fields on the wire, the same for every endpoint that generates.

``temperature``, ``top_p``, the presence and frequency penalties, ``logit_bias`` and ``seed`` are
the API reference's; the others are extensions, named as local engines and their clients do.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from inference_site.http.payload import WireRequest

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
NotNegative = Annotated[float, Field(ge=0)]


class LoraAdapter(WireRequest):
    """``lora[]``: one of the model's adapters, and how much of it is applied."""

    name: str
    scale: float = 1.0


def _lora_kind(value: object) -> str:
    return "adapters" if isinstance(value, list) else "name"


LoraField = Annotated[
    Annotated[str, Tag("name")]
    | Annotated[list[LoraAdapter], Field(max_length=16), Tag("adapters")],
    Discriminator(_lora_kind),
]


class SamplingFields(WireRequest):
    """Omitted values come from the model's record, then the site's; an explicit 0 is honoured."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Probability | None = None
    typical_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    dry_multiplier: NotNegative | None = None
    dry_base: Annotated[float, Field(ge=1)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=0)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1)] | None = None
    dry_sequence_breakers: Annotated[list[str], Field(min_length=1, max_length=64)] | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    mirostat: Annotated[int, Field(ge=0, le=2)] | None = None
    mirostat_tau: NotNegative | None = None
    mirostat_eta: NotNegative | None = None

    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=64)] | None
    ) = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    lora: LoraField | None = None
    timings: bool | None = None
