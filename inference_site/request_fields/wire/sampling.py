"""Sampler fields on the wire, the same for every endpoint that generates.

``temperature``, ``top_p``, the presence and frequency penalties, ``logit_bias`` and ``seed`` are
the API reference's; the others are extensions, named as local engines and their clients do.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from inference_site.api.payload import WireRequest
from inference_site.catalogue.sampler_fields import Bias, SamplerFields


class LoraAdapter(WireRequest):
    """``lora[]``: one of the model's adapters, and how much of it is applied.

    It is named, or has the number of ``GET /lora-adapters``, as in llama-server.
    """

    name: str | None = None
    id: Annotated[int, Field(ge=0)] | None = None
    scale: float = 1.0


def _lora_kind(value: object) -> str:
    return "adapters" if isinstance(value, list) else "name"


LoraField = Annotated[
    Annotated[str, Tag("name")]
    | Annotated[list[LoraAdapter], Field(max_length=16), Tag("adapters")],
    Discriminator(_lora_kind),
]


class SamplingFields(SamplerFields, WireRequest):
    """Omitted values come from the model's record, then the site's; an explicit 0 is honoured."""

    logit_bias: dict[str, Bias] | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=64)] | None
    ) = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    lora: LoraField | None = None
    timings: bool | None = None
