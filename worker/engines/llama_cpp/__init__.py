"""llama.cpp in this process, through ``xllamacpp``: the default engine."""

from inference_site.domain.model_spec import ModelSpec
from worker.engines.llama_cpp.engine import load
from worker.engines.llama_cpp.media import modalities

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


def capabilities(spec: ModelSpec) -> frozenset[str]:
    """Return what requests to this model may ask for."""
    if "embedding" in spec.options:
        shortened = {"dimensions"} if spec.options.get("matryoshka") else set()
        return frozenset({"embeddings", "tokens", *shortened})
    optional = {"suffix": "fim_tokens" in spec.options, "lora": bool(spec.lora_adapters)}
    return _GENERATES | modalities(spec) | {name for name, has in optional.items() if has}


__all__ = ["OPTIONS", "capabilities", "load"]
