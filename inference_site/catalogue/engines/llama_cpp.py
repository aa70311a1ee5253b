"""What models on llama.cpp may be asked for, and their options."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, ValidationInfo, field_validator

from inference_site.catalogue.engines.chat import ChatOptions
from inference_site.catalogue.operator_settings import FileName
from inference_site.domain.model_spec import ModelSpec

_GENERATES = frozenset(
    {
        *("chat", "completions", "render", "tokens"),
        *("cache_prompt", "chat_template", "choices", "grammar", "logprobs", "response_prefix"),
        *("mirostat", "prompt_logprobs", "stop_token_ids", "tools"),
    }
)


class LlamaCppOptions(ChatOptions):
    """What llama.cpp has beside the settings that all engines share.

    ``embedding`` is how tokens are pooled, and makes it a model for embeddings only, which may be
    shortened if it is a ``matryoshka``. ``fim_tokens`` mark what is before, after and in the middle
    for a completion with a suffix. ``mmproj`` is the GGUF file of a projector, for the
    ``modalities``. ``prompt_cache_mib`` is host memory for prompts that lost their slot, for which
    llama.cpp itself would take 8 GiB.
    """

    embedding: Literal["mean", "cls", "last"] | None = None
    fim_tokens: Annotated[tuple[str, str, str], Field(strict=False)] | None = None
    matryoshka: bool = False
    mmproj: FileName | None = None
    modalities: list[Literal["vision", "audio"]] = ["vision"]
    prompt_cache_mib: NonNegativeInt = 256

    @field_validator("modalities")
    @classmethod
    def _need_projector(cls, value: list[str], info: ValidationInfo) -> list[str]:
        if value and info.data.get("mmproj") is None:
            raise ValueError("needs a projector, 'mmproj'")
        return value


def modalities(spec: ModelSpec) -> frozenset[str]:
    """Return what the model perceives beside text: what its projector is for, images by default."""
    if "mmproj" not in spec.options:
        return frozenset()
    return frozenset(spec.options.get("modalities", ["vision"]))


def capabilities(spec: ModelSpec) -> frozenset[str]:
    """Return what requests to this model may ask for."""
    if "embedding" in spec.options:
        shortened = {"dimensions"} if spec.options.get("matryoshka") else set()
        return frozenset({"embeddings", "tokens", *shortened})
    optional = {"suffix": "fim_tokens" in spec.options, "lora": bool(spec.lora_adapters)}
    return _GENERATES | modalities(spec) | {name for name, has in optional.items() if has}
