"""What models on llama.cpp may be asked for, and their options."""

from __future__ import annotations

from inference_site.domain.model_spec import ModelSpec

OPTIONS = frozenset(
    {
        "chat_template",
        "chat_template_kwargs",
        "embedding",
        "fim_tokens",
        "matryoshka",
        "mmproj",
        "modalities",
        "prompt_cache_mib",
    }
)
_GENERATES = frozenset(
    {
        *("chat", "completions", "render", "tokens"),
        *("cache_prompt", "chat_template", "choices", "grammar", "logprobs", "response_prefix"),
        *("mirostat", "stop_token_ids", "tools"),
    }
)
MODALITIES = ("vision", "audio")


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
