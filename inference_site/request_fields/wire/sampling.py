"""Sampler fields on the wire, the same for every endpoint that generates.

``temperature``, ``top_p``, the presence and frequency penalties, ``logit_bias`` and ``seed`` are
the API reference's; the others are extensions, named as local engines and their clients do.
"""

from __future__ import annotations

from typing import Annotated, Any

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


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=1_000)]


class ServerFields(WireRequest):
    """Fields of vLLM's that are passed on to engines which have them."""

    logprob_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=256)]
        | None
    ) = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: int | None = None
    vllm_xargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None


class TokenReportFields(WireRequest):
    """Fields of vLLM's that ask for the tokens of an answer and of its prompt.

    ``return_tokens_as_token_ids`` names the tokens of log probabilities ``token_id:ID``.
    """

    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class SamplingFields(SamplerFields, ServerFields):
    """Omitted values come from the model's record, then the site's; an explicit 0 is honoured."""

    logit_bias: dict[str, Bias] | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=64)] | None
    ) = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    lora: LoraField | None = None
    timings: bool | None = None
