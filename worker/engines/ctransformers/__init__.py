"""ctransformers in this process: completions from models of the GGML era."""

from worker.engines.base import ModelSpec
from worker.engines.ctransformers.engine import load

OPTIONS = frozenset({"lib", "model_type"})
_CAPABILITIES = frozenset(
    {"cache_prompt", "choices", "completions", "grammar", "logprobs", "stop_token_ids", "tokens"}
)


def capabilities(spec: ModelSpec) -> frozenset[str]:
    """Return what requests to this model may ask for."""
    return _CAPABILITIES


__all__ = ["OPTIONS", "capabilities", "load"]
